"""Batches, each with the known parts of the next one."""

import typing

import tensorflow as tf

from keras_sparsity.data.batches import num_examples, unpacked
from keras_sparsity.data.stand_ins import (
    Counted,
    can_be_held_back,
    flat,
    nothing_of,
)


class Followed(typing.NamedTuple):
    """A batch and the inputs of the one that follows.

    Attributes:
        batch: the batch that `fit` trains on.
        following: its `x` of the next step; after the last one, of no rows.
        number: how many of those examples count.
        labels: their `y`; () if there is none.
    """

    batch: typing.Any
    following: typing.Any
    number: typing.Any
    labels: typing.Any


def with_following(dataset):
    """Each batch with the inputs of the next one.

    The pipeline runs once only, one batch ahead of the batches taken.

    Returns:
        `tf.data.Dataset` of as many `Followed`; None where the dataset has
        elements that cannot be held back.

    Example:

    >>> batches = tf.data.Dataset.range(5).batch(2)
    >>> [(x.numpy().tolist(), following.numpy().tolist())
    ...  for x, following, *_ in with_following(batches)]
    [([0, 1], [2, 3]), ([2, 3], [4]), ([4], [])]
    """
    if not can_be_held_back(dataset.element_spec):
        return None
    nothing = nothing_of(dataset.element_spec)
    end = tf.data.Dataset.from_tensors(nothing)

    @tf.autograph.experimental.do_not_convert
    def step(before, element):
        batch, number = element, None
        if isinstance(element, Counted):
            batch, number = element.batch, element.counts[0]
        inputs, labels, _ = unpacked(batch)
        if number is None:
            number = num_examples(inputs)
        before = tf.nest.pack_sequence_as(element, before, True)
        labels = () if labels is None else labels
        return flat(element), Followed(before, inputs, number, labels)

    return dataset.concatenate(end).scan(flat(nothing), step).skip(1)
