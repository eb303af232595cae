"""Pipelined model parallelism: each rank trains one stage of a model."""
