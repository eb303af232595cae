"""Every rank holds the whole variable; gradients of rows are gathered."""

import functools

import numpy as np
import tensorflow as tf

from keras_sparsity.data import empty_parts
from keras_sparsity.exchange.layout import narrowest
from keras_sparsity.placement import slices
from keras_sparsity.placement.base import Placement, Reducer
from keras_sparsity.placement.mirrored import AllReduce

# Indices and gradients of any dtype travel in one message, as words.
_WORD = tf.uint16


class AllGather(Reducer):
    """Gives every rank the gradients of rows of all ranks.

    Those of all variables travel in two messages: how many rows each has, and
    all rows with their indices.
    """

    path = "allgather"
    role = "optimizer/rows/"

    @classmethod
    def reduce(cls, updates, communicator, options):
        for update in updates:
            rows = empty_parts.cut_slices(update.gradient)
            update.gradient = slices.merged(rows) if options.merges else rows
        rank = communicator.rank
        with tf.name_scope("all_gather"):
            wires = [_wire(update, options, rank) for update in updates]
            parts = []
            for update, wire in zip(updates, wires, strict=True):
                dtype = narrowest(update.variable.shape[0])
                parts.append(tf.cast(update.gradient.indices, dtype))
                parts.append(wire.encode(update.gradient.values))
            parts, counts = _gathered(parts, communicator)
        for number, (update, wire) in enumerate(
            zip(updates, wires, strict=True)
        ):
            own = update.gradient
            indices, values = parts[2 * number : 2 * number + 2]
            indices = tf.cast(indices, own.indices.dtype)
            values = wire.decode(values, own.values.shape[1:])
            update.gradient = tf.IndexedSlices(values, indices, own.dense_shape)
            of_ranks = functools.partial(tf.gather, counts, number, axis=1)
            update.touched = indices, of_ranks


class Gathered(Placement):
    """Gradients of rows are gathered, dense ones all-reduced.

    References:
        EuroSys 3.1 (AllGatherv).
    """

    name = "allgather"
    reducers = AllReduce, AllGather


def _wire(update, options, rank):
    values = update.gradient.values
    return options.gradient_wire(
        values.dtype,
        values.shape[1:].num_elements(),
        f"{AllGather.role}{update.variable.path}",
        rank,
    )


def _gathered(parts, communicator):
    """The rows of all ranks, one rank after the other.

    Args:
        parts: list of tensors `(rows, ...)` of any dtypes; the first two
            have as many rows, the next two, and so on.
        communicator: `Collectives` of all ranks.

    Returns:
        List of such tensors, and int32 `(size, len(parts) / 2)`: how many
        rows are of each rank.
    """
    size = communicator.size
    counts = communicator.all_gather(
        tf.stack([tf.shape(part)[0] for part in parts[::2]])[tf.newaxis],
        name=f"{AllGather.role}counts",
        counts=np.ones(size, np.int32),
    )
    counts = tf.ensure_shape(counts, [size, len(parts) // 2])
    widths = np.array([_num_words(part) for part in parts], np.int32)
    widths = widths.reshape([-1, 2])
    lengths = tf.reshape(counts[..., tf.newaxis] * widths, [size, -1])
    arrived = communicator.all_gather(
        tf.concat([_words(part) for part in parts], axis=0),
        name=f"{AllGather.role}values",
        counts=tf.reduce_sum(lengths, axis=1),
    )
    pieces = tf.split(arrived, tf.reshape(lengths, [-1]), num=size * len(parts))
    return [
        _of_words(tf.concat(pieces[i :: len(parts)], axis=0), part)
        for i, part in enumerate(parts)
    ], counts


def _num_words(part):
    """Words of a row."""
    return part.shape[1:].num_elements() * part.dtype.size // _WORD.size


def _words(part):
    return tf.reshape(tf.bitcast(part, _WORD), [-1])


def _of_words(words, part):
    """Words as rows like those of `part`."""
    shape = [-1, *part.shape[1:]]
    if part.dtype.size > _WORD.size:
        shape.append(part.dtype.size // _WORD.size)
    return tf.bitcast(tf.reshape(words, shape), part.dtype)
