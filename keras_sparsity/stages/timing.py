"""Times of a model's calls, measured before it is cut."""

import time

import keras
import numpy as np
import tensorflow as tf

_NUM_EXAMPLES = 32
# For a size that the model does not know, such as a sequence's length.
_UNKNOWN_SIZE = 16
_NUM_RUNS = 3


def call_seconds(cutter, num_examples=_NUM_EXAMPLES):
    """Measures the forward and backward pass of each call.

    Of examples that are drawn at random; statistics and random states stay as
    they are.

    Args:
        cutter: `Cutter`.
        num_examples: the number of examples in a pass.

    Returns:
        List of seconds, in the order of `cutter.calls`: for each call the
        median of 3 runs.

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


def _seconds(part, num_examples):
    model = part.model
    draws = np.random.default_rng(0)
    tensors = [_drawn(draws, spec, num_examples) for spec in model.inputs]

    @tf.function(autograph=False)
    def run(*tensors):
        floats = [each for each in tensors if each.dtype.is_floating]
        with tf.GradientTape() as tape, keras.StatelessScope():
            tape.watch(floats)
            made = part.compute(list(tensors), training=True)
            total = [
                tf.reduce_sum(tf.cast(each, tf.float32))
                for each in made
                if each.dtype.is_floating
            ]
        weights = [variable.value for variable in model.trainable_variables]
        return tape.gradient(total, [*floats, *weights]) if total else made

    run(*tensors)
    times = []
    for _ in range(_NUM_RUNS):
        begin = time.perf_counter()
        run(*tensors)
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def _drawn(draws, spec, num_examples):
    _, *sizes = spec.shape
    shape = [num_examples, *(size or _UNKNOWN_SIZE for size in sizes)]
    dtype = tf.as_dtype(spec.dtype)
    if dtype.is_floating:
        return tf.cast(draws.normal(size=shape), dtype)
    # An id that each table has; a mask that hides nothing.
    return tf.cast(tf.ones(shape) if dtype.is_bool else tf.zeros(shape), dtype)
