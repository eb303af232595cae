"""Callbacks for training over several processes."""
