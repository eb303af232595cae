"""The ends of ranks' datasets, which have unequally many batches."""

import time

import pytest
import tensorflow as tf

from keras_sparsity.data.equal_steps import ending_together, with_equal_steps
from tests.data.batch_structures import listed, structures


@pytest.mark.parametrize("kind", structures())
def test_ranks_that_have_ended_get_batches_without_rows(kind):
    batch = structures()[kind]
    part = tf.data.Dataset.from_tensors(batch)
    # What the pipeline does not know of the shapes must be found from data.
    part = tf.data.Dataset.from_tensors(0).flat_map(lambda _: part)
    steps = with_equal_steps(part, 3, None)
    assert steps.cardinality() == 3
    first, *rest = steps
    assert listed(first) == listed(next(iter(part)))
    for step in rest:
        for empty, leaf in zip(
            tf.nest.flatten(step), tf.nest.flatten(first), strict=True
        ):
            if hasattr(leaf, "shape"):
                assert empty.shape[0] == 0
                assert empty.shape[1:] == leaf.shape[1:]


class _Counted:
    """Counts the messages of a rank whose `fit` stops before its input ends."""

    is_server = False

    def __init__(self):
        self.num_sent = 0

    def all_reduce(self, tensors, op, name):
        def note(is_left):
            self.num_sent += 1
            return is_left

        sent = tf.numpy_function(note, tensors, tf.int32)
        return [tf.ensure_shape(sent, [])]


def test_nothing_is_read_ahead_of_messages():
    """Not by steps that TensorFlow adds or makes parallel, either."""
    part = tf.data.Dataset.range(100).batch(2)
    for end in (
        lambda ranks: with_equal_steps(
            part, tf.data.UNKNOWN_CARDINALITY, ranks
        ),
        lambda ranks: ending_together(part, ranks),
    ):
        ranks = _Counted()
        iterator = iter(end(ranks))
        assert [next(iterator).numpy().tolist() for _ in range(2)] == [
            [0, 1],
            [2, 3],
        ]
        time.sleep(0.3)  # what reads ahead would have sent more by now
        assert ranks.num_sent == 2


def test_shapes_unknown_beforehand_are_kept():
    part = (
        tf.data.Dataset.from_tensors("1,2,3")
        .map(lambda line: tf.strings.to_number(tf.strings.split(line, ",")))
        .batch(1)
    )
    assert part.element_spec.shape.as_list() == [None, None]
    steps = list(with_equal_steps(part, 2, None))
    assert [tuple(step.shape) for step in steps] == [(1, 3), (0, 3)]
