"""Failures of ranks, mismatches between them and hanging collectives."""
