import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf.tf_sessions import function_of


def test_function_of_feeds_and_fetches():
    with tf.Graph().as_default() as graph:
        number = tf.compat.v1.placeholder(tf.int64, [])
        rows = tf.compat.v1.placeholder(tf.bfloat16, [None, 2])
        text = tf.compat.v1.placeholder(tf.string, [])
        variable = tf.raw_ops.VarHandleOp(
            dtype=tf.int64, shape=[], shared_name="number"
        )
        assign = tf.raw_ops.AssignVariableOp(resource=variable, value=number)
        read = tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.int64)
        session = tf.compat.v1.Session(
            tf.distribute.Server.create_local_server().target, graph=graph
        )
        target = tf.identity(number)
        run = function_of(
            session,
            [number, rows, text],
            [rows * 2, tf.identity(text)],
            [assign, target],
        )
        read = function_of(session, [], [read])
        late = function_of(session, [], [tf.constant(5)])
    values = np.arange(6).reshape(3, 2).T[:, :2].T
    doubled, found = run(7, values, b"\x00word")
    assert doubled.dtype == tf.bfloat16.as_numpy_dtype
    np.testing.assert_array_equal(doubled.astype(int), values * 2)
    assert found == b"\x00word"
    assert read() == [7] and late() == [5]
    with pytest.raises(ValueError):
        run(7, values)
    session.close()
    with pytest.raises((RuntimeError, tf.errors.OpError)):
        read()
