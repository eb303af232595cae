"""Pipelined model parallelism: each rank trains one stage of a model.

Not public yet. `fit`, `evaluate` and `predict` give the result of one process;
but a rank still holds the other stages' weights, as they were at the start, so
that saving a model or reading all of its weights gives no trained model.
Horovod takes two ranks: it adds groups of ranks only when it starts.
"""
