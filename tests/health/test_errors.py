"""Which of TensorFlow's errors are a collective's."""

import pytest
import tensorflow as tf

from keras_sparsity.health import errors

TRACE = '  File "keras_sparsity/collectives/base.py", line 1, in _call\n'


@pytest.mark.parametrize(
    "message",
    [
        f"Detected at node 'Reshape' defined at:\n{TRACE}wrong shape",
        "assertion failed: [ids] in a model named collective",
    ],
)
def test_other_errors_stay_as_they_are(message):
    error = tf.errors.InvalidArgumentError(None, None, message)
    assert errors.explain(error) is error


@pytest.mark.parametrize("word", ["CollectiveReduceV2", "Horovod"])
def test_errors_of_collectives_are_known(word):
    error = tf.errors.InternalError(None, None, f"{TRACE}{word} was aborted")
    assert errors._is_collectives(error)
