"""A table's first values, the same for every number of processes."""

import inspect
import math

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._tf import checks
from keras_sparsity._tf.current_variable import store_rows
from keras_sparsity._tf.filled_variable import filled

# Values are drawn in blocks of this many elements (16 MiB of float32), so that
# no process ever holds more than a block of rows that are not its own. A table
# of one block, and any of float32, gets exactly the values that
# `keras.layers.Embedding` draws from the same initializer. In other dtypes each
# block has a seed of its own.
BLOCK_ELEMENTS = 1 << 22

# TensorFlow draws this many elements at a time, each time from another count
# (random/philox_random.h: `kResultElementCount`).
_TOGETHER = 4
# Its operations, and the distance of those counts: a truncated normal draws
# anew what is outside (stateless_random_ops: `kReservedSamplesPerOutput`).
_OPERATIONS = {
    "RandomUniform": (tf.raw_ops.StatelessRandomUniformV2, 1),
    "RandomNormal": (tf.raw_ops.StatelessRandomNormalV2, 1),
    "TruncatedNormal": (tf.raw_ops.StatelessTruncatedNormalV2, 256),
}
_PHILOX = 1


def draw(initializer, shape, dtype, rows, trainable=False, name=None):
    """Values of some rows of a table.

    Args:
        initializer: a `keras.initializers.Initializer` or a function of
            `(shape, dtype)`. Those that draw each element by itself are
            evaluated block by block; any other is evaluated on the whole
            table, of which the rows are then taken.
        shape: `(num_rows, dim)` of the whole table.
        dtype: name of the values' dtype.
        rows: list of int arrays, sorted ids of the rows wanted.
        trainable: whether gradient tapes watch variables that are made.
        name: the name of these variables.

    Returns:
        List of arrays `(len(rows[i]), dim)`, or of `tf.Variable`s with these
        values where the table is drawn block by block.
    """
    num_rows, dim = shape
    block_rows = max(1, BLOCK_ELEMENTS // max(dim, 1) // _TOGETHER) * _TOGETHER
    if num_rows <= block_rows:
        whole = _evaluate(initializer, shape, dtype)
        return [whole[r] for r in rows]
    draw_block = _by_blocks(initializer, shape, block_rows, dtype)
    if draw_block is None:
        whole = _evaluate(initializer, shape, dtype)
        return [whole[r] for r in rows]
    stored = [filled(0, (len(r), dim), dtype, trainable, name) for r in rows]
    for block, start in enumerate(range(0, num_rows, block_rows)):
        stop = min(start + block_rows, num_rows)
        places = [np.searchsorted(wanted, (start, stop)) for wanted in rows]
        if all(low == high for low, high in places):
            continue
        values = _evaluate(draw_block(block), (stop - start, dim), dtype)
        for part, wanted, (low, high) in zip(stored, rows, places, strict=True):
            # Assigning a slice would read, and so copy, all of the variable.
            ids = np.arange(low, high)
            store_rows(part, ids, values[wanted[low:high] - start])
    return stored


def _evaluate(initializer, shape, dtype):
    try:
        values = keras.ops.convert_to_numpy(initializer(shape, dtype=dtype))
        cause = None
    except (tf.errors.OpError, MemoryError):  # of a table that is too large
        raise
    except Exception as error:  # whatever a function raises
        values, cause = None, error
    if values is None or values.shape != tuple(shape):
        received = "an object" if values is None else f"shape {values.shape}"
        if cause is not None:
            received = f"{type(cause).__name__}: {checks.shortened(cause)}"
        raise ValueError(
            "`initializer` must be a Keras initializer, or a function of shape "
            f"and dtype that gives an array. Received: initializer="
            f"{checks.spell(initializer)}, which for shape {tuple(shape)} gave "
            f"{received}"
        ) from cause
    return values


def _by_blocks(initializer, shape, block_rows, dtype):
    """Function block -> initializer of that block, or None if impossible."""
    if constant_of(initializer) is not None:
        return lambda block: initializer
    elementwise = initializer
    if _draws_as(initializer, ("VarianceScaling",)):
        elementwise = _with_fan_of(initializer, shape)
    kind = next((k for k in _OPERATIONS if _draws_as(elementwise, (k,))), None)
    if kind is None:
        return None
    seed = [initializer.seed, 0]
    if isinstance(initializer.seed, keras.random.SeedGenerator):
        seed = keras.ops.convert_to_numpy(initializer.seed.next()).tolist()
    if dtype == "float32":
        elements = block_rows * shape[1]
        return lambda block: _part_of_stock(
            kind, elementwise, seed, block * elements // _TOGETHER
        )
    config = elementwise.get_config()

    def block_initializer(block):
        # A 64-bit mix keeps the seeds of neighbouring blocks apart.
        mixed = np.random.SeedSequence([*seed, block]).generate_state(1)[0]
        config["seed"] = int(mixed) & 0x7FFFFFFF
        return type(elementwise).from_config(config)

    return block_initializer


def _part_of_stock(kind, initializer, seed, start):
    """Initializer of a part of what stock Keras draws at once.

    Args:
        kind: a key of `_OPERATIONS`.
        initializer: an initializer of that kind.
        seed: list of two integers.
        start: the number of the part's first element, by `_TOGETHER`.
    """
    operation, distance = _OPERATIONS[kind]
    if kind == "RandomUniform":
        low = tf.constant(initializer.minval, tf.float32)
        scale = tf.constant(initializer.maxval, tf.float32) - low
    else:
        low = tf.constant(initializer.mean, tf.float32)
        scale = tf.constant(initializer.stddev, tf.float32)

    def draw(shape, dtype):
        del dtype  # float32
        # As Keras's backend makes a seed for TensorFlow.
        folded = [value % (2**31 - 2) for value in seed]
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(
            seed=tf.constant(folded, tf.int32)
        )
        counter += tf.constant([start * distance, 0], tf.uint64)
        drawn = operation(
            shape=shape,
            key=key,
            counter=counter,
            alg=_PHILOX,
            dtype=tf.float32,
        )
        return drawn * scale + low

    return draw


def is_large(shape):
    """Whether a variable of a shape has more elements than a block."""
    return math.prod(shape) > BLOCK_ELEMENTS


def constant_of(initializer):
    """The number that all elements get from an initializer; None: several."""
    for name, number in (("Zeros", 0.0), ("Ones", 1.0)):
        if _draws_as(initializer, (name,)):
            return number
    is_one = _draws_as(initializer, ("Constant",)) and (
        np.ndim(initializer.value) == 0
    )
    return float(initializer.value) if is_one else None


def _draws_as(initializer, names):
    """Whether it draws by the code of one of Keras's initializers.

    A subclass may draw each element by where it is.
    """
    kinds = [getattr(keras.initializers, name) for name in names]
    return any(type(initializer).__call__ is kind.__call__ for kind in kinds)


def _with_fan_of(initializer, shape):
    """The fan-based initializer as one that does not look at its shape."""
    fan_in, fan_out = shape
    fan = {
        "fan_in": fan_in,
        "fan_out": fan_out,
        "fan_avg": (fan_in + fan_out) / 2.0,
    }[initializer.mode]
    variance = initializer.scale / max(1.0, fan)
    if initializer.distribution == "uniform":
        limit = (3.0 * variance) ** 0.5
        return keras.initializers.RandomUniform(-limit, limit)
    if initializer.distribution == "untruncated_normal":
        return keras.initializers.RandomNormal(0.0, variance**0.5)
    # 0.8796... is the standard deviation of a normal truncated at two
    # standard deviations, as in Keras's VarianceScaling.
    return keras.initializers.TruncatedNormal(
        0.0, variance**0.5 / 0.87962566103423978
    )


def standardize(initializer, name="initializer"):
    """An initializer object or function, from a layer's argument."""
    if initializer is None:  # as Keras's `add_weight`
        initializer = "glorot_uniform"
    return checks.keras_object(
        name,
        initializer,
        lambda value: keras.initializers.get(
            value() if inspect.isclass(value) else value
        ),
        "a Keras initializer, its name ('uniform'), or a function of shape "
        "and dtype",
    )
