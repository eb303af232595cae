"""Metrics over all ranks' parts of the data.

Each rank's metrics count what the rank has seen. Keras's metrics keep sums
(totals, counts, confusion matrices), so the sums over the ranks are what one
process would have, and results computed from them are those of the whole.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from keras_sparsity import collectives as collectives_module
from keras_sparsity import compat, empty_parts, losses

_SUMMED = ("sum", "mean")


def global_results(metrics, collectives=None, results=None):
    """Results of metrics over all ranks, the same on all of them.

    One all-reduce sums the variables of all metrics; the results are computed
    from the sums while the variables themselves stay what this rank counted,
    so that later updates add to them. Call it on every rank, eagerly or in a
    traced function.

    A variable's `aggregation` says how ranks combine: `"sum"` (the default
    of `keras.Metric.add_variable`), `"mean"`, or, for `"none"` and
    `"only_first_replica"`, rank 0's value. A metric that keeps a maximum,
    or values outside of its variables, cannot be combined.

    Args:
        metrics: a `keras.Model`, or a list of `keras.Metric`.
        collectives: the processes to combine; the current ones when None.
        results: what computes the results, called without arguments while
            every variable reads as its global value. By default what
            `Model.get_metrics_result` does.

    Returns:
        dict from a metric's name to its result, as
        `keras.Model.get_metrics_result` returns it.

    Example:

    >>> mean = keras.metrics.Mean(name="loss")
    >>> mean.update_state([1.0, 3.0])
    >>> float(global_results([mean])["loss"])
    2.0
    """
    if isinstance(metrics, keras.Model):
        metrics = metrics.metrics
    if results is None:

        def results():
            return _results(metrics)

    with global_state(metrics, collectives):
        return _values(results())


def global_state(metrics, collectives=None):
    """A scope in which the metrics' variables read as their global values.

    Args:
        metrics: list of `keras.Metric`.
        collectives: the processes to combine; the current ones when None.

    Returns:
        A context manager. What is assigned within it is forgotten.
    """
    collectives = collectives or collectives_module.current()
    variables = list(
        {id(v): v for metric in metrics for v in metric.variables}.values()
    )
    if collectives.size == 1 or not variables:
        return contextlib.nullcontext()
    return keras.StatelessScope(
        list(zip(variables, _reduced(variables, collectives), strict=True))
    )


@contextlib.contextmanager
def results_are_global(metrics, collectives, of_losses=list):
    """While entered, each metric's `result` is that over all ranks.

    And a rank without examples updates none. For a step. The first result sums
    the variables of all metrics in one message; later ones need another only
    for variables that were assigned meanwhile.

    Args:
        metrics: function without arguments that lists the metrics whose
            results are likely to be asked for. Those of others are global
            too, each by a message of its own.
        collectives: the processes to combine.
        of_losses: function without arguments that lists the metrics of losses.
            Their values are of the global batch on every rank, each counts
            one, and so ranks without examples update them as well.

    Yields:
        List that the tensors of all results are appended to.
    """
    state = _GlobalState(metrics, collectives, of_losses)
    stock = vars(keras.Metric).get("__getattribute__")

    # Of the class: a step may use metrics that its model does not list.
    def get(metric, name):
        value = object.__getattribute__(metric, name)
        if name == "update_state":
            return functools.partial(state.update, metric, value)
        if name == "result":
            return functools.partial(state.result, metric, value)
        return value

    keras.Metric.__getattribute__ = get
    try:
        with compat.assignments_are_told(state.forget):
            yield state.results
    finally:
        if stock:
            keras.Metric.__getattribute__ = stock
        else:
            del keras.Metric.__getattribute__


class _GlobalState:
    """Metrics' variables over all ranks, as of one point of a step."""

    def __init__(self, metrics, collectives, of_losses):
        self.results = []
        self._metrics, self._collectives = metrics, collectives
        self._of_losses = of_losses
        self._values = {}  # by id: the variable, its graph, its global value
        self._depth = 0
        self._is_updating = False

    def update(self, metric, stock, *args, **kwargs):
        is_built = getattr(metric, "built", True)
        if (
            self._is_updating
            or not is_built
            or compat.is_tracing_shapes()
            or any(metric is other for other in self._of_losses())
        ):
            return stock(*args, **kwargs)

        def update():
            stock(*args, **kwargs)
            return tf.constant(True)

        self._is_updating = True
        try:
            empty_parts.either(update, lambda: tf.constant(False))
        finally:
            self._is_updating = False

    def result(self, metric, stock, *args, **kwargs):
        # In a scope of somebody else: Keras is only after shapes.
        if compat.is_tracing_shapes() and not self._depth:
            return stock(*args, **kwargs)
        self._depth += 1
        try:
            with keras.StatelessScope(self._global(metric.variables)):
                results = _values(stock(*args, **kwargs))
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
            values = _reduced(list(new.values()), self._collectives)
            for variable, value in zip(new.values(), values, strict=True):
                known = variable, _graph(), value
                self._values[id(variable)] = known
        return [(v, self._values[id(v)][2]) for v in variables]

    def _is_known(self, variable):
        known = self._values.get(id(variable))
        # A tensor of a branch or a loop stays within.
        return known is not None and known[1] is _graph()


