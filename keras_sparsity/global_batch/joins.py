"""Numbers reduced from a batch that meet its examples, element by element.

The product of such a number and each example mixes examples. So does their sum,
unless a mean follows at once: the mean of `losses + number` is `mean(losses) +
number`, which the parts of a batch add up.
"""

import itertools

# Kinds of tensors of one number, reduced from the examples of a batch. Extremes
# are often subtracted from exponents, which cancels out: `exp(x - max(x))`.
REDUCED, EXTREME = "reduced", "extreme"
NUMBERS = frozenset([REDUCED, EXTREME])

# What a join does: it mixes examples, or it may if no mean follows.
MIXES, ADDS = "mixes", "adds"

# A number that meets these is repeated for each example; their sum is a count.
CONSTANT = frozenset(["OnesLike", "ZerosLike"])
_SUMS = frozenset("Add AddN AddV2 SelectV2 Sub".split())
_COMPARISONS = frozenset(
    "Equal Greater GreaterEqual Less LessEqual NotEqual".split()
)
_OTHERS = frozenset(
    """
    Atan2 DivNoNan FloorDiv FloorMod Maximum Minimum Mul MulNoNan Pow RealDiv
    SquaredDifference Xdivy Xlogy
    """.split()
)
# Operations after which a mean is another one than that of their inputs.
_CURVED = frozenset(
    """
    Abs Acos Asin Atan Ceil Cos Elu Erf Exp Expm1 Floor Inv LeakyRelu Log Log1p
    Reciprocal Relu Relu6 Round Rsqrt Selu Sigmoid Sin Sinh Softplus Softsign
    Sqrt Square Tan Tanh
    """.split()
) | (_OTHERS - {"DivNoNan", "Mul", "MulNoNan", "RealDiv"})
QUOTIENTS = frozenset(["DivNoNan", "RealDiv"])
# Operations whose outputs are others, or do not change with a number added.
_ENDS = (
    CONSTANT
    | _COMPARISONS
    | frozenset("ArgMax ArgMin IsFinite LogSoftmax OneHot Sign Softmax".split())
)


def of(op, known):
    """What an operation does that has a number of the batch and its examples.

    Args:
        known: list, for each input the axis of the examples, a kind of
            `NUMBERS` or None.

    Returns:
        `MIXES`, `ADDS`, or None.
    """
    kind = op.type
    if kind not in _SUMS | _COMPARISONS | _OTHERS:
        return None
    # Integers are counts and places.
    floating = [
        (tensor, axis)
        for tensor, axis in zip(op.inputs, known, strict=True)
        if axis is not None and tensor.dtype.is_floating
    ]
    numbers = {axis for _, axis in floating if axis in NUMBERS}
    has_examples = any(
        axis not in NUMBERS and tensor.op.type not in CONSTANT
        for tensor, axis in floating
    )
    if not (numbers and has_examples):
        return None
    if kind in _SUMS:
        return ADDS if REDUCED in numbers else None
    if kind in _COMPARISONS and REDUCED not in numbers:
        return None
    return MIXES


def carried(op, sums):
    """What becomes of sums of a number and examples.

    Args:
        sums: list, for each input the tuple of the operations that added
            numbers.

    Returns:
        The operations which `op` shows to mix examples, and those for which
        later operations may.
    """
    every = tuple(dict.fromkeys(itertools.chain(*sums)))
    is_curved = op.type in _CURVED
    if op.type in QUOTIENTS:
        is_curved = bool(sums[1])
    elif op.type in ("Mul", "MulNoNan"):
        is_curved = all(sums)
    if is_curved:
        return every, ()
    return (), () if op.type in _ENDS else every
