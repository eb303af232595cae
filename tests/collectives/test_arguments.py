"""Wrong arguments of collectives; `tests/bad_arguments` has more."""

import pytest
import tensorflow as tf

from keras_sparsity import collectives


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda c: c.all_reduce([True]), "cast it to int32 to count"),
        (
            lambda c: c.group("machine").group("across"),
            "Ask the collectives of all processes",
        ),
        (
            tf.function(lambda c: c.gather_objects(1)),
            "Call it outside",
        ),
    ],
)
def test_mistakes_are_explained(call, message):
    with pytest.raises(ValueError, match=message):
        call(collectives.current())


def test_wrong_splits_in_a_function_are_explained():
    current = collectives.current()
    traced = tf.function(lambda x, s: current.all_to_all(x, s, "rows")[0])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match='"rows.*do not sum'
    ):
        traced(tf.ones([2]), tf.constant([1]))
