"""The profile by which a model is cut: times of its calls, bytes of cuts.

References:
    PipeDream (arXiv:1806.03377), 3.1 (the profile).
"""

import functools
import math
import time

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity.exchange.pull import shaped
from keras_sparsity.stages import refusals
from keras_sparsity.stages.example_shapes import example_bytes
from keras_sparsity.stages.softmaxes import computed_with_losses
from keras_sparsity.tables import foreseen
from keras_sparsity.tables.table_variable import TableVariable

_NUM_EXAMPLES = 32
# A long run is not repeated: its noise is small beside it.
_NUM_RUNS, _ENOUGH_SECONDS = 3, 0.5
_LEAST_SECONDS = 1e-6


def call_seconds(cutter, num_examples=_NUM_EXAMPLES, has_backward=True):
    """Measures the forward and backward pass of each call.

    Of examples that are drawn at random, of a model's inputs those of its batch
    if it has one, and of weights in place of the model's own, which need not be
    in this process. A call that refuses them counts as the least time.
    Statistics and random states stay as they are. Of layers with the same
    configuration and the same shapes of tensors, one is measured. With a
    `SampledSoftmax` that of its loss. A stage starts its calls together, so the
    start of a pass does not count.

    Args:
        cutter: `Cutter`.
        num_examples: the number of examples in a pass. That of a model with
            batches of a fixed size is measured with these, and counts by its
            number.
        has_backward: whether the backward pass counts.

    Returns:
        List of seconds, in the order of `cutter.calls`: for each call the
        median of 3 runs; of fewer if they take half a second.
    """
    everywhere = range(len(cutter.calls) - 1)
    # Each call as a stage of its own, also where no cut can be.
    parts = cutter.parts(list(everywhere))
    measured, found = {}, []
    start = median_seconds(lambda tensors: tensors, [tf.zeros([1])])
    for call, part in zip(cutter.calls, parts, strict=True):
        alike = _alike(call, cutter)
        seconds = measured.get(alike)
        if seconds is None:
            try:
                seconds = _seconds(cutter, part, num_examples, has_backward)
            except tf.errors.ResourceExhaustedError:
                raise
            except Exception:  # whatever a layer raises
                seconds = 0.0
            seconds = max(_LEAST_SECONDS, seconds - start)
        if alike is not None:
            measured[alike] = seconds
        found.append(seconds)
    return found


def whole_seconds(
    cutter, num_examples=_NUM_EXAMPLES, has_backward=True, measure=None
):
    """Measures the forward and backward pass of the whole model, in seconds.

    Calls that refuse the drawn inputs of a model without a batch are left out.
    Their outputs are zeros.

    Args:
        cutter, num_examples, has_backward: as for `call_seconds`.
        measure: function of a function and its argument, whose result is
            returned; by default `median_seconds`.
    """
    (whole,) = cutter.parts([])
    asked = cutter, whole, num_examples, has_backward, measure
    try:
        return _seconds(*asked)
    except Exception:
        if cutter.given:
            raise
        return _seconds(*asked, without_refused=True)


def _alike(call, cutter):
    """A value that calls of the same time share; None if that is unknown."""
    layer = call.operation
    if not isinstance(layer, keras.layers.Layer):
        return None
    try:
        config = {**layer.get_config(), "name": None}
    except NotImplementedError:  # a user's layer
        return None
    sizes = [
        *((cutter.example_shape(each), each.dtype) for each in call.inputs),
        *((tuple(each.shape), str(each.dtype)) for each in layer.variables),
    ]
    return repr((type(layer), sorted(config.items()), sizes))


def crossing_bytes(
    cutter, num_examples=_NUM_EXAMPLES, wire_dtype=None, only_floats=False
):
    """The activations that cross each possible cut.

    Args:
        num_examples: those that cross it together.
        wire_dtype: name of a narrower dtype in which floats travel.
        only_floats: whether tensors without gradients are left out.

    Returns:
        Dict from a cut's place to bytes.

    Example:

    >>> from keras_sparsity.stages.cutting import Cutter
    >>> layers = [keras.Input((8,)), keras.layers.Dense(4),
    ...           keras.layers.Dense(2)]
    >>> crossing_bytes(Cutter(keras.Sequential(layers)), num_examples=10)
    {0: 160}
    """
    return {
        place: sum(
            num_examples
            * math.prod(cutter.example_shape(tensor))
            * wire_size(tf.as_dtype(tensor.dtype), wire_dtype)
            for tensor in cutter.crossing(place)
            if not only_floats or tf.as_dtype(tensor.dtype).is_floating
        )
        for place in cutter.places
    }


def output_bytes(cutter):
    """The bytes that each call makes of one example: a list.

    Example:

    >>> from keras_sparsity.stages.cutting import Cutter
    >>> layers = [keras.Input((8,)), keras.layers.Dense(4)]
    >>> output_bytes(Cutter(keras.Sequential(layers)))
    [16]
    """
    return [
        sum(example_bytes(each, cutter.example_shape) for each in call.outputs)
        for call in cutter.calls
    ]


def wire_size(dtype, wire_dtype):
    """Bytes of an element as it travels.

    Args:
        dtype: its `tf.DType`.
        wire_dtype: name of a narrower dtype in which floats travel, or None.

    Example:

    >>> wire_size(tf.float32, "bfloat16"), wire_size(tf.int32, "bfloat16")
    (2, 4)
    """
    if wire_dtype is None or not dtype.is_floating:
        return dtype.size
    return min(dtype.size, tf.as_dtype(wire_dtype).size)


