"""Python functions of TensorFlow's graphs, which it can forget."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf.numpy_functions import NumpyFunctions

pytestmark = pytest.mark.smoke


class Owner:
    def __init__(self, is_forgotten):
        self._call = NumpyFunctions() if is_forgotten else tf.numpy_function

    def doubled(self, x):
        return self._call(self._doubled, [x], tf.float32)

    def _doubled(self, x):
        return 2 * x


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_an_owner_is_freed_whose_functions_were_traced(is_forgotten):
    """Without that it stays, or this module is no longer needed."""
    owner = Owner(is_forgotten)
    step = tf.function(owner.doubled)
    for x in (tf.constant([3.0]), tf.constant([4.0])):
        np.testing.assert_array_equal(step(x), 2 * x)
    np.testing.assert_array_equal(owner.doubled(x), 2 * x)
    held = weakref.ref(owner)
    del owner, step
    gc.collect()
    assert (held() is None) == is_forgotten
