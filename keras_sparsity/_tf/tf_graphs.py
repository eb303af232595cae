"""Graphs of traced functions. Checked on TensorFlow 2.16 to 2.21."""

import itertools
import weakref

import tensorflow as tf

_graph_numbers = weakref.WeakKeyDictionary()
_next_graph_number = itertools.count(1)


def current():
    """The graph being traced; None when eager."""
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()


def outermost_graph():
    """The outermost `tf.function` graph being traced; None when eager.

    `FuncGraph.outer_graph`.
    """
    graph = current()
    while isinstance(getattr(graph, "outer_graph", None), tf.Graph):
        if not hasattr(graph.outer_graph, "outer_graph"):
            break
        graph = graph.outer_graph
    return graph


def outermost_function():
    """The number of the outermost function being traced; None when eager."""
    graph = outermost_graph()
    if graph is None:
        return None
    if graph not in _graph_numbers:
        _graph_numbers[graph] = next(_next_graph_number)
    return _graph_numbers[graph]


def is_compiled_by_xla():
    """Whether a function with `jit_compile=True` is being traced.

    `control_flow_util.GraphOrParentsInXlaContext`.
    """
    from tensorflow.python.ops import control_flow_util

    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def innermost_function():
    """The graph of the innermost `tf.function` being traced; None when eager.

    Out of its loops and branches: `ControlFlowFuncGraph`.
    """
    from tensorflow.python.ops import control_flow_v2_func_graphs

    graph = current()
    while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


def captured(tensor):
    """An eager tensor, as the `tf.function` being traced sees it.

    For resources used in a loop: the gradient of a `tf.while_loop` cannot
    capture an eager tensor by itself, only tensors of the enclosing function.
    Not of the outermost function: several others may call an inner one.

    `FuncGraph.capture`.
    """
    graph = innermost_function()
    return graph.capture(tensor) if hasattr(graph, "capture") else tensor


def converted_by_autograph(function):
    """A function, converted if AutoGraph converts the code that calls this.

    `tf.__internal__.autograph`.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(
        function, autograph.control_status_ctx(), convert_by_default=False
    )


def calls_so_far():
    """Operations of the graph in tracing that call others, or Python code."""
    if tf.executing_eagerly():
        return []
    kinds = (
        *("Case", "If", "StatelessCase", "StatelessIf"),
        *("PartitionedCall", "StatefulPartitionedCall"),
        *("EagerPyFunc", "PyFunc", "StatelessWhile", "While"),
    )
    graph = tf.compat.v1.get_default_graph()
    return [op for op in graph.get_operations() if op.type in kinds]


def num_operations():
    """The number of operations of the graph in tracing; 0 when eager."""
    if tf.executing_eagerly():
        return 0
    return len(tf.compat.v1.get_default_graph().get_operations())


def drawing_operations(first=0):
    """Operations of the graph in tracing that draw anew when repeated.

    Those of `tf.random`, whose generators are in TensorFlow's kernels, and of
    `tf.random.Generator`, also in branches, loops and functions.

    Args:
        first: the number of the graph's operations that are left out.
    """
    if tf.executing_eagerly():
        return []
    graph = tf.compat.v1.get_default_graph()
    return list(_drawing(graph, graph.get_operations()[first:]))


def _drawing(graph, operations):
    """Those of some operations of a graph, and of functions they call.

    `Graph._get_function`.
    """
    for op in operations:
        if not op.op_def.is_stateful:
            continue
        attributes = op.node_def.attr
        if op.type == "RngReadAndSkip" or {"seed", "seed2"} <= {*attributes}:
            yield op
        for attribute in attributes.values():
            for called in (attribute.func, *attribute.list.func):
                function = called.name and graph._get_function(called.name)
                if function:
                    inner = function.graph
                    yield from _drawing(inner, inner.get_operations())


def around_control_flow(entered):
    """The outermost loop or branch of a step that is being traced.

    `ControlFlowFuncGraph`, `FuncGraph.outer_graph`.

    Args:
        entered: the graph in which the step began. The loops around it, for
            example over steps, do not count.

    Returns:
        The graph of that loop or branch, and the graph around it; None
        outside of loops and branches.
    """
    from tensorflow.python.ops import control_flow_v2_func_graphs

    found = None
    graph = current()
    while graph is not None and graph is not entered:
        outer = getattr(graph, "outer_graph", None)
        if isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
            found = graph, outer
        graph = outer
    return found


def timestamp():
    """Seconds, when this operation is reached: a float64 tensor.

    Only control dependencies order it. TensorFlow would otherwise run all
    timestamps and other stateful operations one after the other.

    `Graph.experimental_acd_manager`,
    `AutomaticControlDependencies.run_independently`.
    """
    now = tf.timestamp()
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        if graph.experimental_acd_manager is not None:
            graph.experimental_acd_manager.run_independently(now.op)
    return now
