"""Rows and their gradients in 8 bits: `wire_dtype="int8"`."""

import contextlib
import dataclasses
import zlib

import tensorflow as tf

from keras_sparsity._tf import contexts

_LARGEST = 127
_COLUMN_BYTES = 4  # of int32, which every engine carries

# Numbers of the steps that are being traced, the innermost last.
_steps = []


def row_bytes(width):
    """Bytes of an encoded row of `width` numbers, and of their scale."""
    return _COLUMN_BYTES * (-(-width // _COLUMN_BYTES) + 1)


@dataclasses.dataclass(frozen=True)
class RowWire:
    """A conversion of rows to 8 bits a number, and back; see `Wire`.

    With s = max |row| / 127, a float32 for each row, a number x travels as

        round(x / s)           a row
        floor(x / s + u)       a gradient, u drawn from [0, 1)

    A drawn gradient has x as its mean, so that the errors of many steps
    cancel out. (Error feedback would keep them instead: at the sender, one for
    each row of a table that it does not own. Models trained no better with it,
    see `benchmarks/tried.md`.) A row with a number that is not finite arrives
    as NaN.

    Args:
        source: the rows' own dtype, a float.
        is_drawn: whether to draw, as for gradients.
        role, rank: the seed, beside the values, and the step in a model's own.

    References:
        Alistarh et al., *QSGD*, 2017 (arXiv:1610.02132), 3.1.
    """

    source: tf.DType
    is_drawn: bool = False
    role: str = ""
    rank: int = 0

    def num_bytes(self, width):
        """Bytes of a row of `width` numbers."""
        return row_bytes(width)

    def carry(self, rows, send, *args, **kwargs):
        """Sends rows `(n, ...)`: `send(encoded, *args, **kwargs)`, decoded."""
        arrived = send(self.encode(rows), *args, **kwargs)
        return self.decode(arrived, rows.shape[1:])

    def encode(self, rows):
        """int32 `(n, columns)` of rows `(n, ...)`."""
        width = rows.shape[1:].num_elements()
        rows = tf.cast(tf.reshape(rows, [-1, width]), tf.float32)
        largest = tf.reduce_max(tf.abs(rows), axis=1, keepdims=True)
        scale = largest / _LARGEST
        levels = tf.math.divide_no_nan(rows, scale)
        if self.is_drawn:
            drawn = tf.random.stateless_uniform(
                tf.shape(levels), self._seed(rows)
            )
            levels = tf.floor(levels + drawn)
        levels = tf.clip_by_value(tf.round(levels), -_LARGEST, _LARGEST)
        is_finite = tf.reduce_all(tf.math.is_finite(rows), 1, keepdims=True)
        scale = tf.where(is_finite, scale, float("nan"))
        levels = tf.where(is_finite, levels, 0.0)
        missing = -rows.shape[1] % _COLUMN_BYTES
        levels = tf.pad(tf.cast(levels, tf.int8), [[0, 0], [0, missing]])
        packed = tf.bitcast(
            tf.reshape(levels, [-1, levels.shape[1] // 4, _COLUMN_BYTES]),
            tf.int32,
        )
        return tf.concat([packed, tf.bitcast(scale, tf.int32)], axis=1)

    def decode(self, encoded, row_shape):
        """Rows `(n, *row_shape)` of int32 `(n, columns)`."""
        levels = tf.bitcast(encoded[:, :-1], tf.int8)
        levels = tf.reshape(levels, [-1, _COLUMN_BYTES * (levels.shape[1])])
        levels = levels[:, : row_shape.num_elements()]
        scale = tf.bitcast(encoded[:, -1:], tf.float32)
        rows = tf.cast(levels, tf.float32) * scale
        return tf.cast(tf.reshape(rows, [-1, *row_shape]), self.source)

    def _seed(self, rows):
        """The same in a repeated run; another one in each step and rank."""
        bits = tf.reduce_sum(tf.bitcast(rows, tf.int32))
        number = tf.cast(_steps[-1], tf.int32) if _steps else 0
        of_role = zlib.crc32(f"{self.role}/{self.rank}".encode()) >> 1
        return tf.stack([tf.bitwise.bitwise_xor(bits, of_role), number])


def in_step(number):
    """While entered, gradients of a step are drawn by its number.

    Args:
        number: integer tensor; None changes nothing.
    """
    if number is None:
        return contextlib.nullcontext()
    return contexts.on_top(_steps, number)
