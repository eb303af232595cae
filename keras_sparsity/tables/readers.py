"""Models whose traced functions read a table, or an `Embedding`'s rows."""

import weakref

import tensorflow as tf

from keras_sparsity._tf import keras_models, keras_scopes


class Readers:
    """Models that read something where it is now.

    Functions that are traced anew find it where it is then. Those of a tower
    that shares a table need it, which no strategy knows.
    """

    def __init__(self):
        self._models = weakref.WeakSet()

    def __reduce__(self):  # a copy of a table is read by nobody
        return Readers, ()

    def note(self):
        """Notes the model that is called by the function being traced."""
        if tf.executing_eagerly():
            return
        model = keras_scopes.called_model()
        if model is not None:
            self._models.add(model)

    def trace_anew(self, but_for=()):
        """Drops the functions that were traced of these models.

        Args:
            but_for: models that keep theirs.
        """
        for model in self._models.difference(but_for):
            keras_models.drop_functions(model)
