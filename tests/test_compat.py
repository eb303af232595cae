"""Each private name that is used, so that a new version says which broke."""

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity import compat


def test_resolve_loss():
    assert compat.resolve_loss(None) is None
    assert compat.resolve_loss("mse").name == "mse"
    y_true, y_pred = tf.zeros([2]), tf.zeros([2, 3])
    loss = compat.resolve_loss("crossentropy", y_true, y_pred)
    assert loss.fn is keras.losses.sparse_categorical_crossentropy


def test_match_ranks():
    values, weights = compat.match_ranks(tf.zeros([4]), tf.zeros([4, 1]))
    assert values.shape == weights.shape == (4, 1)


def test_keras_mask():
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[0, 1]]))
    np.testing.assert_array_equal(compat.keras_mask(embedded), [[False, True]])
    assert compat.keras_mask(tf.zeros([1])) is None


def test_losses_are_scaled():
    is_old = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 6)
    assert compat.losses_are_scaled() is not is_old


def test_dataset_inputs():
    dataset = tf.data.Dataset.range(2)
    assert compat.dataset_inputs(dataset) == []
    assert compat.dataset_inputs(dataset.batch(2)) == [dataset]


def test_array_orders_change():
    from keras.src.trainers.data_adapters import array_data_adapter

    def orders():
        keras.utils.set_random_seed(4)
        stock = tf.random.shuffle
        with compat.array_orders_change(5):
            dataset = array_data_adapter.ArrayDataAdapter(
                np.arange(12), batch_size=5, shuffle=True
            ).get_tf_dataset()
        assert tf.random.shuffle is stock
        return [np.concatenate(list(dataset)).tolist() for _ in range(3)]

    first, second, third = orders()
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second != third
    assert orders() == [first, second, third]
