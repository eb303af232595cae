"""The profile of a model's layers."""

import time

import tensorflow as tf

from keras_sparsity.stages import timing


def _num_calls(seconds):
    calls = []

    def wait():
        calls.append(None)
        time.sleep(seconds)
        return 0.0

    def function(tensors):
        del tensors
        return [tf.py_function(wait, [], tf.float32)]

    assert timing.median_seconds(function, []) >= seconds
    return len(calls)


def test_long_runs_are_not_repeated():
    # The first one is traced, and not counted.
    assert _num_calls(0.001) == 1 + 3
    assert _num_calls(0.6) == 1 + 1
