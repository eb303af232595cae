"""How sparse each variable is, counted while the model trains."""

from keras_sparsity.sparsity.alpha import (
    VariableSparsity,
    measured,
    popularity,
    reset,
)

__all__ = ["VariableSparsity", "measured", "popularity", "reset"]
