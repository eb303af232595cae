"""Each private name that is used, so that a new version says which broke."""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf import tf_subgraphs

pytestmark = pytest.mark.smoke

WORDS = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer([3, 4], [0, 1]), 7
)
STATE = tf.Variable([1, 2])
KNOWN = tf.constant([5, 6])


def computations(x):
    """Tensors by name, of those that are computed alike in each trace."""
    i = tf.constant([0, 1])
    return {
        "input": x,
        "slice": x[:, 0],
        "other slice": x[:, 1],
        "lookup": WORDS.lookup(x),
        "captured": x + KNOWN,
        "constant": x + i,
    }


def test_equal_computations_of_two_traces_are_known():
    numbers = tf_subgraphs.Computations()
    found = []

    def trace(x):
        numbers.stands_for(x, "x")
        of_trace = computations(x)
        with_state = {
            "variable": x + STATE,
            "random": x + tf.random.uniform([2], maxval=3, dtype=x.dtype),
            "branch": tf.cond(x[0, 0] > 0, lambda: x, lambda: x + 1),
        }
        unknown = tf.identity(x)
        numbers.stands_for(unknown, None)
        with_state["unknown"] = unknown + 1
        for name, tensor in with_state.items():
            assert numbers.number_of(tensor) is None, name
        found.append({k: numbers.number_of(t) for k, t in of_trace.items()})

    spec = tf.TensorSpec([None, 2], tf.int32)
    for _ in range(2):
        tf.function(trace).get_concrete_function(spec)
    assert found[0] == found[1]
    assert None not in found[0].values()
    assert len(set(found[0].values())) == len(found[0])


def test_computations_are_made_again():
    spec = tf.TensorSpec([None, 2], tf.int32)
    inside = {}

    @tf.function
    def step(x):
        def inner(x):
            tf.print("never")
            inside.update(computations(x))

        traced = tf.function(inner).get_concrete_function(spec)
        return tf_subgraphs.made_again(
            list(inside.values()), [(traced.inputs[0], x)]
        )

    x = tf.constant([[3, 4], [4, 9]])
    again = step(x)
    for name, found in zip(inside, again, strict=True):
        np.testing.assert_array_equal(found, computations(x)[name])
    operations = step.get_concrete_function(x).graph.get_operations()
    assert "PrintV2" not in {operation.type for operation in operations}
