"""Each private name that is used, so that a new version says which broke."""

import inspect

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from keras_sparsity._tf import tf_context

pytestmark = pytest.mark.smoke


def test_heartbeats_may_be_missed():
    # Whether they are missed without harm, tests/health/test_watch.py shows.
    ours = context.context()
    with tf_context.heartbeats_may_be_missed(7):
        configure = ours.configure_coordination_service
        assert configure.keywords == {"heartbeat_timeout_in_ms": 7000}
        inspect.signature(configure.func).bind(
            "standalone", **configure.keywords
        )
    assert "configure_coordination_service" not in vars(ours)


def test_anonymous_name():
    handles = [
        tf.raw_ops.VarHandleOp(
            dtype=tf.int32, shape=[], shared_name=tf_context.anonymous_name()
        )
        for _ in range(2)
    ]
    for value, handle in enumerate(handles):
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(value))
    read = tf.function(
        lambda: tf.raw_ops.ReadVariableOp(resource=handles[0], dtype=tf.int32)
    )
    assert read() == 0
    handles.clear()  # the function keeps it alive
    assert read() == 0


def test_abort_collectives():
    # It ends the collectives of this process for good: see test_watch.py.
    from tensorflow.python.eager import context

    assert callable(context.context().abort_collective_ops)
