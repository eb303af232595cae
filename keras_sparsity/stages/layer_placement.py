"""Where a model is divided into a head on all workers and a tail on one.

A network whose last layers have most of the parameters trains with less traffic
if activations travel to these layers, and not their gradients to all workers.

References:
    RALP (Park et al.), the profiler.
"""

import dataclasses
import math

import keras
import numpy as np

from keras_sparsity.tables.table_variable import TableVariable

CONVOLUTION, POOLING, DENSE = "convolution", "pooling", "dense"
OTHER = "other"


@dataclasses.dataclass(frozen=True)
class LayerSize:
    """A layer, as far as its messages count.

    Args:
        kind: `"convolution"`, `"pooling"`, `"dense"` or `"other"`.
        num_parameters: the number of its trained weights' elements.
        num_outputs: the number of elements that it makes of one example.
    """

    kind: str
    num_parameters: int
    num_outputs: int


def layer_sizes(cutter):
    """The `LayerSize` of each call of a model: a list.

    A layer that is called twice has its parameters at the first call. Those of
    sharded tables, which travel row by row wherever the model is divided, do
    not count. Sizes that the cutter does not know count as 16.

    Example:

    >>> from keras_sparsity.stages.cutting import Cutter
    >>> layers = [keras.Input((8,)), keras.layers.Dense(4)]
    >>> layer_sizes(Cutter(keras.Sequential(layers)))
    [LayerSize(kind='dense', num_parameters=36, num_outputs=4)]
    """
    return [
        LayerSize(
            _kind(call.operation),
            sum(
                math.prod(v.shape)
                for v in new
                if not isinstance(v, TableVariable)
            ),
            sum(math.prod(cutter.example_shape(each)) for each in call.outputs),
        )
        for call, new in zip(cutter.calls, cutter.new_variables(), strict=True)
    ]


def skewness(layers):
    r"""How far the parameters are towards the end; below 0 if they are.

    The skewness of a layer's position x, weighted by its parameters P:

    .. math:: S = \sum_x \frac{P_x}{\sum P} \frac{(x - \mu)^3}{\sigma^3}

    The paper's equation 1 is another one as printed; this one gives its
    table 1. Layers of the kind `"other"` have no position.

    It is 0 if all parameters are in one layer, or there are none.

    Example:

    >>> sizes = [10, 20, 30, 500]
    >>> round(skewness([LayerSize("dense", n, 1) for n in sizes]), 2)
    -3.46

    References:
        RALP (Park et al.), equation 1 and table 1.
    """
    sizes = np.array(
        [layer.num_parameters for layer in layers if layer.kind != OTHER], float
    )
    if not sizes.sum():
        return 0.0
    weights, places = sizes / sizes.sum(), np.arange(len(sizes))
    mean = (weights * places).sum()
    variance = (weights * (places - mean) ** 2).sum()
    if variance == 0:
        return 0.0
    return float((weights * (places - mean) ** 3).sum() / variance**1.5)


def published_split(layers, num_examples, threshold=-0.5, places=None):
    """The last layer of the head, by the paper's rule.

    Args:
        layers: list of `LayerSize`.
        num_examples: the number of examples of a worker.
        threshold: K; where the skewness is not below it, the model is left to
            data parallelism.
        places: list of the places to choose from; by default all.

    Returns:
        A place in `layers`, or None. The one with the fewest elements of its
        outputs and the head's parameters together, with no convolution
        behind it.

    Example:

    >>> layers = [LayerSize("convolution", 100, 64),
    ...           LayerSize("pooling", 0, 16), LayerSize("dense", 5000, 10)]
    >>> published_split(layers, num_examples=8)
    1
    """
    if skewness(layers) >= threshold:
        return None
    last = max(
        (i for i, each in enumerate(layers) if each.kind == CONVOLUTION),
        default=0,
    )
    # A tail without layers is none.
    behind = range(last, len(layers) - 1)
    return min(
        [place for place in behind if places is None or place in places],
        key=lambda place: (
            num_examples * layers[place].num_outputs
            + sum(layer.num_parameters for layer in layers[: place + 1])
        ),
        default=None,
    )


def _kind(layer):
    for kind, classes in _CLASSES.items():
        if isinstance(layer, classes):
            return kind
    return OTHER


def _classes(*names):
    """Those of one, two and three dimensions; not all have three."""
    every = [name.format(rank) for name in names for rank in (1, 2, 3)]
    found = (getattr(keras.layers, name, None) for name in every)
    return tuple(filter(None, found))


_CLASSES = {
    CONVOLUTION: _classes(
        *("Conv{}D", "Conv{}DTranspose", "DepthwiseConv{}D"),
        "SeparableConv{}D",
    ),
    POOLING: _classes(
        *("MaxPooling{}D", "AveragePooling{}D"),
        *("GlobalMaxPooling{}D", "GlobalAveragePooling{}D"),
    ),
    DENSE: (keras.layers.Dense,),
}
