"""Metrics in a step of an adopted model: their results are of all ranks."""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._tf import (
    contexts,
    keras_losses,
    keras_scopes,
    patches,
    tf_graphs,
)
from keras_sparsity.data import empty_parts
from keras_sparsity.global_batch import loss_scale, whole_batch_metrics
from keras_sparsity.global_batch.metrics import combined, values_of

# Set on a metric that has been updated in an eager step.
_IS_MADE = "_keras_sparsity_is_made"
# Set on an `update_state`: called when it has made variables without counting.
AFTER_MAKING = "_keras_sparsity_after_making"


@contextlib.contextmanager
def results_are_global(metrics, collectives, of_losses=list):
    """While entered, each metric's `result` is that over all ranks.

    And a rank without examples updates none. For a step. The first result sums
    the variables of all metrics in one message; later ones need another only
    for variables that were assigned meanwhile.

    Args:
        metrics: function without arguments that lists the metrics whose
            results are likely to be read. Those of others are global too,
            each by a message of its own.
        of_losses: function without arguments that lists the metrics of losses.
            Their values are of the global batch on every rank. Each rank counts
            one, also those without examples, or the number of its examples.

    Yields:
        List that the tensors of all results are appended to.
    """
    state = _GlobalState(metrics, collectives, of_losses)

    def make(stock):
        def get(metric, name):
            # Not `stock`: within another model's step, that is its `get`.
            value = object.__getattribute__(metric, name)
            if name == "update_state":
                return functools.partial(state.update, metric, value)
            if name == "result":
                return functools.partial(state.result, metric, value)
            return value

        return get

    with (
        patches.METRIC_ATTRIBUTES.by(make),
        patches.assignments_are_told(state.forget),
    ):
        yield state.results


class _GlobalState:
    """Metrics' variables over all ranks, as of one point of a step."""

    def __init__(self, metrics, collectives, of_losses):
        self.results = []
        self._metrics, self._collectives = metrics, collectives
        self._of_losses = of_losses
        self._values = {}  # by id: the variable, its graph, its global value
        self._depth = 0
        self._is_updating = False
        self._updates_within = None  # function, for metrics within a metric

    def update(self, metric, stock, *args, **kwargs):
        if self._updates_within is not None:
            return self._updates_within(metric, stock, *args, **kwargs)
        if self._is_updating or keras_scopes.is_tracing_shapes():
            return stock(*args, **kwargs)
        if not getattr(metric, "built", True) and len(args) > 1:
            metric.build(*args[:2])  # compiled ones, of eager steps
        if not getattr(metric, "built", True):
            return stock(*args, **kwargs)
        if self._is_of_loss(metric):
            return stock(*_without_stand_ins(*args, **kwargs))
        args, kwargs = _of_share(metric, args, kwargs)
        of_batch = self._of_batch(metric, *args, **kwargs)
        skipped = {id(metric) for metric, *_ in of_batch}

        def update(metric, stock, *args, **kwargs):
            if id(metric) not in skipped:
                stock(*args, **kwargs)

        is_some = empty_parts.has_examples()
        if tf.executing_eagerly():
            if not is_some and not hasattr(metric, _IS_MADE):
                with contexts.attribute(self, "_updates_within", _make):
                    _make(metric, stock, *args, **kwargs)
            object.__setattr__(metric, _IS_MADE, True)
        with contexts.attribute(self, "_is_updating", True):
            with contexts.attribute(self, "_updates_within", update):
                # A metric may be one of Keras's losses.
                with loss_scale.of_own_part():
                    empty_parts.run_if(is_some, lambda: stock(*args, **kwargs))
            for _, stock_of_metric, *arguments in of_batch:
                whole_batch_metrics.update(stock_of_metric, *arguments)
        # Others assign them where this rank has no examples.
        for variable in metric.variables:
            self.forget(variable)

    def _of_batch(self, compiled, *args, **kwargs):
        """The updates by one number for the batch, which `compile` asks for.

        Returns:
            List of `(metric, its update_state, y_true, y_pred,
            sample_weight)`.
        """
        if not keras_losses.is_compiled_metrics(compiled):
            return []
        found, leaves = [], {id(metric) for metric in compiled.metrics}

        def note(metric, stock, y_true, y_pred, sample_weight=None):
            if id(metric) not in leaves:  # a list of metrics
                stock(y_true, y_pred, sample_weight=sample_weight)
            elif whole_batch_metrics.is_of_batch(metric, y_true, y_pred):
                found.append((metric, stock, y_true, y_pred, sample_weight))

        with (
            contexts.attribute(self, "_is_updating", True),
            contexts.attribute(self, "_updates_within", note),
        ):
            # Of the class: without `metrics.ignore_empty_parts`.
            type(compiled).update_state(compiled, *args, **kwargs)
        return found

    def _is_of_loss(self, metric):
        if self._collectives.is_server:
            return False  # which counts nothing at all
        return any(metric is other for other in self._of_losses())

    def result(self, metric, stock, *args, **kwargs):
        # In a scope of somebody else: Keras computes shapes only.
        if keras_scopes.is_tracing_shapes() and not self._depth:
            return stock(*args, **kwargs)
        self._depth += 1
        try:
            with keras.StatelessScope(self._global(metric.variables)):
                results = values_of(stock(*args, **kwargs))
        finally:
            self._depth -= 1
        self.results.extend(keras.tree.flatten(results))
        return results

    def forget(self, variable):
        self._values.pop(id(variable), None)

    def _global(self, variables):
        """Pairs of a variable and its global value."""
        if not all(self._is_known(variable) for variable in variables):
            listed = [v for m in self._metrics() for v in m.variables]
            new = {
                id(v): v for v in [*variables, *listed] if not self._is_known(v)
            }
            values = combined(list(new.values()), self._collectives)
            for variable, value in zip(new.values(), values, strict=True):
                graph = tf_graphs.current()
                self._values[id(variable)] = variable, graph, value
        return [(v, self._values[id(v)][2]) for v in variables]

    def _is_known(self, variable):
        known = self._values.get(id(variable))
        # A tensor of a branch or a loop stays within.
        return known is not None and known[1] is tf_graphs.current()


