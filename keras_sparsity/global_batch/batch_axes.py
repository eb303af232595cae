"""Which axis of each tensor in a traced step has the examples of a batch.

Read from the graph's operations, without running any. An operation that has no
rule here ends the trail: what follows from it is not known.
"""

import tensorflow as tf

from keras_sparsity.global_batch import joins, reshapes
from keras_sparsity.global_batch.joins import EXTREME, NUMBERS, REDUCED

_SAME = frozenset(
    """
    Abs Acos Asin Atan Cast CheckNumerics Ceil Cos Elu EnsureShape Erf Exp
    Expm1 Floor Identity Inv IsFinite IsInf IsNan LeakyRelu Log Log1p
    LogicalNot Neg OnesLike PreventGradient Reciprocal Relu Relu6 Round Rsqrt
    Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square StopGradient Tan
    Tanh ZerosLike
    """.split()
)
_ALONG_LAST = frozenset(["Softmax", "LogSoftmax"])
_BROADCAST = frozenset(
    """
    Add AddN AddV2 Atan2 BiasAdd DivNoNan Equal FloorDiv FloorMod Greater
    GreaterEqual Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mul
    MulNoNan NotEqual Pow RealDiv Select SelectV2 SquaredDifference Sub Xdivy
    Xlogy
    """.split()
)
_REDUCTIONS = frozenset("All Any Max Mean Min Prod Sum ArgMax ArgMin".split())
# Of all examples: the kind of the number. Of `All` and `Any` it is a guard.
_OF_ALL = {"All": None, "Any": None, "Max": EXTREME, "Min": EXTREME}
_OF_EXAMPLES_FIRST = frozenset(
    "AvgPool Conv2D Conv3D DepthwiseConv2dNative MaxPool".split()
)
_PRODUCTS = frozenset(["MatMul", "BatchMatMulV2", "BatchMatMulV3"])
_SHAPES = frozenset("ExpandDims Reshape Squeeze StridedSlice Transpose".split())


class BatchAxes:
    """The axes of the examples, found operation by operation.

    Args:
        tensors: list of symbolic tensors whose axis 0 has the examples.
    """

    def __init__(self, tensors):
        self._axes = {id(tensor): 0 for tensor in tensors}
        self._sums = {}
        self._kept = list(tensors)  # so that no other tensor takes over an id

    def of(self, tensor):
        """The axis, a kind of `NUMBERS`, or None: there is none, or unknown."""
        return self._axes.get(id(tensor))

    def has_known(self, op):
        """Whether `follow` may find anything of an operation."""
        return any(self.of(tensor) is not None for tensor in op.inputs)

    def follow(self, op):
        """Finds the axes of an operation's outputs.

        Args:
            op: `tf.Operation`, after those of its inputs.

        Returns:
            Tuple of the operations, this or earlier ones, now known to mix
            examples: two axes of examples meet, the one is reduced and more
            than one number is left, or the number that is left meets examples.
        """
        known = [self.of(tensor) for tensor in op.inputs]
        if all(axis is None for axis in known):
            return ()
        mixes, axis = self._rule(op, known)
        join = joins.of(op, known)
        sums = [self._sums.get(id(tensor), ()) for tensor in op.inputs]
        told, carried = joins.carried(op, sums)
        if mixes or join == joins.MIXES:
            told = *told, op
        elif join == joins.ADDS:
            carried = *carried, op
        for output in op.outputs if axis is not None else ():
            self._note(output, axis, carried)
        return told

    def _note(self, output, axis, sums):
        rank = output.shape.rank
        if axis not in NUMBERS:
            if rank is None or axis >= rank:
                return
            self._sums[id(output)] = sums
        self._axes[id(output)] = axis
        self._kept.append(output)

    def _rule(self, op, known):
        kind = op.type
        if kind in _SAME:
            return False, known[0]
        if kind in _BROADCAST:
            return _broadcast(op, known)
        if kind in _REDUCTIONS:
            return _reduction(op, known[0])
        if kind in _PRODUCTS:
            return _product(op, known)
        if kind in _ALONG_LAST:
            rank = op.inputs[0].shape.rank
            mixes = rank is not None and known[0] == rank - 1
            return mixes, None if mixes else known[0]
        if kind in _OF_EXAMPLES_FIRST:
            return False, 0 if known[0] == 0 else None
        if kind in _SHAPES and known[0] in NUMBERS:
            return False, known[0] if _is_one_number(op) else None
        rule = _RULES.get(kind)
        if rule is None or not NUMBERS.isdisjoint(known):
            return False, None
        return rule(op, known)


