"""Models whose functions are traced anew."""

import copy
import gc
import weakref

import keras
import numpy as np

from keras_sparsity.tables.readers import Readers


class Noting(keras.layers.Layer):
    """Is read by models that call it."""

    def __init__(self):
        super().__init__()
        self.readers = Readers()

    def call(self, inputs):
        self.readers.note()
        return inputs


def predicted(layer, is_traced=True):
    """A model that has predicted, and its function."""
    model = keras.Sequential([keras.Input((1,)), layer])
    model.run_eagerly = not is_traced
    model.predict(np.zeros((2, 1)), verbose=0)
    return model, model.predict_function


def test_functions_of_models_that_read_are_dropped():
    layer, others = Noting(), Noting()
    model, function = predicted(layer)
    kept, of_kept = predicted(layer)
    eager, of_eager = predicted(layer, is_traced=False)
    other, of_other = predicted(others)
    layer.readers.trace_anew(but_for=[kept])
    assert model.predict_function is not function
    assert model.test_function is None
    assert kept.predict_function is of_kept
    assert eager.predict_function is of_eager
    assert other.predict_function is of_other


def test_models_are_freed_and_copies_have_none():
    layer = Noting()
    model, function = predicted(layer)
    copy.deepcopy(layer.readers).trace_anew()
    assert model.predict_function is function
    freed = weakref.ref(model)
    del model, function
    gc.collect()
    assert freed() is None
