"""Losses, metrics and random numbers of the global batch."""