def _broadcast(op, known):
    numbers = [axis for axis in known if axis in NUMBERS]
    if len(numbers) == len(known) and op.type in joins.QUOTIENTS:
        return True, None
    if len(numbers) == sum(axis is not None for axis in known):
        kind = EXTREME if set(numbers) == {EXTREME} else REDUCED
        return False, kind if _is_one_number(op) else None
    if op.type == "BiasAdd":
        return False, known[0]
    if op.type == "Select":  # its condition may have the first axes alone
        axes = set(known) - NUMBERS - {None}
        return False, axes.pop() if len(axes) == 1 else None
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return False, None
    from_right = {
        rank - axis
        for rank, axis in zip(ranks, known, strict=True)
        if axis is not None and axis not in NUMBERS
    }
    if len(from_right) > 1:
        return True, None
    return False, max(ranks) - from_right.pop()


def _reduction(op, axis):
    if axis in NUMBERS:
        return False, axis
    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    if rank is None or axes is None or axis is None:
        return False, None
    axes = {int(each) % rank for each in axes.reshape(-1)} if rank else set()
    if axis in axes:
        if not _is_one_number(op):
            return True, None
        if op.inputs[0].op.type in joins.CONSTANT:  # a count of examples
            return False, None
        return False, _OF_ALL.get(op.type, REDUCED)
    is_kept = "keep_dims" in op.node_def.attr and op.get_attr("keep_dims")
    return False, axis if is_kept else axis - sum(e < axis for e in axes)


def _is_one_number(op):
    return op.outputs[0].shape.num_elements() == 1


def _product(op, known):
    if not NUMBERS.isdisjoint(known):
        return False, None
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return False, None
    names = ("transpose_a", "transpose_b")
    if op.type != "MatMul":
        names = ("adj_x", "adj_y")
    # Axes from the right: 1 and 2 are those of the matrices, which are
    # exchanged by a transposition.
    places = [
        None if axis is None else rank - axis
        for rank, axis in zip(ranks, known, strict=True)
    ]
    left, right = (
        3 - place if place in (1, 2) and op.get_attr(name) else place
        for place, name in zip(places, names, strict=True)
    )
    rank = max(ranks)
    if left is None or right is None:
        (place,) = {left, right} - {None}
        is_contracted = place == (1 if right is None else 2)
        return False, None if is_contracted else rank - place
    if left == right and left > 2:
        return False, rank - left
    both_stay = left == 2 and right == 1
    both_are_contracted = left == 1 and right == 2
    if both_are_contracted and (
        _is_one_number(op) or reshapes.is_inner_product(op)
    ):
        return False, REDUCED
    return both_stay or both_are_contracted, None


def _einsum(op, known):
    equation = op.get_attr("equation").decode().replace(" ", "")
    inputs, output = equation.split("->")
    labels = {
        names[axis]
        for names, axis in zip(inputs.split(","), known, strict=True)
        if axis is not None and "." not in names
    }
    if "." in inputs or not labels:
        return False, None
    if len(labels) > 1:
        return all(label in output for label in labels), None
    (label,) = labels
    if label in output:
        return False, output.index(label)
    if not output:
        return False, REDUCED
    return sum(axis is not None for axis in known) > 1, None


def _reshape(op, known):
    if known[0] is None or op.outputs[0].shape.rank is None:
        return False, None
    return False, reshapes.place(op, known[0])


def _transpose(op, known):
    order = tf.get_static_value(op.inputs[1])
    if known[0] is None or order is None:
        return False, None
    return False, order.tolist().index(known[0])