def _seconds(
    cutter,
    part,
    num_examples,
    has_backward=True,
    measure=None,
    without_refused=False,
):
    drawn = cutter.num_examples or num_examples
    tensors = _arriving(cutter, part, drawn)
    # A process may not have the model's weights, or not yet.
    trained = _without_tables(part.model.trainable_variables)
    others = _without_tables(part.model.non_trainable_weights)
    fixed = [_in_place_of(variable) for variable in others]
    compute_part = computed_with_losses(part, cutter.calls)

    def compute(tensors):
        number = len(part.model.inputs)
        tensors, values = tensors[:number], tensors[number:]
        values = zip([*trained, *others], [*values, *fixed], strict=True)
        with keras.StatelessScope(values):
            return compute_part(tensors)

    tensors += [_in_place_of(variable) for variable in trained]
    with foreseen.by(_NoRows()):
        if without_refused:
            zeros = functools.partial(_zeros, cutter, drawn)
            compute = refusals.replaced(compute, part.model, zeros, tensors)
        found = pass_seconds(compute, [], tensors, has_backward, measure)
    return found if measure else found * num_examples / drawn


def _arriving(cutter, part, number):
    """The examples of a part's inputs: of a batch, or drawn."""
    draws = np.random.default_rng(0)
    found = []
    for symbolic in part.arriving:
        shape, dtype = cutter.example_shape(symbolic), symbolic.dtype
        given = cutter.given.get(id(symbolic))
        if isinstance(given, tf.Tensor) and len(given):
            places = tf.range(number) % len(given)
            found.append(tf.cast(tf.gather(given, places), dtype))
        else:
            found.append(_drawn(draws, [number, *shape], dtype))
    return found


def _zeros(cutter, number, place):
    """Zeros in place of the outputs of a call."""
    return [
        tf.zeros([number, *cutter.example_shape(each)], each.dtype)
        for each in cutter.calls[place].outputs
    ]


def _in_place_of(variable):
    """A tensor of a variable's shape and dtype."""
    dtype = tf.as_dtype(variable.dtype)
    # Passes of zeros may take another time.
    return tf.cast(tf.fill(variable.shape, 0.01), dtype)


def _without_tables(variables):
    return [v for v in variables if not isinstance(v, TableVariable)]


class _NoRows:
    """Zeros in place of rows of tables, which all ranks would pull."""

    def rows(self, table, ids, columns, dtype):
        start, stop = columns or (0, table.dim)
        shape = tf.concat([tf.shape(ids), [stop - start]], axis=0)
        return shaped(tf.zeros(shape, dtype), ids)


def pass_seconds(compute, variables, tensors, has_backward=True, measure=None):
    """Measures a forward pass and, if asked, its backward pass.

    Args:
        compute: function of a list of tensors to a list of tensors.
        variables: list of those that it uses, which stay as they are.
        tensors: list.
        has_backward: whether the gradients of the results' sum count.
        measure: as for `whole_seconds`.

    Returns:
        Seconds, the median of 3 runs; of fewer if they take half a second.
    """

    def run(tensors):
        floats = [each for each in tensors if each.dtype.is_floating]
        with tf.GradientTape() as tape, keras.StatelessScope():
            tape.watch(floats)
            made = compute(tensors)
            total = [
                tf.reduce_sum(tf.cast(each, tf.float32))
                for each in made
                if each.dtype.is_floating
            ]
        if not (has_backward and total):
            return made
        weights = [variable.value for variable in variables]
        return tape.gradient(total, [*floats, *weights])

    return (measure or median_seconds)(run, tensors)


def median_seconds(function, tensors):
    """Measures a function of a list of tensors, which is traced first.

    Seconds, the median of 3 runs; of fewer if they take half a second.
    """
    run = traced(function, tensors)
    times = []
    for _ in range(_NUM_RUNS):
        begin = time.perf_counter()
        run(*tensors)
        times.append(time.perf_counter() - begin)
        if sum(times) > _ENOUGH_SECONDS:
            break
    return float(np.median(times))


def lasting_seconds(run, tensors, seconds):
    """Measures a function that runs for a while.

    Others may run theirs meanwhile: the processes of a machine share its caches
    and its memory.

    Args:
        run: function of tensors, traced.
        seconds: time after which no further run begins.

    Returns:
        Seconds, the median of the runs.
    """
    times, begin = [], time.perf_counter()
    end = begin + seconds
    while not times or begin < end:
        run(*tensors)
        now = time.perf_counter()
        times.append(now - begin)
        begin = now
    return float(np.median(times))


def processor_seconds(run, tensors, seconds=_ENOUGH_SECONDS):
    """Measures the processor time of a function that runs for a while.

    Other processes on the processor do not count, but the caches and the memory
    that they use do.

    Args:
        run: function of tensors, traced.
        seconds: time after which no further run begins.

    Returns:
        Seconds, the mean of the runs.
    """
    end, begin = time.perf_counter() + seconds, time.process_time()
    number = 0
    while not number or time.perf_counter() < end:
        run(*tensors)
        number += 1
    return (time.process_time() - begin) / number


def traced(function, tensors):
    """A function of a list of tensors as a `tf.function` that has run once."""
    run = tf.function(lambda *tensors: function(list(tensors)), autograph=False)
    run(*tensors)
    return run


def _drawn(draws, shape, dtype):
    dtype = tf.as_dtype(dtype)
    if dtype.is_floating:
        return tf.cast(draws.normal(size=shape), dtype)
    # An id that each table has, or no text; a mask that hides nothing.
    return (tf.ones if dtype.is_bool else tf.zeros)(shape, dtype)