def _make(metric, stock, *args, **kwargs):
    """Has a metric make its variables, by a stand-in that does not count.

    In eager steps the first update may make them, on ranks with examples.
    """
    before = [(variable, variable.numpy()) for variable in metric.variables]
    # One example may be too few.
    with loss_scale.of_own_part(), contextlib.suppress(Exception):
        stock(*args, **kwargs)
    metric.reset_state()
    for variable, value in before:
        variable.assign(value)
    getattr(stock, AFTER_MAKING, lambda: None)()


def _of_share(metric, args, kwargs):
    """Arguments of an update, of a `Mean` by one number of the rank's part.

    One process counts one for the number of a batch. The ranks count their
    shares of the batch, which sum to one.
    """
    given = dict(zip(("values", "sample_weight"), args, strict=False))
    given.update(kwargs)
    part, value = empty_parts.current(), given.get("values")
    if isinstance(value, (list, tuple)) and len(value) == 1:
        (value,) = value  # `[number]`
    if (
        part is None
        or type(metric).update_state is not keras.metrics.Mean.update_state
        or given.get("sample_weight") is not None
        or not _is_number(value)
    ):
        return args, kwargs
    share = tf.cast(part.share, metric.dtype)
    return (), {"values": value, "sample_weight": share}


def _is_number(value):
    if hasattr(value, "shape"):
        return tf.TensorShape(value.shape).rank == 0
    return np.isscalar(value)


def _without_stand_ins(values, sample_weight=None):
    """Arguments of a loss metric's update, of a rank's examples alone."""
    if sample_weight is None:  # each rank counts one
        return values, None
    # The size of the rank's part, where Keras knows it, as in eager steps.
    weight = tf.cast(sample_weight, tf.float32)
    if weight.shape.rank == 0:
        values = tf.reduce_mean(values)  # NaN of no values
    return empty_parts.selected([values, weight])
