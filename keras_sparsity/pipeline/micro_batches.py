"""The micro-batches of a batch."""

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_functional


class MicroBatches:
    """A batch, divided; parts differ in size by one example at most.

    A part without examples, of a batch smaller than the number of parts, has
    one of its neighbour's as a stand-in, and counts for nothing. A `place` is
    the number of a part, or a range of such numbers: these parts as one.

    Args:
        functional: the model's `Functional`.
        data: a batch, as `train_step` gets it.
        number: the number of parts.
        num_pieces: the number of pieces of a part, as even. A place is then
            that of pieces.

    Attributes:
        num_examples: int32 scalar, of the whole batch.
        batch: `(x, y, sample_weight)` of the whole batch.
    """

    def __init__(self, functional, data, number, num_pieces=1):
        self.batch = keras.utils.unpack_x_y_sample_weight(data)
        x, y, sample_weight = self.batch
        inputs = keras_functional.flat_inputs(functional, x)
        self._parts = inputs, x, y, sample_weight
        self.num_examples = tf.shape(inputs[0])[0]
        self._numbers = [
            piece
            for part in shares(self.num_examples, number)
            for piece in shares(part, num_pieces)
        ]
        self._num_pieces = num_pieces

    def part(self, place):
        """`(inputs, x, y, sample_weight)`, of one part."""
        first = place.start if isinstance(place, range) else place
        begin = _sum(self._numbers[:first])
        begin = tf.minimum(begin, self.num_examples - 1)
        end = begin + self.size(place)
        return keras.tree.map_structure(
            lambda tensor: None if tensor is None else tensor[begin:end],
            self._parts,
        )

    def number(self, place):
        """int32 scalar: the number of a part's examples."""
        if isinstance(place, range):
            return _sum(self._numbers[place.start : place.stop])
        return self._numbers[place]

    def size(self, place):
        """int32 scalar: the number of a part's examples, at least 1."""
        return tf.maximum(self.number(place), 1)

    def share(self, place):
        """float32 scalar: a part's share of the batch."""
        return tf.cast(self.number(place) / self.num_examples, tf.float32)

    def in_order(self, rows, width):
        """Rows in the order of the batch.

        Args:
            rows: those of the ranks that share each part, in rank order.
            width: the number of a rank's pieces of a part.
        """
        if width == self._num_pieces:
            return rows
        places = [
            range(first + own, first + own + width)
            for own in range(0, self._num_pieces, width)
            for first in range(0, len(self._numbers), self._num_pieces)
        ]
        parts = tf.split(rows, [self.number(place) for place in places])
        order = sorted(range(len(places)), key=lambda i: places[i].start)
        return tf.concat([parts[i] for i in order], 0)


def _sum(numbers):
    return tf.add_n([tf.zeros([], tf.int32), *numbers])


def shares(num_examples, number):
    """The sizes of a batch's parts: a list of int32 scalars.

    Args:
        num_examples: int32 scalar, of the whole batch.
        number: the number of parts.
    """
    size, rest = num_examples // number, num_examples % number
    return [size + tf.cast(place < rest, tf.int32) for place in range(number)]
