"""Sums and denominators of a loss over one rank's part of a batch.

They follow `keras.losses.Loss.__call__` up to the division.
"""

import typing

import keras
import tensorflow as tf

from keras_sparsity._tf import contexts, keras_losses
from keras_sparsity.data import empty_parts
from keras_sparsity.global_batch import loss_scale
from keras_sparsity.layers.sampled_softmax_loss import SampledSoftmaxLoss

# Losses of Keras that may be no sums over examples: Dice and Tversky are
# quotients of sums over some axes, by default all, cosine similarity one of
# sums over an axis; Circle compares examples in pairs.
_QUOTIENTS = ("dice", "tversky")
_OF_AN_AXIS = ("cosine_similarity",)
_PAIRWISE = ("circle",)


class Terms(typing.NamedTuple):
    """One rank's terms: the loss is `total * factor(counts)` of their sums.

    Attributes:
        total: the sum of the values, a scalar.
        counts: list of scalars, of which the denominator is made.
        factor: function of the ranks' summed counts that returns a scalar.
        counts_come_first: whether the counts are known before the outputs.
    """

    total: tf.Tensor
    counts: list
    factor: typing.Callable
    counts_come_first: bool = False

    def of_examples(self):
        """The same, or zeros where this rank's part is a stand-in."""
        has_examples = empty_parts.has_examples()
        if has_examples is True:
            return self

        def select(term):
            return tf.where(has_examples, term, tf.zeros_like(term))

        counts = [select(tf.convert_to_tensor(each)) for each in self.counts]
        return self._replace(total=select(self.total), counts=counts)


def needs_whole_batch(loss):
    """Whether a Keras loss is no sum over examples."""
    name = _name_in_keras(loss)
    if name not in (*_QUOTIENTS, *_OF_AN_AXIS):
        return name in _PAIRWISE
    axis = keras_losses.function_arguments(loss).get("axis")
    if axis is None:
        return name in _QUOTIENTS
    return 0 in keras.tree.flatten(axis)


def local_terms(loss, y_true, y_pred, sample_weight):
    """One rank's values of a Keras loss, and their `Terms`.

    None in place of these for losses that are not reduced.
    """
    rows = _num_examples(y_pred)
    in_mask = keras_losses.keras_mask(y_pred)
    is_weighted = type(loss).__call__ is not keras.losses.Loss.__call__
    if is_weighted:  # by itself
        unreduced = contexts.attribute(loss, "reduction", "none")
        with unreduced, loss_scale.of_own_part():
            values = loss(y_true, y_pred, sample_weight)
        mask = in_mask
    else:
        with loss_scale.of_own_part():  # it may consist of others
            values = _values(loss, y_true, y_pred)
        mask = _both(in_mask, keras_losses.keras_mask(values))
        values = keras.ops.convert_to_tensor(values, dtype=loss.dtype)
    weights = _weights(sample_weight, mask, values.dtype)
    is_reduced = loss.reduction not in (None, "none")
    if values.shape.rank == 0 and (is_reduced or weights is None):
        weights = None if is_weighted else weights
        return values, _scalar_terms(values, rows, weights, mask, loss)
    if weights is not None and not is_weighted:
        values, weights = keras_losses.match_ranks(values, weights)
        values = values * weights
    if not is_reduced:
        return values, None
    return values, _terms_of_values(loss, values, y_true, weights, mask)


def _terms_of_values(loss, values, y_true, weights, mask):
    count = _count_before(loss, values, y_true)
    if count is None:
        return _terms(values, tf.size(values), weights, mask, loss.reduction)
    is_so = tf.debugging.assert_equal(
        count,
        tf.size(values),
        f"The loss '{loss.name}' needs as many targets as outputs.",
    )
    with tf.control_dependencies([is_so]):
        values = tf.identity(values)
    terms = _terms(values, count, weights, mask, loss.reduction)
    return terms._replace(counts_come_first=True)


