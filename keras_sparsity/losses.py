"""Losses of the global batch, computed from each rank's part of it.

Keras divides a loss by the number of elements *this rank* holds (masked ones
and weights considered) and then by the number of ranks. That is the global
mean only when every rank holds equally many; a ragged last batch, a mask or
weights make it another number. Here each rank sends its sum and its
denominator in one small all-reduce, and all of them get what one process gets
on the whole batch.
"""

import contextlib
import functools
import typing

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity import checks, compat, empty_parts
from keras_sparsity import collectives as collectives_module
from keras_sparsity.layers.sampled_softmax import SampledSoftmaxLoss

__all__ = ["GlobalMean", "globalize"]

# Keras decides what these names mean when it has seen the outputs' shapes.
_DECIDED_BY_SHAPE = ("crossentropy", "ce")

# Losses of Keras that no sum over examples gives: Dice and Tversky are
# quotients of sums over the whole batch, Circle compares examples in pairs.
_QUOTIENTS = ("dice", "tversky")
_PAIRWISE = ("circle",)


def globalize(loss, collectives=None):
    """Maps `compile`'s `loss` to one whose value is of the global batch.

    Args:
        loss: what `Model.compile` takes: a name, a function, a
            `keras.losses.Loss`, None, or a list, tuple or dict of these.
        collectives: the processes that share each batch; the current ones
            when None.

    Returns:
        The same structure with each loss in a `GlobalMean`; in one process
        the argument itself.

    Example:

    >>> globalize("mse")  # one process: nothing to share
    'mse'
    """

    def wrap(leaf):
        if leaf is None or isinstance(leaf, GlobalMean):
            return leaf
        return GlobalMean(leaf, collectives=collectives)

    # In one process too: what is wrong there is wrong everywhere.
    wrapped = keras.tree.map_structure(wrap, loss)
    return loss if _or_current(collectives).size == 1 else wrapped


# What losses give at this moment, see the functions that set it.
_mode = "of global batch"


@contextlib.contextmanager
def _in_mode(mode):
    global _mode
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def as_keras_multiplies():
    """While entered, values are divided by the number of replicas.

    For what Keras multiplies by it again: the losses of its own steps.
    """
    return _in_mode("as Keras multiplies")


@contextlib.contextmanager
def of_own_part():
    """While entered, Keras's losses are what one process gives for this part.

    Where another sum counts the parts: within a loss, in a layer, a metric.
    """
    with _in_mode("of own part"), compat.losses_are_not_scaled():
        yield


@contextlib.contextmanager
def of_global_batch(collectives):
    """While entered, Keras's loss objects give what a `GlobalMean` gives.

    Keras's own value is that of the process's part, divided by the number of
    processes.

    Args:
        collectives: the processes that share each batch.
    """
    stock = keras.losses.Loss.__call__
    if collectives.size == 1 or hasattr(stock, "_is_global"):
        yield
        return

    @functools.wraps(stock)
    def call(loss, y_true, y_pred, sample_weight=None):
        if _mode == "of own part" or compat.is_tracing_shapes():
            return stock(loss, y_true, y_pred, sample_weight)
        whole = GlobalMean(loss, collectives=collectives)
        return whole(y_true, y_pred, sample_weight)

    call._is_global = True
    keras.losses.Loss.__call__ = call
    try:
        yield
    finally:
        keras.losses.Loss.__call__ = stock


def unwrap(loss):
    """The inverse of `globalize`: what the user gave to `compile`.

    Example:

    >>> unwrap({"a": GlobalMean("mse"), "b": None})
    {'a': 'mse', 'b': None}
    """
    return keras.tree.map_structure(
        lambda leaf: leaf.loss if isinstance(leaf, GlobalMean) else leaf, loss
    )


