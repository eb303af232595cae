"""The profile by which a model is cut: times of its calls, bytes of cuts."""

import functools
import math
import time

import keras
import numpy as np
import tensorflow as tf

_NUM_EXAMPLES = 32
# For a size that the model does not know, such as a sequence's length.
UNKNOWN_SIZE = 16
# A long run is not repeated: its noise is small beside it.
_NUM_RUNS, _ENOUGH_SECONDS = 3, 0.5


def call_seconds(cutter, num_examples=_NUM_EXAMPLES):
    """Measures the forward and backward pass of each call.

    Of examples that are drawn at random; statistics and random states stay as
    they are.

    Args:
        cutter: `Cutter`.
        num_examples: the number of examples in a pass.

    Returns:
        List of seconds, in the order of `cutter.calls`: for each call the
        median of 3 runs; of fewer if they take half a second.

    Raises:
        Nothing.

    Example:

    >>> from keras_sparsity.stages.cutting import Cutter
    >>> layers = [keras.Input((8,)), keras.layers.Dense(4)]
    >>> len(call_seconds(Cutter(keras.Sequential(layers))))
    1

    References:
        PipeDream (arXiv:1806.03377), 3.1 (the profile).
    """
    everywhere = range(len(cutter.calls) - 1)
    # Each call as a stage of its own, also where no cut can be.
    return [
        _seconds(part, num_examples) for part in cutter.parts(list(everywhere))
    ]


def crossing_bytes(cutter, num_examples=_NUM_EXAMPLES):
    """The activations that cross each possible cut.

    Args:
        cutter: `Cutter`.
        num_examples: as for `call_seconds`.

    Returns:
        Dict from a cut's place to bytes.

    Raises:
        Nothing.

    Example:

    >>> from keras_sparsity.stages.cutting import Cutter
    >>> layers = [keras.Input((8,)), keras.layers.Dense(4),
    ...           keras.layers.Dense(2)]
    >>> crossing_bytes(Cutter(keras.Sequential(layers)), num_examples=10)
    {0: 160}

    References:
        PipeDream (arXiv:1806.03377), 3.1 (the profile).
    """
    return {
        place: sum(
            math.prod(_shape(tensor, num_examples))
            * tf.as_dtype(tensor.dtype).size
            for tensor in cutter.crossing(place)
        )
        for place in cutter.places
    }


def _seconds(part, num_examples):
    draws = np.random.default_rng(0)
    tensors = [_drawn(draws, spec, num_examples) for spec in part.model.inputs]
    compute = functools.partial(part.compute, training=True)
    return pass_seconds(compute, part.model.trainable_variables, tensors)


def pass_seconds(compute, variables, tensors, has_backward=True):
    """Measures a forward pass and, if asked, its backward pass.

    Args:
        compute: function of a list of tensors to a list of tensors.
        variables: list of those that it uses, which stay as they are.
        tensors: list.
        has_backward: whether the gradients of the results' sum count.

    Returns:
        Seconds, the median of 3 runs; of fewer if they take half a second.

    Raises:
        Nothing.

    Example:

    >>> pass_seconds(lambda tensors: tensors, [], [tf.ones([3])]) > 0
    True

    References:
        PipeDream (arXiv:1806.03377), 3.1 (the profile).
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

    return median_seconds(run, tensors)


def median_seconds(function, tensors):
    """Measures a function, which is traced first.

    Args:
        function: function of a list of tensors.
        tensors: list.

    Returns:
        Seconds, the median of 3 runs; of fewer if they take half a second.

    Raises:
        Nothing.

    Example:

    >>> median_seconds(sum, [tf.ones([3])]) > 0
    True

    References:
        PipeDream (arXiv:1806.03377), 3.1 (the profile).
    """
    run = tf.function(lambda *tensors: function(list(tensors)), autograph=False)
    run(*tensors)
    times = []
    for _ in range(_NUM_RUNS):
        begin = time.perf_counter()
        run(*tensors)
        times.append(time.perf_counter() - begin)
        if sum(times) > _ENOUGH_SECONDS:
            break
    return float(np.median(times))


def _drawn(draws, spec, num_examples):
    shape = _shape(spec, num_examples)
    dtype = tf.as_dtype(spec.dtype)
    if dtype.is_floating:
        return tf.cast(draws.normal(size=shape), dtype)
    # An id that each table has; a mask that hides nothing.
    return tf.cast(tf.ones(shape) if dtype.is_bool else tf.zeros(shape), dtype)


def _shape(spec, num_examples):
    _, *sizes = spec.shape
    return [num_examples, *(size or UNKNOWN_SIZE for size in sizes)]