def _graph():
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()


@contextlib.contextmanager
def new_ones_are_global(collectives):
    """While entered, metrics that are made give results over all ranks.

    For custom training loops. What a step reads is the rank's own, as under
    TensorFlow's strategies; a result that is asked for between steps is that
    of all ranks, and every rank must ask for it.

    Args:
        collectives: the processes to combine.
    """
    if collectives.size == 1:
        yield
        return
    stock = keras.Metric.__init__

    @functools.wraps(stock)
    def initialize(metric, *args, **kwargs):
        stock(metric, *args, **kwargs)
        _give_global_results(metric, collectives)

    keras.Metric.__init__ = initialize
    try:
        yield
    finally:
        keras.Metric.__init__ = stock


def _give_global_results(metric, collectives):
    stock = metric.result

    @functools.wraps(stock)
    def result(*args, **kwargs):
        is_in_step = tf.distribute.has_strategy() and (
            not tf.distribute.in_cross_replica_context()
        )
        # A stateless scope may be `global_state`'s own, around other metrics.
        if is_in_step or compat.is_tracing_shapes():
            return stock(*args, **kwargs)
        with global_state([metric], collectives):
            return _values(stock(*args, **kwargs))

    # Not through Keras's attribute tracking: this is not state.
    object.__setattr__(metric, "result", result)


def _values(results):
    # Some metrics return a variable itself: read it while it is global.
    return keras.tree.map_structure(
        lambda x: x.value if compat.is_variable(x) else x, results
    )


def ignore_empty_parts(metric):
    """Has a metric's `update_state` do nothing for a batch without rows.

    Some of Keras's metrics (F1Score) raise on such a batch, and functions
    that return one mean for the batch give NaN.

    Args:
        metric: what `update_state(y_true, y_pred, ...)` is called on.

    Example:

    >>> metric = keras.metrics.MeanMetricWrapper(lambda y, p: tf.reduce_mean(p))
    >>> ignore_empty_parts(metric)
    >>> metric.update_state(tf.zeros([0, 1]), tf.zeros([0, 1]))
    >>> metric.update_state(tf.ones([2, 1]), tf.ones([2, 1]))
    >>> float(metric.result())
    1.0
    """
    stock = metric.update_state

    @functools.wraps(stock)
    def update_state(y_true, y_pred, *args, **kwargs):
        if not getattr(metric, "built", True):
            metric.build(y_true, y_pred)  # not inside a condition
        with losses.of_own_part():  # a metric may be one of Keras's losses
            update_if_any(y_true, y_pred, *args, **kwargs)

    def update_if_any(y_true, y_pred, *args, **kwargs):
        output = keras.tree.flatten(y_pred)[0]
        rows = output.shape[0]
        if rows is None and not compat.in_symbolic_scope():

            def update():
                stock(y_true, y_pred, *args, **kwargs)
                return tf.constant(True)

            tf.cond(tf.shape(output)[0] > 0, update, lambda: tf.constant(False))
        elif rows != 0:
            stock(y_true, y_pred, *args, **kwargs)

    object.__setattr__(metric, "update_state", update_state)


def _results(metrics):
    results = {}
    for metric in metrics:
        result = metric.result()
        if isinstance(result, dict):
            results.update(result)
        else:
            results[metric.name] = result
    return results


def _reduced(variables, collectives):
    """The variables' values combined over the ranks, in one message."""
    values = [tf.convert_to_tensor(variable.value) for variable in variables]
    # One dtype, so that they travel together: float64 holds float32 and all
    # counts below 2**53 exactly.
    dtypes = {value.dtype for value in values}
    wide = dtypes.pop() if dtypes <= {tf.float32} else tf.float64
    sent = [
        tf.cast(value, wide)
        if collectives.rank == 0 or aggregation(variable) in _SUMMED
        else tf.zeros(value.shape, wide)
        for variable, value in zip(variables, values, strict=True)
    ]
    sums = collectives.all_reduce(sent, op="sum", name="metrics")
    return [
        _restored(variable, total, value.dtype, collectives.size)
        for variable, total, value in zip(variables, sums, values, strict=True)
    ]


def _restored(variable, total, dtype, size):
    if aggregation(variable) == "mean":
        total /= size
    if dtype == tf.bool:
        return total > 0  # the sum of truth values: whether any is true
    return tf.cast(total, dtype)


def aggregation(variable):
    # Keras stores what `add_variable` was given; None in its first versions.
    return getattr(variable, "aggregation", None) or "sum"
