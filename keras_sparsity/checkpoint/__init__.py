"""Training state on disk, written by all ranks and read by any number."""
