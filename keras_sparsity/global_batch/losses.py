"""Losses of the global batch, computed from each rank's part of it.

Keras divides a loss by the number of elements that *this rank* holds (masked
ones and weights considered) and then by the number of ranks. That is the
global mean only when all ranks hold equally many: a ragged last batch, a mask
or weights change it. Here each rank adds its sum and its denominator to one
small all-reduce, and every rank gets the loss of the whole batch.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity import collectives as collectives_module
from keras_sparsity._tf import checks, keras_losses, keras_scopes, patches
from keras_sparsity.data import empty_parts
from keras_sparsity.global_batch import loss_scale, loss_terms

__all__ = ["GlobalMean", "globalize"]

# Keras resolves these names when it has seen the outputs' shapes.
_DECIDED_BY_SHAPE = ("crossentropy", "ce")


def globalize(loss, collectives=None):
    """Maps `compile`'s `loss` to one whose value is of the global batch.

    Args:
        loss: as `Model.compile` takes it: a name, a function, a
            `keras.losses.Loss`, None, or a list, tuple or dict of these.
        collectives: the processes that share each batch; the current ones
            when None.

    Returns:
        The same structure with each loss in a `GlobalMean`; in one process
        the argument itself.

    Raises:
        ValueError: if Keras makes no loss of a leaf of the structure.

    Example:

    >>> globalize("mse")  # one process: nothing to share
    'mse'

    References:
        arXiv:1808.02621, 3.1 (the loss of the global batch).
    """
    collectives = _or_current(collectives)

    def wrap(leaf):
        if isinstance(leaf, GlobalMean):
            return leaf._of(collectives)
        return None if leaf is None else GlobalMean(leaf, None, collectives)

    # In one process too: it finds wrong arguments as several do.
    wrapped = keras.tree.map_structure(wrap, loss)
    return loss if collectives.size == 1 else wrapped


def unwrap(loss):
    """The inverse of `globalize`.

    Example:

    >>> unwrap({"a": GlobalMean("mse"), "b": None})
    {'a': 'mse', 'b': None}
    """
    return keras.tree.map_structure(
        lambda leaf: leaf.loss if isinstance(leaf, GlobalMean) else leaf, loss
    )


def of_global_batch(collectives):
    """While entered, Keras's loss objects have a `GlobalMean`'s values.

    Keras's own value is that of the process's part, divided by the number of
    processes.
    """
    if collectives.size == 1 or patches.LOSS_CALL.is_in_place:
        return contextlib.nullcontext()

    def make(stock):
        def call(loss, y_true, y_pred, sample_weight=None):
            if loss_scale.is_of_own_part() or keras_scopes.is_tracing_shapes():
                return stock(loss, y_true, y_pred, sample_weight)
            whole = GlobalMean(loss, collectives=collectives)
            return whole(y_true, y_pred, sample_weight)

        return call

    return patches.LOSS_CALL.by(make)


@keras.saving.register_keras_serializable(package="keras_sparsity")
class GlobalMean(keras.losses.Loss):
    """A loss whose value is that of the global batch, on every rank.

    With S_r the sum of rank r's (weighted, masked) values and D_r its
    denominator, the value is `sum_r S_r / sum_r D_r`. Under a strategy, rank
    r's gradient is that of `S_r / sum_r D_r`, so that the *sum* of the ranks'
    gradients is the gradient of the global loss; without one it is `size`
    times as much, for their *mean*.

    D depends on the loss's reduction: the number of values for
    `"sum_over_batch_size"` and `"mean"` (of the unmasked ones, when there is
    a mask), the sum of the weights for `"mean_with_sample_weight"`, 1 for
    `"sum"`. `"none"` is not reduced here either: each rank returns the values
    of its own part.

    A function that returns one scalar for the batch counts by the number of
    its examples: exact for means over the examples, not for sums over them
    (return one value per example instead) nor for losses that mix examples
    (see `whole_batch`). A part without examples counts nothing.

    Args:
        loss: a name, a function or a `keras.losses.Loss`.
        whole_batch: whether the ranks exchange targets and outputs, so that
            each evaluates the loss on the whole batch: for losses that are
            not sums over examples (contrastive ones, Dice). Each step then
            gathers the outputs of all ranks, `(batch, ...)` bytes. None: only
            for those of Keras that need it (Circle; Dice and Tversky without
            `axis`, and with cosine similarity for one that has axis 0).
        collectives: the processes that share each batch; the current ones
            when None.
        name: by default the name Keras would give.

    Raises:
        ValueError: if Keras makes no loss of `loss`, or an argument is of
            another type.

    Example:

    >>> loss = GlobalMean(keras.losses.MeanSquaredError())
    >>> float(loss([[1.0], [2.0]], [[1.0], [4.0]]))
    2.0

    References:
        arXiv:1808.02621, 3.1 (the loss of the global batch).
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
        communicator = _or_current(collectives)
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
        self._collectives = communicator

    def _of(self, collectives):
        """The same loss, among these processes if it was made in one."""
        if self._collectives.size > 1 or collectives.size == 1:
            return self
        return GlobalMean(self.loss, self.whole_batch, collectives, self.name)

    def __call__(self, y_true, y_pred, sample_weight=None):
        communicator = self._collectives
        inner = self._inner_for(y_true, y_pred)
        if communicator.size == 1:
            return inner(y_true, y_pred, sample_weight)
        is_of_whole = self.whole_batch
        if is_of_whole is None:
            is_of_whole = loss_terms.needs_whole_batch(inner)
        value = _of_whole_batch if is_of_whole else _of_parts
        with keras.name_scope(self.name):
            name = f"loss/{self.name}"
            batch = y_true, y_pred, sample_weight
            return value(inner, communicator, batch, name)

    def call(self, y_true, y_pred):
        return self._inner_for(y_true, y_pred).call(y_true, y_pred)

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

    def _inner_for(self, y_true, y_pred):
        # Not kept: one object may serve outputs of several shapes.
        return self._inner or keras_losses.resolve_loss(
            self.loss, y_true, y_pred
        )


