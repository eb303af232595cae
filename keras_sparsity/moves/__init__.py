"""Moves tables to another placement while they train."""

from keras_sparsity.moves.moving import move, repartition

__all__ = ["move", "repartition"]