def _expand_dims(op, known):
    place = tf.get_static_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    if known[0] is None or place is None or rank is None:
        return False, None
    place = int(place.reshape(-1)[0]) % (rank + 1)
    return False, known[0] + (place <= known[0])


def _squeeze(op, known):
    rank = op.inputs[0].shape.rank
    dims = op.get_attr("squeeze_dims")
    if known[0] is None or rank is None or not dims:
        return False, None
    dims = {dim % rank for dim in dims}
    if known[0] in dims:
        return False, None
    return False, known[0] - sum(dim < known[0] for dim in dims)


def _concatenation(op, known):
    axes = set(known[:-1])
    return False, axes.pop() if len(axes) == 1 else None


def _pack(op, known):
    axes, rank = set(known), op.outputs[0].shape.rank
    if len(axes) > 1 or rank is None:
        return False, None
    axis = axes.pop()
    return False, axis + (op.get_attr("axis") % rank <= axis)


def _unpack(op, known):
    rank = op.inputs[0].shape.rank
    if rank is None or op.get_attr("axis") % rank == known[0]:
        return False, None
    return False, known[0] - (op.get_attr("axis") % rank < known[0])


def _gather(op, known):
    place = tf.get_static_value(op.inputs[2])
    params, indices = known[:2]
    if place is None or op.get_attr("batch_dims") or place < 0:
        return False, None
    if params is None and indices is not None:
        return False, indices + int(place)
    rank = op.inputs[1].shape.rank
    if indices is not None or params in (None, place) or rank is None:
        return False, None
    return False, params + (rank - 1) * (place < params)


def _resource_gather(op, known):
    return False, None if op.get_attr("batch_dims") else known[1]


def _one_hot(op, known):
    return False, known[0] if op.get_attr("axis") == -1 else None


def _cumulated(op, known):
    place = tf.get_static_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    if place is None or rank is None:
        return False, None
    mixes = int(place) % rank == known[0]
    return mixes, None if mixes else known[0]


def _of_ids(op, known):
    """`exchange.pull.shaped` names the ids of rows so."""
    is_of_rows = op.name.rsplit("/", 1)[-1].startswith("rows_of_ids")
    return False, known[1] if is_of_rows else None


def _slice(op, known):
    """`x[...]` that takes all examples."""
    begin, rank = op.inputs[1].shape[0], op.inputs[0].shape.rank
    if known[0] is None or begin is None or rank is None:
        return False, None
    masks = {
        name: op.get_attr(name)
        for name in (
            *("begin_mask", "end_mask", "ellipsis_mask"),
            *("new_axis_mask", "shrink_axis_mask"),
        )
    }
    strides = tf.get_static_value(op.inputs[3])
    is_new = [bool(masks["new_axis_mask"] >> i & 1) for i in range(begin)]
    source = target = 0
    for i in range(begin):
        bit = 1 << i
        if masks["ellipsis_mask"] & bit:
            after = sum(not new for new in is_new[i + 1 :])
            length = rank - source - after
            if source <= known[0] < source + length:
                return False, target + known[0] - source
            source, target = source + length, target + length
        elif is_new[i]:
            target += 1
        elif source == known[0]:
            is_whole = masks["begin_mask"] & bit and masks["end_mask"] & bit
            is_whole = is_whole and not masks["shrink_axis_mask"] & bit
            is_whole = is_whole and strides is not None and strides[i] == 1
            return False, target if is_whole else None
        else:
            source += 1
            target += not masks["shrink_axis_mask"] & bit
    return False, target + known[0] - source


_RULES = {
    "ConcatV2": _concatenation,
    "Cumprod": _cumulated,
    "Cumsum": _cumulated,
    "Einsum": _einsum,
    "ExpandDims": _expand_dims,
    "GatherV2": _gather,
    "IdentityN": _of_ids,
    "OneHot": _one_hot,
    "Pack": _pack,
    "Reshape": _reshape,
    "ResourceGather": _resource_gather,
    "Squeeze": _squeeze,
    "StridedSlice": _slice,
    "Transpose": _transpose,
    "Unpack": _unpack,
}
