"""Ways to break the library, for comparisons that must then be seen to fail.

Each is a context manager, entered on every rank. None leaves a rank waiting.
"""

import contextlib
from unittest import mock

import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity._tf import keras_optimizers
from keras_sparsity.data import empty_parts
from keras_sparsity.global_batch import losses, step_metrics
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.placement import server_sums, slices
from keras_sparsity.update.step import Clipping


def entered(name):
    """The break of this name; nothing for None."""
    return BREAKS[name]() if name else contextlib.nullcontext()


def _without_reducing(role):
    """All-reduces of this role give every rank its own values back."""
    kind = type(collectives.current())
    original = kind.all_reduce

    def all_reduce(self, tensors, *args, name, **kwargs):
        if name.startswith(role):
            return list(tensors)
        return original(self, tensors, *args, name=name, **kwargs)

    return mock.patch.object(kind, "all_reduce", all_reduce)


def rows_of_one_rank():
    """Owners update from the gradients of rank 0's examples alone."""
    kind = type(collectives.current())
    original = kind.all_to_all_along

    def all_to_all_along(self, tensor, route, name):
        if "push" in name:
            tensor = tensor * tf.cast(self.rank == 0, tensor.dtype)
        return original(self, tensor, route, name)

    return mock.patch.object(kind, "all_to_all_along", all_to_all_along)


def dense_not_reduced():
    return _without_reducing("optimizer/dense")


def dense_not_served():
    def unsummed(ranks, options, gradients):
        return gradients

    return mock.patch.multiple(server_sums, at_all=unsummed, in_turn=unsummed)


def norms_of_own_rows():
    return _without_reducing("optimizer/norms")


@contextlib.contextmanager
def clipped_before_aggregation():
    """As stock Keras clips: each rank its own gradients."""
    original = HybridOptimizer.apply

    def apply(self, grads, trainable_variables=None):
        rule = self.inner_optimizer
        values = [
            g.values if isinstance(g, tf.IndexedSlices) else g for g in grads
        ]
        if rule.clipvalue:
            limit = rule.clipvalue
            values = [tf.clip_by_value(v, -limit, limit) for v in values]
        else:
            values, _ = tf.clip_by_global_norm(values, rule.global_clipnorm)
        grads = [
            tf.IndexedSlices(v, g.indices, g.dense_shape)
            if isinstance(g, tf.IndexedSlices)
            else v
            for g, v in zip(grads, values, strict=True)
        ]
        original(self, grads, trainable_variables)

    with (
        mock.patch.object(HybridOptimizer, "apply", apply),
        mock.patch.object(
            Clipping,
            "clip",
            lambda self, rule, grads, updates: grads,
        ),
    ):
        yield


@contextlib.contextmanager
def last_of_equal_ids():
    """Of a row's gradients one counts, as where nothing adds duplicates."""

    def last(shape, index, values):
        return tf.tensor_scatter_nd_update(
            tf.zeros(shape, values.dtype), index[:, tf.newaxis], values
        )

    def merged(gradient):
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        rows, index = tf.unique(gradient.indices)
        shape = [tf.size(rows), gradient.values.shape[1]]
        values = last(shape, index, gradient.values)
        return tf.IndexedSlices(values, rows, gradient.dense_shape)

    def dense(slices, num_rows):
        shape = [num_rows, slices.values.shape[1]]
        return last(shape, slices.indices, slices.values)

    with mock.patch.multiple(slices, merged=merged, dense=dense):
        yield


@contextlib.contextmanager
def own_denominators():
    """Each rank's loss is the mean over its own part."""
    of_keras = mock.patch.object(
        losses, "of_global_batch", lambda _: contextlib.nullcontext()
    )
    with mock.patch.object(losses, "globalize", lambda loss, _: loss), of_keras:
        yield


def decays_partitions():
    """What is excluded from weight decay is not, where it is spread."""
    return mock.patch.object(
        keras_optimizers, "exclude_from_weight_decay_too", lambda *_: None
    )


def own_statistics():
    """Moving statistics are those of the rank's part."""
    return mock.patch.object(empty_parts, "combine_statistics", lambda *_: None)


def results_of_own_part():
    """What a step reads of a metric is what its rank has counted."""
    return mock.patch.object(
        step_metrics,
        "results_are_global",
        lambda *_: contextlib.nullcontext(()),
    )


BREAKS = {
    function.__name__: function
    for function in (
        rows_of_one_rank,
        dense_not_reduced,
        dense_not_served,
        norms_of_own_rows,
        clipped_before_aggregation,
        last_of_equal_ids,
        own_denominators,
        decays_partitions,
        own_statistics,
        results_of_own_part,
    )
}
