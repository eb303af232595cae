"""Makes a compiled Keras model train over all processes.

`strategy.scope()` replaces `Model.compile` while it is entered. A model that is
compiled meanwhile is *adopted*: its optimizer and losses are wrapped, its
tables sharded, and the methods through which Keras trains, evaluates, predicts
and saves are bound, on this model alone, to versions that involve all ranks.
"""
