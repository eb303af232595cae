"""A rank without examples adds nothing to a step.

A batch of fewer examples than ranks leaves some ranks none. Few models can be
computed on none: batch statistics divide by their number, and kernels refuse
tensors without rows. Such a rank computes on a stand-in example, see
`data.stand_ins`, and takes part in all messages, with zeros in place of its
gradients, losses, metrics and statistics. They are replaced, not multiplied:
zero times NaN is NaN.
"""

import contextlib

import keras
import tensorflow as tf

from keras_sparsity._tf import contexts, keras_models, tf_graphs
from keras_sparsity._tf.own_variable import OwnVariable

# Attributes of `keras.layers.BatchNormalization`.
_STATISTICS = (
    *("moving_mean", "moving_variance"),
    # With `renorm=True` alone, from Keras 3.15 on.
    *("moving_stddev", "renorm_mean", "renorm_stddev"),
)

_parts = []  # of the steps being computed or traced, the inmost last
_stored = []  # the variable of eager steps' counts, once there is one


class Part:
    """This rank's number of a batch's examples.

    Args:
        counts: integers `(1,)` or `(2,)`: the number of this rank's examples,
            and the number of all ranks' examples, if it is known.
        collectives: the processes that share the batch.
        is_of_run: whether it is of a `strategy.run`, which does not know what
            others have: a model's own step in it replaces it.
    """

    def __init__(self, counts, collectives, is_of_run=False):
        self.is_of_run, self._collectives = is_of_run, collectives
        self._graph = tf_graphs.current()
        if self._graph is None and not is_of_run:
            counts = _of_all(counts, collectives)
        self._counts = counts
        self._share = None  # the graph that it is of, and its tensor
        known = tf.get_static_value(counts)
        self._has_examples = counts[0] > 0 if known is None else bool(known[0])
        # A server never has any.
        can_change = collectives is None or not collectives.is_server
        self._is_stored = tf.executing_eagerly() and can_change

    def store(self):
        """Tells functions that an eager step calls of its counts.

        They are traced in one step, and run in others.
        """
        if self._is_stored and tf.executing_eagerly():
            if not _stored:
                _stored.append(OwnVariable(self._counts, tf.int64))
            _stored[0].assign(self._counts)

    @property
    def _present_counts(self):
        if self._is_stored and not tf.executing_eagerly():
            return _stored[0].read()
        return self._counts

    @property
    def has_examples(self):
        """A scalar bool tensor, or a bool if it is known."""
        counts = self._present_counts
        return self._has_examples if counts is self._counts else counts[0] > 0

    @property
    def number(self):
        """The number of this rank's examples: a scalar."""
        return self._present_counts[0]

    @property
    def share(self):
        """This rank's fraction of the batch's examples: a float32 scalar."""
        # Every rank takes part in its message, whatever branch it goes into.
        found = tf_graphs.around_control_flow(self._graph)
        graph = tf_graphs.current() if found is None else found[1]
        if self._share is None or self._share[0] is not graph:
            is_eager = graph is None
            with contextlib.nullcontext() if is_eager else graph.as_default():
                self._share = graph, self._counted_share()
        return self._share[1]

    def _counted_share(self):
        counts = _of_all(self._present_counts, self._collectives)
        number, total = tf.unstack(counts)
        return tf.math.divide_no_nan(
            tf.cast(number, tf.float32), tf.cast(total, tf.float32)
        )


def _of_all(counts, collectives):
    """The number of this rank's examples, and of all: int64 `(2,)`."""
    counts = tf.cast(counts, tf.int64)
    if counts.shape[0] == 2:
        return counts
    total = collectives.all_reduce([counts], name="model/examples")
    return tf.concat([counts, *total], axis=0)


def of_rank(counts, collectives):
    """The `Part` of a step, by counts that its input has.

    Args:
        counts, collectives: as for `Part`. A dedicated server has no examples,
            whatever its input counts: what is computed of a stand-in and not
            sent is then no part of its graph.
    """
    if collectives.is_server:
        counts = tf.zeros(counts.shape, counts.dtype)
    return Part(counts, collectives)


