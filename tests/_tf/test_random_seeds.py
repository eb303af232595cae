"""Each private name that is used, so that a new version says which broke."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf import random_seeds

pytestmark = pytest.mark.smoke


def test_global_seed():
    before = random_seeds.global_seed()
    try:
        tf.random.set_seed(None)
        assert random_seeds.global_seed() is None
        tf.random.set_seed(7)
        assert random_seeds.global_seed() == 7
    finally:
        tf.random.set_seed(before)


def test_random_operations_seeded():
    def draw(change=None):
        keras.utils.clear_session()  # Keras 3.5 keeps its generator else.
        keras.utils.set_random_seed(4)
        seeded = (
            random_seeds.random_operations_seeded(change)
            if change
            else contextlib.nullcontext()
        )
        with seeded:
            inside = [keras.random.normal((3,)), tf.random.normal((3,))]
        later = [keras.random.normal((3,)), tf.random.normal((3,))]
        return [np.array(drawn) for drawn in (*inside, *later)]

    stock, other = draw(), draw(lambda seed: seed + 5)
    for one, two in zip(stock[:2], other[:2], strict=True):
        assert np.abs(one - two).min() > 1e-4
    np.testing.assert_array_equal(stock[2:], other[2:])
    np.testing.assert_array_equal(stock, draw(lambda seed: seed))

    @tf.function
    def traced(difference):
        with random_seeds.random_operations_seeded(
            lambda seed: seed + difference
        ):
            return tf.random.normal((3,)), keras.random.normal((3,))

    tf.random.set_seed(4)
    for one, two in zip(traced(0), traced(5), strict=True):
        assert np.abs(one - two).min() > 1e-4


def test_array_orders_change():
    from keras.src.trainers.data_adapters import array_data_adapter

    def orders():
        keras.utils.set_random_seed(4)
        stock = tf.random.shuffle
        with random_seeds.array_orders_change(5):
            dataset = array_data_adapter.ArrayDataAdapter(
                np.arange(12), batch_size=5, shuffle=True
            ).get_tf_dataset()
        assert tf.random.shuffle is stock
        return [np.concatenate(list(dataset)).tolist() for _ in range(3)]

    first, second, third = orders()
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second != third
    assert orders() == [first, second, third]
