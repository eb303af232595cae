"""Custom gradients of TensorFlow, which it can forget."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf import custom_gradients

pytestmark = pytest.mark.smoke


@tf.custom_gradient
def doubled(x):
    return 2 * x, lambda upstream: 3 * upstream


def gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = doubled(x)
    return tape.gradient(y, x)


class Owner:
    pass


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_graph_is_freed_with_the_owner(is_forgotten):
    """Without that it stays, or this module is no longer needed."""
    graphs, owners = [], [Owner()]

    @tf.function
    def step(x):
        graphs.append(weakref.ref(x.graph))
        result = gradient(tf.stack(tf.identity_n([x])))[0]
        if is_forgotten:
            custom_gradients.forget_with(owners[0])
        return result

    np.testing.assert_equal(step(tf.constant(1.0)).numpy(), 3.0)
    del step
    gc.collect()
    assert graphs[0]() is not None
    owners.clear()
    gc.collect()
    assert (graphs[0]() is None) is is_forgotten


def test_nothing_is_forgotten_of_eager_steps():
    custom_gradients.forget_with(Owner())
