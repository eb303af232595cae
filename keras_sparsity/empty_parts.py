"""Models on parts of a batch that have no examples.

A batch smaller than the number of ranks leaves some of them nothing.
BatchNormalization divides by its number of examples, and some of TensorFlow's
kernels refuse tensors without rows: the model then gets one example of zeros
in place of none, and its outputs for it are cut off again. What is cut off
has no gradient, so it trains nothing.
"""

import keras
import tensorflow as tf

from keras_sparsity import compat
from keras_sparsity.data.batches import num_rows
from keras_sparsity.layers import sampled_softmax


def call(stock, inputs, *args, **kwargs):
    """Calls a model's `call` on inputs that may be without examples.

    Args:
        stock: the model's own `call`.
        inputs: structure of tensors with a common batch axis.
        *args: further arguments of `call`.
        **kwargs: and those by name.

    Returns:
        What `stock` returns, with as many rows as the inputs have.

    Example:

    >>> means = call(lambda x: x / tf.cast(tf.shape(x)[0], x.dtype),
    ...              tf.zeros((0, 2)))
    >>> means.shape
    TensorShape([0, 2])
    """
    is_empty = _is_empty(inputs)
    if is_empty is False:
        return stock(inputs, *args, **kwargs)
    outputs = stock(_fill(inputs, is_empty), *args, **kwargs)
    return _cut(outputs, is_empty)


def filled(inputs):
    """The inputs as `call` gives them to a model."""
    is_empty = _is_empty(inputs)
    return inputs if is_empty is False else _fill(inputs, is_empty)


def number(inputs):
    """Of the examples that inputs have: a scalar."""
    return num_rows(_leaves(inputs)[0])


def combine_statistics(model, batch, communicator):
    """Gives every rank the mean of the ranks' moving statistics.

    BatchNormalization moves its statistics towards those of the rank's own
    part; their mean, weighted by the numbers of examples, goes on as one.
    """
    statistics = [
        statistic
        for layer in compat.all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
        for statistic in (layer.moving_mean, layer.moving_variance)
    ]
    if not statistics:
        return
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    rows = num_rows(tf.nest.flatten(inputs)[0])
    sums = [
        tf.where(rows > 0, v.value * tf.cast(rows, v.dtype), tf.zeros_like(v))
        for v in statistics
    ]
    *sums, total = communicator.all_reduce(
        [*sums, tf.cast(rows, tf.float32)], name="model/statistics"
    )
    for statistic, value in zip(statistics, sums, strict=True):
        statistic.assign(value / tf.cast(total, statistic.dtype))


def _is_empty(inputs):
    """Whether there is no example; True and False if known beforehand."""
    shape = tf.TensorShape(_leaves(inputs)[0].shape)  # of an array, too
    rows = shape[0] if shape.rank else None
    if rows is not None:  # as those of a single batch are
        return rows == 0
    return tf.equal(number(inputs), 0)


def _leaves(inputs):
    return [x for x in tf.nest.flatten(inputs) if x is not None]


def _fill(inputs, is_empty):
    """The inputs, or one example of zeros where there is none."""

    def fill(leaf):
        if leaf is None:
            return None
        if isinstance(leaf, tf.RaggedTensor):
            one = tf.RaggedTensor.from_row_splits(
                leaf.values[:0], tf.zeros([2], leaf.row_splits.dtype)
            )
            return _cond(is_empty, lambda: one, lambda: leaf)
        if isinstance(leaf, tf.SparseTensor):
            shape = tf.concat(
                [tf.maximum(leaf.dense_shape[:1], 1), leaf.dense_shape[1:]], 0
            )
            return tf.SparseTensor(leaf.indices, leaf.values, shape)
        leaf = tf.convert_to_tensor(leaf)
        one_shape = tf.concat([[1], tf.shape(leaf)[1:]], axis=0)
        filled = _cond(
            is_empty, lambda: tf.zeros(one_shape, leaf.dtype), lambda: leaf
        )
        return _with_shape_of(leaf, filled)

    return tf.nest.map_structure(fill, inputs)


def _cut(outputs, is_empty):
    """The outputs, without the row that stood in where there was none."""

    def cut(leaf):
        if isinstance(leaf, tf.RaggedTensor):
            return _cond(is_empty, lambda: leaf[:0], lambda: leaf)
        mask = compat.keras_mask(leaf)
        kept = _cond(is_empty, lambda: leaf[:0], lambda: leaf)
        kept = _with_shape_of(leaf, kept)
        if mask is not None:
            compat.set_keras_mask(kept, cut(mask))
        # Of probabilities alone, losses would clip what is near 0 or 1.
        logits = compat.keras_logits(leaf)
        if logits is not None:
            compat.set_keras_logits(kept, cut(logits))
        sampled_softmax.copy_origin(leaf, kept)
        return kept

    return tf.nest.map_structure(cut, outputs)


def _cond(is_true, then, otherwise):
    return then() if is_true is True else tf.cond(is_true, then, otherwise)


def _with_shape_of(leaf, other):
    if not tf.executing_eagerly() and leaf.shape.rank is not None:
        other.set_shape([None, *leaf.shape[1:]])
    return other