def _count_before(loss, values, y_true):
    """The number of values, where it is known before they are; or None."""
    of_example = values.shape[1:]
    name = _name_in_keras(loss)
    has_one_of_each_example = type(loss) is SampledSoftmaxLoss or (
        name is not None
        and name not in (*_QUOTIENTS, *_PAIRWISE)
        and not needs_whole_batch(loss)
    )
    if not (has_one_of_each_example and of_example.is_fully_defined()):
        return None
    if values.shape.is_fully_defined():
        return tf.constant(values.shape.num_elements())
    if _is_one_for_all(y_true):
        return None
    return _num_examples(y_true) * of_example.num_elements()


def _terms(values, count, weights, mask, reduction):
    """Terms of values (already weighted) of each example or place."""
    total = keras.ops.sum(values)
    if reduction == "sum":
        return Terms(total, [], lambda counts: tf.ones(()))
    if reduction == "mean_with_sample_weight" and weights is not None:
        return Terms(total, [keras.ops.sum(weights)], _reciprocal)
    if mask is None or reduction == "mean_with_sample_weight":
        return Terms(total, [count], _reciprocal)
    valid = keras.ops.sum(keras.ops.cast(mask, "float32"))
    # Keras's rule; 1 / valid when the mask has the values' shape.
    return Terms(
        total,
        [count, tf.size(mask), valid],
        lambda counts: (
            _reciprocal(counts)
            * tf.math.divide_no_nan(_float(counts[1]), _float(counts[2]))
        ),
    )


def _scalar_terms(value, rows, weights, mask, loss):
    """Terms of a loss function that returns one scalar for the batch."""
    # The mean of no examples is NaN; it must count nothing.
    value = tf.where(rows > 0, value, tf.zeros_like(value))
    if loss.reduction == "sum":
        terms = Terms(value, [], lambda counts: tf.ones(()))
    else:
        terms = Terms(value * tf.cast(rows, value.dtype), [rows], _reciprocal)
    if weights is None:
        return terms
    # Keras multiplies the scalar by each weight and reduces the products.
    size = tf.size(weights)
    weighing = _terms(weights, size, weights, mask, loss.reduction)
    split = len(terms.counts)
    return Terms(
        terms.total,
        [*terms.counts, weighing.total, *weighing.counts],
        lambda counts: (
            terms.factor(counts[:split])
            * _float(counts[split])
            * weighing.factor(counts[split + 1 :])
        ),
    )


def _name_in_keras(loss):
    """The name of a loss's function, if it is one of Keras's; else None."""
    function = getattr(loss, "fn", None)
    name = getattr(function, "__name__", None)
    is_of_keras = getattr(keras.losses, str(name), None) is function
    return name if is_of_keras else None


def _is_one_for_all(y_true):
    """Whether targets may be broadcast to outputs, as `loss(1.0, y_pred)`."""
    shape = keras.ops.shape(keras.tree.flatten(y_true)[0])
    return len(shape) == 0 or (isinstance(shape[0], int) and shape[0] == 1)


def _num_examples(structure):
    return tf.shape(keras.tree.flatten(structure)[0])[0]


def _reciprocal(counts):
    return tf.math.reciprocal_no_nan(_float(counts[0]))


def _float(count):
    return count if count.dtype == tf.float64 else tf.cast(count, tf.float32)


def _values(loss, y_true, y_pred):
    y_true, y_pred = keras.tree.map_structure(
        lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype),
        (y_true, y_pred),
    )
    return loss.call(y_true, y_pred)


def _both(one, other):
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _weights(sample_weight, mask, dtype):
    """Sample weights, 0 where masked; None when there are neither."""
    if sample_weight is not None:
        sample_weight = keras.ops.convert_to_tensor(sample_weight, dtype=dtype)
    if mask is None:
        return sample_weight
    valid = keras.ops.cast(mask, dtype)
    if sample_weight is None:
        return valid
    valid, sample_weight = keras_losses.match_ranks(valid, sample_weight)
    return valid * sample_weight
