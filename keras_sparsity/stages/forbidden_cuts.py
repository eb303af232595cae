"""The places between a model's calls where no cut can be."""

_SHARED = (
    "the layer '{}' or its weights are used on both sides. Cut before its "
    "first or after its last use."
)
# Messages have as many rows as a part of a mini-batch has examples.
_MIXED = (
    "the output of '{}' would travel, whose first axis is not that of the "
    "examples, as after `keras.ops.reshape(x, (-1, size))` or a mean over the "
    "batch. Cut before that call, or behind the last layer that uses such "
    "tensors."
)
_NOT_SENT = ("string", "complex64", "complex128")
_UNSENT = (
    "the output of '{}' would travel, which is of the dtype {}: stages send "
    "numbers, and only real ones have gradients there. Cut before that call, "
    "or behind the last layer that uses such tensors."
)
# The receiver makes room by the model's symbolic tensors.
_UNTOLD = (
    "the output of '{}' would travel, and the layer says that it is {}, but "
    "makes {}. Cut before that call, or behind the last layer that uses such "
    "tensors; or let a layer of your own say the right one "
    "(`compute_output_spec`; a `Lambda` without `output_shape`)."
)


def reasons(calls, crossing, mixed, traced):
    """Dict from the places where no cut can be to the reasons, texts.

    Args:
        calls: list of the model's calls.
        crossing: function of a place that gives the tensors that cross it.
        mixed: see `Cutter`.
        traced: see `keras_functional.specs_in_a_trace`.
    """
    first, found = {}, {}
    for place, call in enumerate(calls):
        for variable in getattr(call.operation, "variables", []):
            begin = first.setdefault(id(variable), place)
            for between in range(begin, place):
                found[between] = _SHARED.format(call.name)
    others = _unsent(calls) | _untold(calls, traced)
    for place in range(len(calls) - 1):
        for tensor in crossing(place):
            if id(tensor) in mixed:
                found[place] = _MIXED.format(mixed[id(tensor)])
            elif id(tensor) in others:
                found[place] = others[id(tensor)]
    return found


def _unsent(calls):
    """Dict from ids to texts, of tensors that links do not carry."""
    return {
        id(tensor): _UNSENT.format(call.name, tensor.dtype)
        for call in calls
        for tensor in call.outputs
        if tensor.dtype in _NOT_SENT
    }


def _untold(calls, traced):
    """Dict from ids to texts, of tensors that are not as layers say.

    Such as of a `Concatenate` of integers, which says that it makes floats.
    """
    found = {}
    for call in calls:
        for tensor in call.outputs:
            made = traced.get(id(tensor), tensor)
            sizes = tuple(tensor.shape)[1:], tuple(made.shape)[1:]
            if tensor.dtype != made.dtype:
                kinds = tensor.dtype, made.dtype
            elif not _may_be_alike(*sizes):
                kinds = [f"of shape {(None, *each)}" for each in sizes]
            else:
                continue
            found[id(tensor)] = _UNTOLD.format(call.name, *kinds)
    return found


def _may_be_alike(sizes, others):
    """Whether sizes, of which None may be any, are the same."""
    return len(sizes) == len(others) and all(
        None in pair or pair[0] == pair[1]
        for pair in zip(sizes, others, strict=True)
    )
