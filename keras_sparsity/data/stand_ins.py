"""An example to compute on, for a rank whose part of a batch has none.

It is a real one, of another rank or of the batch before: a layer may refuse
anything else (a lookup of unknown words, ids that count from one), and where
it is finite on all examples, it is on this one. Nothing of it counts, see
`empty_parts`.
"""

import typing

import tensorflow as tf

from keras_sparsity.data.batches import (
    bounds,
    num_examples,
    rows_between,
    unpacked,
    without_rows,
)


class Counted(typing.NamedTuple):
    """The examples that a step computes on.

    Attributes:
        batch: this rank's part of the batch; in place of none, one example.
        counts: int64 `(2,)`: the number of its examples that count, and the
            number in the whole batch; int32 `(1,)` where that is not known. Of
            two dtypes, a function is traced for each: of one dtype it would be
            traced for any shape.
    """

    batch: typing.Any
    counts: typing.Any


def counted_part(batch, rank, size):
    """One rank's rows of a batch, as `split_batch` cuts them.

    Example:

    >>> part, counts = counted_part(tf.constant([7, 8]), rank=0, size=3)
    >>> part.numpy().tolist(), counts.numpy().tolist()
    ([7], [0, 2])
    """
    number = num_examples(batch)
    if number is None:
        return Counted(batch, tf.constant([0]))
    start, stop = bounds(number, rank, size)
    first = tf.where(stop > start, start, 0)  # of the batch, if it has none
    part = rows_between(batch, first, tf.maximum(stop, first + 1))
    return Counted(_filled(part, number), tf.stack([stop - start, number]))


def counted(batch):
    """A `Counted` part, of which it is not known what others have.

    Args:
        batch: this rank's part of a batch, or what is `Counted` already: as a
            whole, or its inputs.
    """
    if isinstance(batch, Counted):
        return batch
    if isinstance(batch, tuple) and batch and isinstance(batch[0], Counted):
        return Counted(without_counts(batch), batch[0].counts)
    inputs, _, _ = unpacked(batch)
    leaves = [x for x in tf.nest.flatten(inputs) if x is not None]
    shape = tf.TensorShape(leaves[0].shape)
    if shape.rank and shape[0]:  # as a single batch has
        return Counted(batch, tf.constant([shape[0]]))
    number = num_examples(leaves[0])
    counts = tf.cast(tf.stack([number]), tf.int32)
    return Counted(_filled(batch, number), counts)


def without_counts(batch):
    """The batch, as a step of the user's is given it."""
    if isinstance(batch, Counted):
        return batch.batch
    if isinstance(batch, tuple) and batch and isinstance(batch[0], Counted):
        return (batch[0].batch, *batch[1:])
    return batch


def with_stand_ins(parts):
    """`Counted` parts of a rank that sees no whole batches.

    In place of none it gets the first example of its batch before, and before
    its first one zeros. Parts stay as they are where they cannot be held back.
    """
    spec = parts.element_spec
    if not can_be_held_back(spec):
        return parts
    start = zeros(nothing_of(spec))

    @tf.autograph.experimental.do_not_convert
    def step(before, element):
        before = tf.nest.pack_sequence_as(element, before, True)
        number = num_examples(element)
        part = _either(number > 0, element, before)
        one = rows_between(part, tf.constant(0, tf.int64), 1)
        counts = tf.cast(tf.stack([number]), tf.int32)
        return flat(one), Counted(part, counts)

    return parts.scan(flat(start), step)


def can_be_held_back(spec):
    """Whether a scan can keep the elements of a dataset of this spec."""
    kinds = tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec
    return all(isinstance(each, kinds) for each in tf.nest.flatten(spec))


def nothing_of(spec):
    """An element of this spec without examples; unknown dimensions are 1."""
    nothing = tf.nest.map_structure(without_rows, spec)
    if isinstance(spec, Counted):
        counts = tf.zeros(spec.counts.shape, spec.counts.dtype)
        nothing = Counted(nothing.batch, counts)
    return nothing


def flat(batch):
    """Its tensors: a scan keeps no ragged or sparse ones."""
    return tuple(tf.nest.flatten(batch, expand_composites=True))


def zeros(batch):
    """One example of zeros, of the structure and inner shapes of a batch."""

    def example(leaf):
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return leaf
        if isinstance(leaf, tf.RaggedTensor):
            splits = tf.zeros([2], leaf.row_splits.dtype)
            return tf.RaggedTensor.from_row_splits(leaf.values[:0], splits)
        if isinstance(leaf, tf.SparseTensor):
            shape = tf.concat([[1], leaf.dense_shape[1:]], 0)
            return tf.SparseTensor(leaf.indices[:0], leaf.values[:0], shape)
        leaf = tf.convert_to_tensor(leaf)
        one = tf.zeros(tf.concat([[1], tf.shape(leaf)[1:]], 0), leaf.dtype)
        if leaf.shape.rank is not None:
            one = tf.ensure_shape(one, [1, *leaf.shape[1:]])
        return one

    return tf.nest.map_structure(example, batch)


def _filled(batch, number):
    """The batch, or one example of zeros where `number`, its own, is 0."""
    known = tf.get_static_value(number)
    if known is None:
        return _either(number > 0, batch, zeros(batch))
    return zeros(batch) if known == 0 else batch


def _either(is_first, first, second):
    """One of two batches of one structure."""
    leaves = tf.nest.flatten(first, expand_composites=True)
    others = tf.nest.flatten(second, expand_composites=True)
    pairs = zip(leaves, others, strict=True)
    places = [place for place, (a, b) in enumerate(pairs) if a is not b]
    chosen = tf.cond(
        is_first,
        lambda: [leaves[place] for place in places],
        lambda: [others[place] for place in places],
    )
    for place, leaf in zip(places, chosen, strict=True):
        leaves[place] = leaf
    return tf.nest.pack_sequence_as(first, leaves, expand_composites=True)
