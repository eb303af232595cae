"""Makes a compiled Keras model train over all processes.

`strategy.scope()` replaces `Model.compile` for as long as it is entered; what
is compiled meanwhile is *adopted*: its optimizer and losses are wrapped, its
tables spread, and the methods through which Keras trains, evaluates, predicts
and saves are bound, on this model alone, to versions that involve all ranks.
"""

from keras_sparsity.adoption.compiling import compile_adopts

__all__ = ["compile_adopts"]
