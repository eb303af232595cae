"""Ways to break the library, for comparisons that must then be seen to fail.

Each is a context manager, entered on every rank. None leaves a rank waiting.
"""

import contextlib
from unittest import mock

import tensorflow as tf

from keras_sparsity import collectives, compat, empty_parts, losses
from keras_sparsity.optimizer import HybridOptimizer


def entered(name):
    """The break of this name; nothing for None."""
    return BREAKS[name]() if name else contextlib.nullcontext()


def _without_reducing(call):
    """All-reduces of this name give every rank its own values back."""
    kind = type(collectives.current())
    original = kind.all_reduce

    def all_reduce(self, tensors, *args, name, **kwargs):
        if name == call:
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


def norms_of_own_rows():
    return _without_reducing("optimizer/norms")


@contextlib.contextmanager
def clipped_before_aggregation():
    """As stock Keras clips: each rank its own gradients."""
    original = HybridOptimizer._aggregate

    def aggregate(self, grads, variables):
        grads = [
            tf.convert_to_tensor(g)
            if isinstance(g, tf.IndexedSlices)
            and self._expansion[id(v)][0] is v
            else g
            for g, v in zip(grads, variables, strict=True)
        ]
        values = [
            g.values if isinstance(g, tf.IndexedSlices) else g for g in grads
        ]
        rule = self._rule
        if rule.clipvalue:
            values = [
                tf.clip_by_value(v, -rule.clipvalue, rule.clipvalue)
                for v in values
            ]
        elif rule.clipnorm:
            values = [tf.clip_by_norm(v, rule.clipnorm) for v in values]
        else:
            values, _ = tf.clip_by_global_norm(values, rule.global_clipnorm)
        grads = [
            tf.IndexedSlices(v, g.indices, g.dense_shape)
            if isinstance(g, tf.IndexedSlices)
            else v
            for g, v in zip(grads, values, strict=True)
        ]
        return original(self, grads, variables)

    with (
        mock.patch.object(HybridOptimizer, "_aggregate", aggregate),
        mock.patch.object(
            HybridOptimizer, "_clip", lambda self, grads, updates: grads
        ),
    ):
        yield


def last_of_equal_ids():
    """Of a row's gradients one counts, as where nothing adds duplicates."""

    def one_per_row(self, update):
        slices = update.gradient
        dense = tf.zeros_like(update.variable.value)
        return tf.tensor_scatter_nd_update(
            dense, slices.indices[:, tf.newaxis], slices.values
        )

    return mock.patch.object(
        HybridOptimizer, "_one_gradient_per_row", one_per_row
    )


def own_denominators():
    """Each rank's loss is the mean over its own part."""
    return mock.patch.object(losses, "globalize", lambda loss, _: loss)


def decays_partitions():
    """What is excluded from weight decay is not, where it is spread."""
    return mock.patch.object(
        compat, "exclude_from_weight_decay_too", lambda *_: None
    )


def own_statistics():
    """Moving statistics are those of the rank's part."""
    return mock.patch.object(empty_parts, "combine_statistics", lambda *_: None)


BREAKS = {
    function.__name__: function
    for function in (
        rows_of_one_rank,
        dense_not_reduced,
        norms_of_own_rows,
        clipped_before_aggregation,
        last_of_equal_ids,
        own_denominators,
        decays_partitions,
        own_statistics,
    )
}
