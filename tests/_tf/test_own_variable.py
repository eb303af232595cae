"""Variables that live on beside those of TensorFlow and Keras."""

import gc

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf.own_variable import OwnVariable

pytestmark = pytest.mark.smoke


def test_it_is_made_in_any_trace_and_counts_in_loops():
    made = []

    @tf.function
    def step(x):
        counter = OwnVariable([0, 0, 0], tf.int32)
        made.append(counter)
        for _ in tf.range(3):
            tf.cond(x[0] > 0, lambda: counter.add([1, 0, 2]), tf.no_op)
        counter.add_at(tf.constant([1, 1]), 5)
        return counter.read()

    for size in (1, 2):  # a second trace, too
        for _ in range(2):
            result = step(tf.ones([size]))
        np.testing.assert_array_equal(result, [6, 20, 12])
    for counter in made:
        np.testing.assert_array_equal(counter.numpy(), [6, 20, 12])
    assert len(made) == 2


def test_its_shape_may_change():
    variable = OwnVariable([], tf.int64, [None])
    assert variable.numpy().tolist() == []
    variable.assign(tf.range(3, dtype=tf.int64))
    assert variable.numpy().tolist() == [0, 1, 2]


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_it_is_freed():
    size = 1 << 23  # 32 MiB each
    before = resident_bytes()
    for _ in range(16):
        variable = OwnVariable(np.ones(size), tf.int32)
        assert variable.numpy().shape == (size,)
    del variable
    gc.collect()
    assert resident_bytes() - before < 8 * 4 * size
