"""Computations of traced functions: compared, and made once more elsewhere.

Checked on TensorFlow 2.16 to 2.21.
"""

import tensorflow as tf

from keras_sparsity._tf import tf_graphs

# Operations with state whose results stay the same in a step: those of
# vocabularies. TensorFlow has them wait for each other.
_READS_CONSTANT = ("LookupTableFindV2",)


class Computations:
    """Numbers computations: equal ones, also of several traces, alike.

    Two tensors have the same number if equal operations without state make
    them of the same tensors.
    """

    def __init__(self):
        self._numbers = {}
        # Of tensors, by their `key_of`.
        self._known = {}
        self._kept = []  # so that no other object takes over an `id`

    def stands_for(self, tensor, what):
        """Has a tensor be the same as others that stand for `what`.

        Args:
            tensor: the tensor.
            what: any object that can be a key; None: it equals nothing.
        """
        self._kept.append(tensor)
        known = None if what is None else self._number(("is", what))
        self._known[key_of(tensor)] = known

    def number_of(self, tensor):
        """The number of a tensor; None if it depends on state."""
        stack = [tensor]
        while stack:
            key = key_of(stack[-1])
            if key not in self._known:
                needed, description = self._made_of(stack[-1])
                if description is None:
                    return None
                missing = [t for t in needed if key_of(t) not in self._known]
                if missing:
                    stack += missing
                    continue
                numbers = tuple(self._known[key_of(t)] for t in needed)
                if None in numbers:
                    return None
                self._known[key] = self._number((description, numbers))
            if self._known[key] is None:
                return None
            stack.pop()
        return self._known[key_of(tensor)]

    def _made_of(self, tensor):
        """The tensors that a tensor is made of, and how; None: by state."""
        if not tf.is_symbolic_tensor(tensor):
            self._kept.append(tensor)
            return [], ("eager", id(tensor))
        if tensor.op.type == "Placeholder":
            outer = _captured_by(tensor)
            if outer is not None:
                return [outer], "captured"
            self._kept.append(tensor)
            return [], ("placeholder", key_of(tensor))
        description = _description(tensor.op)
        if description is None:
            return [], None
        return list(tensor.op.inputs), (description, tensor.value_index)

    def _number(self, computation):
        return self._numbers.setdefault(computation, len(self._numbers))


def key_of(tensor):
    """A key of a tensor, as long as its graph is there."""
    if not tf.is_symbolic_tensor(tensor):
        return id(tensor)
    return id(tensor.graph), tensor.name


def _description(operation):
    """What an operation does; None of one with state or functions."""
    if operation.type not in _READS_CONSTANT and (
        operation.op_def.is_stateful
        or operation.control_inputs
        or any(t.dtype == tf.resource for t in operation.inputs)
    ):
        return None
    attributes = operation.node_def.attr
    if any(a.HasField("func") or a.list.func for a in attributes.values()):
        return None
    return operation.type, tuple(
        (name, attributes[name].SerializeToString(deterministic=True))
        for name in sorted(attributes)
        if not name.startswith("_")
    )


def _captured_by(placeholder):
    """The tensor around a function that a placeholder in it stands for.

    `FuncGraph.captures`.
    """
    for outer, inner in getattr(placeholder.graph, "captures", ()):
        if inner is placeholder or inner.name == placeholder.name:
            return outer
    return None


def _needed_for(tensors, graph_def):
    """The part of a graph that tensors are made of; no node waits for others.

    `tf.compat.v1.graph_util.extract_sub_graph` does it with a warning.
    """
    of_name = {node.name: node for node in graph_def.node}
    stack = [tensor.op.name for tensor in tensors]
    needed = {}
    while stack:
        node = of_name[stack.pop()]
        if node.name in needed:
            continue
        needed[node.name] = node
        node.input[:] = [i for i in node.input if not i.startswith("^")]
        stack += [name.partition(":")[0] for name in node.input]
    return tf.compat.v1.GraphDef(
        node=[node for node in graph_def.node if node.name in needed],
        versions=graph_def.versions,
    )


def made_again(tensors, given):
    """Tensors of another graph, computed in the graph that is being traced.

    Args:
        tensors: list of tensors of one graph.
        given: list of pairs, of a placeholder of that graph and the tensor in
            its place. Captured tensors are captured again.
    """
    graph = tensors[0].graph
    nodes = _needed_for(tensors, graph.as_graph_def())
    names = {node.name for node in nodes.node}
    places = {
        inner.name: tf_graphs.captured(outer)
        for outer, inner in graph.captures
        if inner.op.name in names
    }
    places.update(
        (inner.name, outer) for inner, outer in given if inner.op.name in names
    )
    found = tf.graph_util.import_graph_def(
        nodes, places, [tensor.name for tensor in tensors], name="foreseen"
    )
    for tensor, made in zip(tensors, found, strict=True):
        made.set_shape(tensor.shape)
    return [
        places.get(tensor.name, made)
        for tensor, made in zip(tensors, found, strict=True)
    ]
