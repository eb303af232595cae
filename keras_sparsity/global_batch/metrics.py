"""Metrics over all ranks' parts of the data.

Each rank's metrics count the examples of its part. Keras's metrics keep sums
(totals, counts, confusion matrices), so that the sums over the ranks give the
results of the whole batch.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_scopes, keras_variables, patches
from keras_sparsity.data import empty_parts
from keras_sparsity.global_batch import loss_scale

_SUMMED = ("sum", "mean")


def global_results(metrics, collectives, results=None):
    """Results of metrics over all ranks, the same on all of them.

    One all-reduce sums the variables of all metrics; the results are computed
    from the sums. The variables themselves keep this rank's counts, so that
    later updates add to them. Call it on every rank, eagerly or in a traced
    function.

    A variable's `aggregation` says how ranks combine: `"sum"` (the default
    of `keras.Metric.add_variable`), `"mean"`, or, for `"none"` and
    `"only_first_replica"`, rank 0's value. A metric that keeps a maximum,
    or values outside of its variables, cannot be combined.

    Args:
        metrics: a `keras.Model`, or a list of `keras.Metric`.
        results: function without arguments that computes the results, called
            while every variable reads as its global value. By default as
            `Model.get_metrics_result`: a dict by the metrics' names.

    Example:

    >>> import keras_sparsity as ks
    >>> mean = keras.metrics.Mean(name="loss")
    >>> mean.update_state([1.0, 3.0])
    >>> float(global_results([mean], ks.collectives.current())["loss"])
    2.0
    """
    if isinstance(metrics, keras.Model):
        metrics = metrics.metrics
    results = results or functools.partial(_results, metrics)
    with _global_state(metrics, collectives):
        return values_of(results())


def _results(metrics):
    results = {}
    for metric in metrics:
        result = metric.result()
        if isinstance(result, dict):
            results.update(result)
        else:
            results[metric.name] = result
    return results


def _global_state(metrics, collectives):
    """A scope in which the metrics' variables read as their global values.

    Assignments within it are forgotten.
    """
    variables = _variables(metrics)
    if collectives.size == 1 or not variables:
        return contextlib.nullcontext()
    return keras.StatelessScope(
        list(zip(variables, combined(variables, collectives), strict=True))
    )


def _variables(metrics):
    return list(
        {id(v): v for metric in metrics for v in metric.variables}.values()
    )


def new_ones_are_global(collectives):
    """While entered, metrics that are made give results over all ranks.

    For custom training loops. A step reads the rank's own result, as under
    TensorFlow's strategies. A result that is read between steps is that of
    all ranks, and every rank must read it.
    """
    if collectives.size == 1:
        return contextlib.nullcontext()

    def make(stock):
        def initialize(metric, *args, **kwargs):
            stock(metric, *args, **kwargs)
            _give_global_results(metric, collectives)

        return initialize

    return patches.METRIC_INIT.by(make)


def _give_global_results(metric, collectives):
    stock = metric.result

    @functools.wraps(stock)
    def result(*args, **kwargs):
        is_in_step = tf.distribute.has_strategy() and (
            not tf.distribute.in_cross_replica_context()
        )
        # A stateless scope may be `_global_state`'s, around other metrics.
        if is_in_step or keras_scopes.is_tracing_shapes():
            return stock(*args, **kwargs)
        with _global_state([metric], collectives):
            return values_of(stock(*args, **kwargs))

    # Not through Keras's attribute tracking: this is not state.
    object.__setattr__(metric, "result", result)


def values_of(results):
    """Results without variables, read while these have their global values.

    Some metrics return a variable itself.
    """
    return keras.tree.map_structure(
        lambda x: x.value if keras_variables.is_variable(x) else x, results
    )


def ignore_empty_parts(metric):
    """Has a metric's `update_state` do nothing for a batch without rows.

    Some of Keras's metrics (F1Score) raise on such a batch, and functions
    that return one mean for the batch give NaN. Such batches come from custom
    loops, and from steps that pick some of their examples; the step of an
    adopted model replaces a part without examples, see `data.empty_parts`.

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
        with loss_scale.of_own_part():  # a metric may be one of Keras's losses
            empty_parts.run_if(
                _has_rows(y_pred),
                lambda: stock(y_true, y_pred, *args, **kwargs),
            )

    object.__setattr__(metric, "update_state", update_state)


def _has_rows(outputs):
    output = keras.tree.flatten(outputs)[0]
    rows = output.shape[0]
    if rows is None and not keras_scopes.in_symbolic_scope():
        return tf.shape(output)[0] > 0
    return rows != 0


def combined(variables, collectives):
    """The variables' values combined over the ranks, in one message."""
    sums = collectives.all_reduce(
        _sent(variables, collectives), op="sum", name="metrics"
    )
    return [
        _restored(variable, total, collectives.num_workers)
        for variable, total in zip(variables, sums, strict=True)
    ]


def sent(metrics):
    """The values here of all metrics' variables, for `results_of_parts`."""
    return _wide(_variables(metrics))


def results_of_parts(metrics, parts, results):
    """Results of metrics over parts of the data, of which each was `sent`.

    As `global_results`: the first part's value counts where rank 0's does.

    Args:
        metrics: list of `keras.Metric`.
        parts: for each part, the values of `sent` as arrays.
        results: function without arguments that computes the results.
    """
    variables, given = _variables(metrics), []
    for variable, *values in zip(variables, *parts, strict=True):
        is_summed = aggregation(variable) in _SUMMED
        total = sum(values) if is_summed else values[0]
        given.append((variable, _restored(variable, total, len(parts))))
    with keras.StatelessScope(given):
        return values_of(results())


def _sent(variables, collectives):
    def counts(variable):
        # A server has seen stand-ins alone.
        is_summed = aggregation(variable) in _SUMMED
        return is_summed and not collectives.is_server or collectives.rank == 0

    return [
        value if counts(variable) else tf.zeros_like(value)
        for variable, value in zip(variables, _wide(variables), strict=True)
    ]


def _wide(variables):
    """The variables' values in one dtype, so that they travel together.

    float64 holds float32 and all counts below 2**53 exactly.
    """
    values = [tf.convert_to_tensor(variable.value) for variable in variables]
    dtypes = {value.dtype for value in values}
    wide = dtypes.pop() if dtypes <= {tf.float32} else tf.float64
    return [tf.cast(value, wide) for value in values]


def _restored(variable, total, size):
    dtype = tf.as_dtype(variable.value.dtype)
    if aggregation(variable) == "mean":
        total /= size
    if dtype == tf.bool:
        return total > 0  # the sum of truth values: whether any is true
    return tf.cast(total, dtype)


def aggregation(variable):
    """How the ranks' values of a metric's variable are combined."""
    # Keras stores the argument of `add_variable`; None in its first versions.
    return getattr(variable, "aggregation", None) or "sum"
