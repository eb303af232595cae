"""Which operations of a traced step XLA compiles."""

import pytest
import tensorflow as tf

from keras_sparsity._tf import xla

pytestmark = pytest.mark.smoke


def marked(function, is_asked_for=True):
    """Types of the operations in the graph of a function, by their mark."""

    @tf.function
    def traced(x):
        with xla.compiled_between_messages(is_asked_for):
            return function(x)

    graph = traced.get_concrete_function(tf.constant([1.0])).graph
    found = {True: [], False: []}
    for op in graph.get_operations():
        attributes = op.node_def.attr
        mark = "_XlaCompile" in attributes and attributes["_XlaCompile"].b
        found[mark].append(op.type)
    return found


def test_operations_between_messages_are_compiled():
    def step(x):
        x = tf.exp(x)
        with xla.not_compiled():
            x = tf.sin(x)
            with xla.compiled():
                x = tf.cos(x)
        return tf.raw_ops.CollectiveReduceV2(
            input=x,
            group_size=2,
            group_key=1,
            instance_key=1,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )

    found = marked(step)
    assert {"Exp", "Cos"} <= set(found[True])
    assert {"Sin", "CollectiveReduceV2"} <= set(found[False])
    assert marked(step, is_asked_for=False)[True] == []


def test_nothing_changes_in_eager_execution():
    with xla.compiled_between_messages(True), xla.not_compiled():
        assert float(tf.exp(0.0)) == 1


def test_clusters_are_compiled():
    """By the executed graph, as `tf.summary` records it."""
    from tensorflow.python.eager import context

    @tf.function
    def step(x):
        with xla.compiled_between_messages(True):
            return tf.reduce_sum(tf.exp(tf.sin(x)) * tf.cos(x))

    tf.summary.trace_on(graph=True)
    for _ in range(3):
        step(tf.ones([4]))
    graphs = context.export_run_metadata().partition_graphs
    tf.summary.trace_off()
    executed = {node.op for graph in graphs for node in graph.node}
    assert {"_XlaCompile", "_XlaRun"} <= executed
