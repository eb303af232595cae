"""Each private name that is used, so that a new version says which broke."""

import pytest
import tensorflow as tf

from keras_sparsity._tf import tf_graphs

pytestmark = pytest.mark.smoke


def test_timestamps_are_in_no_order_with_others():
    @tf.function
    def now():
        first, second = tf_graphs.timestamp(), tf_graphs.timestamp()
        with tf.control_dependencies([first, second]):
            return tf_graphs.timestamp() - first

    assert 0 <= float(now()) < 1
    operations = now.get_concrete_function().graph.get_operations()
    stamps = [op for op in operations if op.type == "Timestamp"]
    assert [len(op.control_inputs) for op in stamps] == [0, 0, 2]


def test_outermost_graph():
    numbers = []

    @tf.function
    def outer(x):
        numbers.append(
            (tf_graphs.outermost_graph(), tf_graphs.outermost_function())
        )

        @tf.function
        def inner(y):
            for _ in tf.range(2):
                numbers.append(
                    (
                        tf_graphs.outermost_graph(),
                        tf_graphs.outermost_function(),
                    )
                )
                y += 1.0
            return y

        return inner(x)

    assert tf_graphs.outermost_graph() is tf_graphs.outermost_function() is None
    graph = outer.get_concrete_function(tf.ones([])).graph
    assert {found for found, _ in numbers} == {graph}
    assert len({number for _, number in numbers}) == 1
    before = numbers[0][1]
    outer.get_concrete_function(tf.ones([2]))
    assert numbers[-1][1] != before


@pytest.mark.parametrize("is_converted", [True, False])
def test_converted_as_its_caller(is_converted):
    def doubled_if_positive(x):
        if x > 0:  # of a tensor: for AutoGraph alone
            x *= 2.0
        return x

    @tf.function(autograph=is_converted)
    def call(x):
        return tf_graphs.converted_by_autograph(doubled_if_positive)(x)

    if not is_converted:
        with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
            call(tf.constant(3.0))
        return
    assert call(tf.constant(3.0)) == 6.0
    assert call(tf.constant(-3.0)) == -3.0


def test_captured():
    handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name="c")
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0))
    assert tf_graphs.captured(handle) is handle

    @tf.custom_gradient
    def count(x):
        def gradient(upstream):
            tf.raw_ops.AssignAddVariableOp(
                resource=tf_graphs.captured(handle), value=tf.constant(1)
            )
            return upstream

        return tf.identity(x), gradient

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                y = count(y) * 2.0
        return tape.gradient(y, x)

    assert step(tf.ones([])) == 8.0
    assert tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32) == 3


def test_captured_by_a_function_of_several_others():
    handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name="d")
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0))

    @tf.function
    def inner():
        tf.raw_ops.AssignAddVariableOp(
            resource=tf_graphs.captured(handle), value=tf.constant(1)
        )

    for _ in range(2):
        tf.function(lambda: inner())()
    inner()
    assert tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32) == 3


def test_around_control_flow():
    found = {}

    def body(i):
        found["loop"] = tf_graphs.around_control_flow(found["entered"])
        inside = tf.compat.v1.get_default_graph()
        found["inside"] = tf_graphs.around_control_flow(inside)
        return i + 1

    @tf.function
    def function():
        graph = tf.compat.v1.get_default_graph()
        found["entered"] = found["graph"] = graph
        found["outside"] = tf_graphs.around_control_flow(graph)
        return tf.while_loop(lambda i: i < 2, body, [0])

    function()
    assert found["outside"] is None and found["inside"] is None
    assert found["loop"] is None or found["loop"][1] is found["graph"]
    assert found["loop"] is not None
    assert tf_graphs.around_control_flow(None) is None


def _in_function(x):
    return tf.function(lambda: x + tf.random.normal([]), autograph=False)()


_GENERATOR = tf.random.Generator.from_seed(1)
_DRAWS = {
    "tf.random": (lambda x: x + tf.random.normal([]), True),
    "branch": (
        lambda x: tf.cond(x > 0, lambda: tf.random.uniform([]), lambda: x),
        True,
    ),
    "loop": (
        lambda x: tf.map_fn(lambda each: each * tf.random.normal([]), x[None]),
        True,
    ),
    "function": (_in_function, True),
    "branch in a function": (
        lambda x: tf.cond(x > 0, lambda: _in_function(x), lambda: x),
        True,
    ),
    "generator": (lambda x: x + _GENERATOR.normal([]), True),
    "seeds": (lambda x: x + tf.random.stateless_normal([], (1, 2)), False),
    "branch without": (
        lambda x: tf.cond(x > 0, lambda: tf.print(x), lambda: tf.no_op()),
        False,
    ),
}


@pytest.mark.parametrize("name", _DRAWS)
def test_operations_that_draw(name):
    draw, is_drawing = _DRAWS[name]
    found = []

    @tf.function(autograph=False)
    def step(x):
        tf.random.normal([])  # an earlier one
        first = tf_graphs.num_operations()
        with tf.init_scope():
            assert tf_graphs.num_operations() == 0
        draw(x)
        found.extend(tf_graphs.drawing_operations(first))

    step.get_concrete_function(tf.TensorSpec([]))
    assert bool(found) == is_drawing
    assert tf_graphs.drawing_operations() == []