@keras.saving.register_keras_serializable(package="keras_sparsity")
class GlobalMean(keras.losses.Loss):
    """A loss whose value is that of the global batch, on every rank.

    With S_r the sum of rank r's (weighted, masked) values and D_r its
    denominator, the value is `sum_r S_r / sum_r D_r`. Under a strategy, rank
    r's gradient is that of `S_r / sum_r D_r`, so that the *sum* of the ranks'
    gradients is the gradient of the global loss; without one it is `size`
    times as much, for their *mean*.

    D depends on the loss's reduction: the number of values for
    `"sum_over_batch_size"` and `"mean"` (of those that are not masked, when
    there is a mask), the sum of the weights for `"mean_with_sample_weight"`,
    1 for `"sum"`. `"none"` is not reduced here either: each rank returns the
    values of its own part.

    A function that returns one scalar for the batch counts by the number of
    its examples: exact for means over the examples, not for sums over them
    (return one value per example instead) nor for what mixes examples (see
    `whole_batch`). A part without examples counts nothing.

    Args:
        loss: a name, a function or a `keras.losses.Loss`.
        whole_batch: whether the ranks exchange targets and outputs, so that
            each evaluates the loss on the whole batch: for losses that are
            not sums over examples (contrastive ones, Dice). It costs
            bandwidth in proportion to the outputs. None: only for those of
            Keras that need it (Circle; Dice and Tversky without `axis`).
        collectives: the processes that share each batch; the current ones
            when None.
        name: by default the name Keras would give.

    Example:

    >>> loss = GlobalMean(keras.losses.MeanSquaredError())
    >>> float(loss([[1.0], [2.0]], [[1.0], [4.0]]))
    2.0
    """

    def __init__(self, loss, whole_batch=None, collectives=None, name=None):
        # Resolved late where Keras does, at once where that finds a typing
        # error before any data is read.
        by_shape = isinstance(loss, str) and loss.lower() in _DECIDED_BY_SHAPE
        inner = None if by_shape else _resolved(loss)
        checks.check(
            whole_batch is None or isinstance(whole_batch, (bool, np.bool_)),
            "whole_batch",
            whole_batch,
            "True, False, or None for where Keras's own losses need it",
        )
        _or_current(collectives)
        if name is not None:
            checks.string("name", name)
        super().__init__(
            name=name or (loss if by_shape else inner.name),
            reduction="sum_over_batch_size" if by_shape else inner.reduction,
            dtype=None if by_shape else inner.dtype,
        )
        self.loss = loss
        self.whole_batch = whole_batch
        self._inner = inner
        self._collectives = collectives

    def __call__(self, y_true, y_pred, sample_weight=None):
        collectives = _or_current(self._collectives)
        # Not kept: one object may serve outputs of several shapes.
        inner = self._inner or compat.resolve_loss(self.loss, y_true, y_pred)
        if collectives.size == 1:
            return inner(y_true, y_pred, sample_weight)
        with keras.name_scope(self.name):
            if self._needs_whole_batch(inner):
                return self._of_whole_batch(
                    inner, collectives, y_true, y_pred, sample_weight
                )
            return self._of_parts(
                inner, collectives, y_true, y_pred, sample_weight
            )

    def call(self, y_true, y_pred):
        inner = self._inner or compat.resolve_loss(self.loss, y_true, y_pred)
        return inner.call(y_true, y_pred)

    def get_config(self):
        return {
            "loss": keras.saving.serialize_keras_object(self.loss),
            "whole_batch": self.whole_batch,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        config["loss"] = keras.saving.deserialize_keras_object(config["loss"])
        return cls(**config)

    def _needs_whole_batch(self, inner):
        if self.whole_batch is not None:
            return self.whole_batch
        name = _name_in_keras(inner)
        return name in _PAIRWISE or (
            name in _QUOTIENTS and inner.get_config().get("axis") is None
        )

    def _of_parts(self, inner, collectives, y_true, y_pred, sample_weight):
        values, terms = _local_terms(inner, y_true, y_pred, sample_weight)
        if terms is None:  # not reduced
            values = empty_parts.cut(values)
            return _with_slope(values, values, collectives.size, 1.0)
        terms = _of_examples(terms)
        wide = tf.float64 if values.dtype == tf.float64 else tf.float32

        def summed(terms, name):
            if not terms:
                return []
            message = tf.stack([tf.cast(term, wide) for term in terms])
            (reduced,) = collectives.all_reduce(
                [tf.stop_gradient(message)], op="sum", name=name
            )
            return tf.unstack(reduced, num=len(terms))

        name = f"loss/{self.name}"
        if terms.counts_come_first:
            # The gradient needs the counts only, which are known before the
            # model is called: it waits for no rank's outputs.
            counts = summed(terms.counts, f"{name}/counts")
            (total,) = summed([terms.total], name)
        else:
            total, *counts = summed([terms.total, *terms.counts], name)
        factor = terms.factor(counts)
        value = tf.cast(total * tf.cast(factor, wide), values.dtype)
        return _with_slope(terms.total, value, collectives.size, factor)

    def _of_whole_batch(
        self, inner, collectives, y_true, y_pred, sample_weight
    ):
        def whole(role, structure):
            return keras.tree.map_structure(
                lambda part: _whole(
                    part, collectives, f"loss/{self.name}/{role}"
                ),
                structure,
            )

        mask = compat.keras_mask(y_pred)
        logits = compat.keras_logits(y_pred)
        y_true, y_pred = whole("targets", y_true), whole("outputs", y_pred)
        if sample_weight is not None:
            sample_weight = whole("weights", sample_weight)
        if mask is not None:
            compat.set_keras_mask(y_pred, whole("mask", mask))
        if logits is not None:
            compat.set_keras_logits(y_pred, whole("logits", logits))
        values, terms = _local_terms(inner, y_true, y_pred, sample_weight)
        loss = values
        if terms is not None:
            loss = terms.total * tf.cast(
                terms.factor(terms.counts), values.dtype
            )
        return _with_slope(loss, loss, collectives.size, 1.0)


def _resolved(loss):
    expected = (
        "a loss's name ('mse'), a function of targets and outputs, or a "
        "`keras.losses.Loss`"
    )
    inner = checks.keras_object("loss", loss, compat.resolve_loss, expected)
    checks.check(inner is not None, "loss", loss, expected)
    return inner


def _or_current(collectives):
    if collectives is None:
        return collectives_module.current()
    checks.processes("collectives", collectives)
    return collectives


def _name_in_keras(loss):
    """The name of the function of Keras's own that a loss is; else None."""
    function = getattr(loss, "fn", None)
    name = getattr(function, "__name__", None)
    is_of_keras = getattr(keras.losses, str(name), None) is function
    return name if is_of_keras else None


def _has_value_of_each_example(loss):
    """Whether its values are known to be as many as the batch's examples."""
    name = _name_in_keras(loss)
    is_known = name is not None and name not in (*_QUOTIENTS, *_PAIRWISE)
    return is_known or type(loss) is SampledSoftmaxLoss


class _Terms(typing.NamedTuple):
    """What a rank adds: the loss is `total * factor(counts)` of the sums.

    Whether the counts come first tells if they are known before the outputs.
    """

    total: tf.Tensor
    counts: list
    factor: typing.Callable
    counts_come_first: bool = False


def _local_terms(loss, y_true, y_pred, sample_weight):
    """This rank's `(values, terms)`, before anything is divided.

    Follows `keras.losses.Loss.__call__`; the terms are None when the loss is
    not to be reduced.
    """
    rows = _num_examples(y_pred)
    in_mask = compat.keras_mask(y_pred)
    if type(loss).__call__ is keras.losses.Loss.__call__:
        with of_own_part():  # it may consist of others
            values = _values(loss, y_true, y_pred)
        masks = [in_mask, compat.keras_mask(values)]
        values = keras.ops.convert_to_tensor(values, dtype=loss.dtype)
        is_weighted = False
    else:  # it does its own weighting
        with _reduction(loss, "none"), of_own_part():
            values = loss(y_true, y_pred, sample_weight)
        masks = [in_mask]
        is_weighted = True
    mask = _all_of(masks)
    weights = _weights(sample_weight, mask, values.dtype)
    is_reduced = loss.reduction not in (None, "none")
    if values.shape.rank == 0 and (is_reduced or weights is None):
        if is_weighted:
            weights = None
        return values, _scalar_terms(values, rows, weights, mask, loss)
    if weights is not None and not is_weighted:
        values, weights = compat.match_ranks(values, weights)
        values = values * weights
    if not is_reduced:
        return values, None
    count = _count_before(loss, values, y_true)
    if count is None:
        terms = _terms(values, tf.size(values), weights, mask, loss.reduction)
        return values, terms
    is_so = tf.debugging.assert_equal(
        count,
        tf.size(values),
        f"The loss '{loss.name}' needs as many targets as outputs.",
    )
    with tf.control_dependencies([is_so]):
        values = tf.identity(values)
    terms = _terms(values, count, weights, mask, loss.reduction)
    return values, terms._replace(counts_come_first=True)


def _of_examples(terms):
    """The terms of a part, of which a stand-in is no example."""
    has_examples = empty_parts.has_examples()
    if has_examples is True:
        return terms

    def select(term):
        return tf.where(has_examples, term, tf.zeros_like(term))

    return terms._replace(
        total=select(terms.total),
        counts=[select(tf.convert_to_tensor(count)) for count in terms.counts],
    )


def _count_before(loss, values, y_true):
    """How many values there are, if that is known before they are; or None."""
    of_example = values.shape[1:]
    if not (_has_value_of_each_example(loss) and of_example.is_fully_defined()):
        return None
    if values.shape.is_fully_defined():
        return tf.constant(values.shape.num_elements())
    return _num_examples(y_true) * of_example.num_elements()


def _terms(values, count, weights, mask, reduction):
    """Terms of one value (already weighted) per example or per place."""
    total = keras.ops.sum(values)
    if reduction == "sum":
        return _Terms(total, [], lambda counts: tf.ones(()))
    if reduction == "mean_with_sample_weight" and weights is not None:
        return _Terms(total, [keras.ops.sum(weights)], _reciprocal)
    if mask is None or reduction == "mean_with_sample_weight":
        return _Terms(total, [count], _reciprocal)
    valid = keras.ops.sum(keras.ops.cast(mask, "float32"))
    # Keras's rule; 1 / valid when the mask has the values' shape.
    return _Terms(
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
        terms = _Terms(value, [], lambda counts: tf.ones(()))
    else:
        terms = _Terms(value * tf.cast(rows, value.dtype), [rows], _reciprocal)
    if weights is None:
        return terms
    # Keras multiplies the scalar by each weight and reduces the products.
    size = tf.size(weights)
    weighing = _terms(weights, size, weights, mask, loss.reduction)
    split = len(terms.counts)
    return _Terms(
        terms.total,
        [*terms.counts, weighing.total, *weighing.counts],
        lambda counts: (
            terms.factor(counts[:split])
            * _float(counts[split])
            * weighing.factor(counts[split + 1 :])
        ),
    )


def _num_examples(structure):
    return tf.shape(keras.tree.flatten(structure)[0])[0]


def _reciprocal(counts):
    return tf.math.reciprocal_no_nan(_float(counts[0]))


def _float(count):
    return count if count.dtype == tf.float64 else tf.cast(count, tf.float32)


def _values(loss, y_true, y_pred):
    def convert(structure):
        return keras.tree.map_structure(
            lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype),
            structure,
        )

    return loss.call(convert(y_true), convert(y_pred))


def _all_of(masks):
    masks = [mask for mask in masks if mask is not None]
    return masks[0] & masks[-1] if masks else None


def _weights(sample_weight, mask, dtype):
    """Sample weights, 0 where masked; None when there are neither."""
    if sample_weight is not None:
        sample_weight = keras.ops.convert_to_tensor(sample_weight, dtype=dtype)
    if mask is None:
        return sample_weight
    valid = keras.ops.cast(mask, dtype)
    if sample_weight is None:
        return valid
    valid, sample_weight = compat.match_ranks(valid, sample_weight)
    return valid * sample_weight


def _with_slope(local, value, size, slope):
    """`value`, whose gradient is `slope * size` times that of `local`.

    Under a strategy, the gradient is divided by the number of replicas. So is
    the value where Keras (3.6 and later) multiplies it again.
    """
    num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
    divisor = num_replicas if _mode == "as Keras multiplies" else 1

    @tf.custom_gradient
    def replace(local, value, slope):
        def gradient(upstream):
            return upstream * slope * (size / num_replicas), None, None

        return value / divisor, gradient

    return replace(local, tf.stop_gradient(value), tf.cast(slope, local.dtype))


def _whole(part, collectives, name):
    """All ranks' parts in rank order; only this rank's carries a gradient."""
    is_bool = part.dtype == tf.bool
    part = tf.cast(part, tf.int32) if is_bool else tf.convert_to_tensor(part)
    part = empty_parts.cut(part)
    rows = tf.shape(part)[0]
    all_rows = collectives.all_gather(rows[None], name=f"{name}/rows")
    others = collectives.all_gather(tf.stop_gradient(part), name=name)
    start = tf.reduce_sum(all_rows[: collectives.rank])
    whole = tf.concat([others[:start], part, others[start + rows :]], axis=0)
    return tf.cast(whole, tf.bool) if is_bool else whole


@contextlib.contextmanager
def _reduction(loss, reduction):
    saved = loss.reduction
    loss.reduction = reduction
    try:
        yield
    finally:
        loss.reduction = saved
