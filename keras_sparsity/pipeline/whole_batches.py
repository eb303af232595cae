"""Models whose mini-batches cannot be divided into parts."""

from keras_sparsity._tf import keras_functional
from keras_sparsity.pipeline.stage import recurrent_layers


def why_whole(model, pairs=()):
    """Why a model computes with whole mini-batches only; None if it does not.

    Args:
        pairs: names of the calls that make numbers of pairs of examples.

    Example:

    >>> import keras
    >>> inputs = keras.Input(batch_shape=(8, 2), name="numbers")
    >>> why_whole(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
    "its input 'numbers' has batches of 8"
    """
    for tensor in keras_functional.functional_of(model).inputs:
        if tensor.shape[0] is not None:
            return f"its input '{tensor.name}' has batches of {tensor.shape[0]}"
    for layer in recurrent_layers(model):
        return f"its layer '{layer.name}' is stateful"
    for name in pairs:
        return f"'{name}' computes with pairs of a mini-batch's examples"
    return None


def check(model, why, num_parts, asked):
    """Raises ValueError of a model that a strategy would divide.

    Args:
        why: as `why_whole` returns it.
        num_parts: the number of parts of a mini-batch.
        asked: a strategy's `asked_micro_batches`.
    """
    if why is None or num_parts == 1:
        return
    name = type(model.distribute_strategy).__name__
    raise ValueError(
        f"The model '{model.name}' computes with whole mini-batches only: "
        f"{why}. Received: a {name} that divides each into {num_parts} parts "
        f"(num_micro_batches={asked}). Expected: one part. Use "
        "`ks.PipelineStrategy(num_micro_batches=1)` with one process for each "
        "stage, or a model whose inputs have no batch size and whose layers "
        "are neither stateful nor compute with pairs of examples."
    )