@contextlib.contextmanager
def computing_on(part):
    """While entered, a step is computed, or traced, on a `Part`."""
    with contexts.on_top(_parts, part):
        part.store()
        yield
    if _parts:
        _parts[-1].store()


def current():
    """The `Part` that a step is computed on; None outside of a step."""
    return _parts[-1] if _parts else None


def has_examples():
    """Whether this rank has examples: True, False or a scalar bool tensor.

    Example:

    >>> has_examples()  # outside of a step nothing is replaced
    True
    """
    return _parts[-1].has_examples if _parts else True


def selected(tensors):
    """Tensors, or zeros in their place where this rank has no examples.

    Example:

    >>> nothing = Part(tf.constant([0, 3], tf.int64), collectives=None)
    >>> with computing_on(nothing):
    ...     (zero,) = selected([tf.constant(float("nan"))])
    >>> float(zero)
    0.0
    """
    return either(
        lambda: [tf.convert_to_tensor(tensor) for tensor in tensors],
        lambda: [tf.zeros_like(tensor) for tensor in tensors],
    )


def either(of_examples, of_none):
    """The result of one function, or the other where there are no examples."""
    is_some = has_examples()
    if isinstance(is_some, bool):
        return of_examples() if is_some else of_none()
    return tf.cond(is_some, of_examples, of_none)


def of_examples(values):
    """Values of any structure, or zeros where this rank has no examples.

    Of `tf.IndexedSlices`, no rows.
    """
    if has_examples() is True:
        return values
    flat = tf.nest.flatten(values)
    dense = [
        place
        for place, value in enumerate(flat)
        if not isinstance(value, tf.IndexedSlices)
    ]
    found = selected([flat[place] for place in dense]) if dense else []
    for place, value in zip(dense, found, strict=True):
        flat[place] = value
    flat = [
        cut_slices(value) if isinstance(value, tf.IndexedSlices) else value
        for value in flat
    ]
    return tf.nest.pack_sequence_as(values, flat)


def run_if(condition, function):
    """Runs a function where a condition, a bool or a scalar tensor, holds."""

    def run():
        function()
        return tf.constant(True)

    if not isinstance(condition, bool):
        tf.cond(condition, run, lambda: tf.constant(False))
    elif condition:
        function()


def cut(rows):
    """A tensor, or none of its rows where this rank has no examples."""
    is_some = has_examples()
    if is_some is True:
        return rows
    if isinstance(rows, tf.SparseTensor):
        shape = rows.dense_shape
        number = tf.where(is_some, shape[:1], 0)
        size = tf.concat([number, shape[1:]], 0)
        return tf.sparse.slice(rows, tf.zeros_like(shape), size)
    if is_some is False:
        return rows[:0]
    is_ragged = isinstance(rows, tf.RaggedTensor)
    number = rows.nrows() if is_ragged else tf.shape(rows)[0]
    return rows[: tf.where(is_some, number, 0)]


def cut_gradient(rows):
    """As `cut`, of a gradient at the end of its way.

    Where it is known that there are no examples, nothing depends on it: the
    passes that compute it are no part of the graph that runs.
    """
    inner = rows.shape[1:]
    if has_examples() is False and inner.is_fully_defined():
        return tf.zeros([0, *inner], rows.dtype)
    return cut(rows)


def cut_slices(slices):
    """`tf.IndexedSlices`, or none of them where there are no examples."""
    return tf.IndexedSlices(
        cut(slices.values), cut(slices.indices), slices.dense_shape
    )


def combine_statistics(model, number, communicator):
    """Gives every rank the mean of the ranks' moving statistics.

    BatchNormalization moves its statistics towards those of the rank's own
    part. All ranks continue with their mean, weighted by the numbers of
    examples of their parts.
    """
    statistics = [
        getattr(layer, name)
        for layer in keras_models.all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
        for name in _STATISTICS
        if hasattr(layer, name)
    ]
    if not statistics:
        return
    sums = [
        tf.where(number > 0, v.value * tf.cast(number, v.dtype), 0)
        for v in statistics
    ]
    *sums, total = communicator.all_reduce(
        [*sums, tf.cast(number, tf.float32)], name="model/statistics"
    )
    for statistic, value in zip(statistics, sums, strict=True):
        statistic.assign(value / tf.cast(total, statistic.dtype))