def needing_whole_batch(loss):
    """Names of those losses of Keras that are no sums over examples.

    Args:
        loss: as for `globalize`.
    """
    found = [
        _resolved(leaf)
        for leaf in keras.tree.flatten(loss)
        if leaf is not None and leaf not in _DECIDED_BY_SHAPE
    ]
    return [each.name for each in found if loss_terms.needs_whole_batch(each)]


def _resolved(loss):
    expected = (
        "a loss's name ('mse'), a function of targets and outputs, or a "
        "`keras.losses.Loss`"
    )
    resolve = keras_losses.resolve_loss
    inner = checks.keras_object("loss", loss, resolve, expected)
    checks.check(inner is not None, "loss", loss, expected)
    return inner


def _or_current(collectives):
    if collectives is None:
        return collectives_module.current()
    checks.processes("collectives", collectives)
    return collectives


def _of_parts(inner, communicator, batch, name):
    """The loss from the ranks' sums and denominators."""
    values, terms = loss_terms.local_terms(inner, *batch)
    if terms is None:  # not reduced
        values = empty_parts.cut(values)
        workers = communicator.num_workers
        return loss_scale.with_slope(values, values, workers, 1.0)
    terms = terms.of_examples()
    wide = tf.float64 if values.dtype == tf.float64 else tf.float32

    def summed(terms, name):
        if not terms:
            return []
        message = tf.stack([tf.cast(term, wide) for term in terms])
        (reduced,) = communicator.all_reduce(
            [tf.stop_gradient(message)], op="sum", name=name
        )
        return tf.unstack(reduced, num=len(terms))

    if terms.counts_come_first:
        # The gradient needs the counts only, which are known before the
        # model is called: it waits for no rank's outputs.
        counts = summed(terms.counts, f"{name}/counts")
        (total,) = summed([terms.total], name)
    else:
        total, *counts = summed([terms.total, *terms.counts], name)
    factor = terms.factor(counts)
    value = tf.cast(total * tf.cast(factor, wide), values.dtype)
    workers = communicator.num_workers
    return loss_scale.with_slope(terms.total, value, workers, factor)


def _of_whole_batch(inner, communicator, batch, name):
    """The loss of the targets and outputs of all ranks."""

    def whole(role, structure):
        return keras.tree.map_structure(
            lambda part: _whole(part, communicator, f"{name}/{role}"),
            structure,
        )

    y_true, y_pred, sample_weight = batch
    mask = keras_losses.keras_mask(y_pred)
    logits = keras_losses.keras_logits(y_pred)
    y_true, y_pred = whole("targets", y_true), whole("outputs", y_pred)
    if sample_weight is not None:
        sample_weight = whole("weights", sample_weight)
    if mask is not None:
        keras_losses.set_keras_mask(y_pred, whole("mask", mask))
    if logits is not None:
        keras_losses.set_keras_logits(y_pred, whole("logits", logits))
    loss, terms = loss_terms.local_terms(inner, y_true, y_pred, sample_weight)
    if terms is not None:
        loss = terms.total * tf.cast(terms.factor(terms.counts), loss.dtype)
    return loss_scale.with_slope(loss, loss, communicator.num_workers, 1.0)


def _whole(part, communicator, name):
    """All ranks' parts in rank order; only this rank's carries a gradient.

    A number, as in `loss(1.0, y_pred)`, is of all examples already.
    """
    if len(keras.ops.shape(part)) == 0:
        return part
    is_bool = part.dtype == tf.bool
    part = tf.cast(part, tf.int32) if is_bool else tf.convert_to_tensor(part)
    part = empty_parts.cut(part)
    rows = tf.shape(part)[0]
    all_rows = communicator.all_gather(rows[None], name=f"{name}/rows")
    others = communicator.all_gather(tf.stop_gradient(part), name=name)
    start = tf.reduce_sum(all_rows[: communicator.rank])
    whole = tf.concat([others[:start], part, others[start + rows :]], axis=0)
    return tf.cast(whole, tf.bool) if is_bool else whole
