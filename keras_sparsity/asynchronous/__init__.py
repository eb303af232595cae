"""Training with weights that are some updates old."""
