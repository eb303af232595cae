"""Where reshapes have the examples of a batch, by the operations of a graph."""

import math

import tensorflow as tf


def place(op, axis):
    """The output's axis of the examples, perhaps times places of each, or None.

    Args:
        op: a `Reshape` of tensors whose ranks are known.
        axis: that of the examples in its input.
    """
    of_tensordot = _of_tensordot(op)
    if of_tensordot is not None:
        order, groups = of_tensordot
        return 0 if order[axis] in groups[0] else 1
    before, after = (x.shape.as_list() for x in (op.inputs[0], op.outputs[0]))
    if None in before[:axis]:
        return None
    outer, size, passed = math.prod(before[:axis]), before[axis], 1
    for candidate, length in enumerate(after):
        if passed == outer:
            if length in (None, size):
                return candidate
            if length != 1:
                is_multiple = size and length % size == 0
                return candidate if is_multiple else None
        if length is None:
            return None
        passed *= length
    return None


def is_inner_product(op):
    """Whether a product of `tf.tensordot` leaves no axis of its operands."""
    operands = [_of_tensordot(tensor.op) for tensor in op.inputs]
    if None in operands:
        return False
    (_, (of_left, _)), (_, (_, of_right)) = operands
    return not of_left and not of_right


def _of_tensordot(op):
    """How `tf.tensordot` makes a matrix of an operand of unknown size.

    Its sizes are products, `[prod(gather(sizes, i)), prod(gather(sizes, j))]`.

    Returns:
        The operand's axes in their new order, and the two lists of axes that
        the matrix joins; None for other operations.
    """
    if op.type != "Reshape" or op.inputs[1].op.type != "Pack":
        return None
    groups = [_axes_of_product(tensor.op) for tensor in op.inputs[1].op.inputs]
    transposition = op.inputs[0].op
    if len(groups) != 2 or None in groups or transposition.type != "Transpose":
        return None
    order = tf.get_static_value(transposition.inputs[1])
    if order is None or sorted(order) != sorted(groups[0] + groups[1]):
        return None
    return order.tolist(), groups


def _axes_of_product(op):
    """The axes whose sizes an operation multiplies; None for others."""
    gathered = op.inputs[0].op if op.type == "Prod" else None
    if gathered is None or gathered.type != "GatherV2":
        return None
    axes = tf.get_static_value(gathered.inputs[1])
    if axes is None or gathered.inputs[0].op.type != "Shape":
        return None
    return axes.reshape(-1).tolist()
