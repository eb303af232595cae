"""Models with `ShardedEmbedding` in place of `keras.layers.Embedding`."""

import functools
import warnings

import keras
import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity._tf import keras_models, keras_optimizers, tracking
from keras_sparsity.conversion.replacing import (
    carried_over,
    check_is_built,
    check_is_model,
    copied,
    embedding_options,
    globals_of,
    in_place,
)
from keras_sparsity.layers.sharded_embedding import ShardedEmbedding
from keras_sparsity.tables.sharded_table import ShardedTable
from keras_sparsity.tables.table_variable import TableVariable


def shard_embeddings(model):
    """The same model with `ShardedEmbedding` for each `keras.layers.Embedding`.

    Layers' own embeddings, made in `__init__` or in `build`, are replaced too,
    and those in a function's closure. A subclass of `keras.layers.Embedding`
    stays as it is, with a warning: derive it from `ShardedEmbedding`.

    Args:
        model: a model, built or not. An unbuilt one must hold an `Embedding`
            already.

    Returns:
        A new model with the same weights, on several processes those of rank
        0. Compile it inside `strategy.scope()`. The given model stays as it
        is.

    Raises:
        ValueError: if `model` is no `keras.Model`, or an `Embedding` uses LoRA
            or is quantized.

    Example:

    >>> import keras
    >>> model = keras.Sequential(
    ...     [keras.Input((3,)), keras.layers.Embedding(10, 4)])
    >>> type(shard_embeddings(model).layers[0]).__name__
    'ShardedEmbedding'

    References:
        EuroSys 4.1 (an unchanged single-process model is transformed).
    """
    check_is_model(model)
    to_sharded = _ToSharded(collectives.current())
    sharded, copier = copied(to_sharded, model)
    to_sharded.report(model, copier)
    return sharded


class _ToSharded:
    """Has a `Copier` replace each `keras.layers.Embedding`.

    All processes get rank 0's weights.
    """

    def __init__(self, communicator):
        self._communicator = communicator
        self._is_any_sharded = False
        self._left = []

    def __call__(self, copier, value):
        if type(value) is keras.layers.Embedding:
            self._is_any_sharded = True
            return in_place(copier, value, _sharded(value), self._of_rank_zero)
        if isinstance(value, keras.Optimizer):
            return keras_optimizers.unbuilt(value)
        if isinstance(value, (ShardedTable, TableVariable)):
            return self._of_table(copier, value)
        if isinstance(value, ShardedEmbedding):
            self._is_any_sharded = True
        elif isinstance(value, keras.layers.Embedding):
            self._left.append(value)
        elif isinstance(value, keras.Layer) and not value.built:
            copier.afterwards(value, self._shard_new_sublayers)
        return None

    def _of_table(self, copier, value):
        self._is_any_sharded = True
        table = value.table if isinstance(value, TableVariable) else value
        copied = copier.remember(table, table.copy())
        copier.remember(table.variable, copied.variable)
        return copied if value is table else copied.variable

    def _of_rank_zero(self, variable):
        value = variable.numpy()
        if self._communicator.size == 1:
            return value
        (value,) = self._communicator.broadcast(
            [tf.constant(value)], name="shard_embeddings"
        )
        return value.numpy()

    def _shard_new_sublayers(self, layer):
        """Has an unbuilt layer shard each `Embedding` that it builds."""
        if type(layer).build.__module__.partition(".")[0] == "keras":
            return
        stock = layer.build

        @functools.wraps(stock)
        def build(*args, **kwargs):
            stock(*args, **kwargs)
            with tf.init_scope():  # which has values, in a function too
                for holder in (layer, *keras_models.all_layers(layer)):
                    for made in keras_models.sublayers(holder):
                        if type(made) is keras.layers.Embedding:
                            sharded = _sharded(made)
                            carried_over(made, sharded, self._of_rank_zero)
                            tracking.replace_held(holder, made, sharded)

        vars(layer)["build"] = build

    def report(self, model, copier):
        """Warns of tables that stay whole, with the reason."""
        if not (self._is_any_sharded or self._left):
            check_is_built(model)
        left = [f"'{v.name}' ({type(v).__name__})" for v in self._left]
        if left:
            warnings.warn(
                f"The tables of {', '.join(left)} stay whole on every process: "
                "their classes are subclasses of `keras.layers.Embedding`, "
                "which may do something else. Derive them from "
                "`ks.layers.ShardedEmbedding` to shard them.",
                stacklevel=3,
            )
        missed = globals_of(copier, keras.layers.Embedding)
        if missed:
            warnings.warn(
                f"These global names hold an `Embedding` that stays as it is: "
                f"{missed}. Make the layer an attribute of the layer or model "
                "that calls it.",
                stacklevel=3,
            )
        if not (self._is_any_sharded or left or missed):
            warnings.warn(
                f"The model '{model.name}' has no `keras.layers.Embedding`, so "
                "nothing is sharded. If its tables are weights of layers of "
                "your own (`add_weight`), use a `ks.ShardedTable` in these.",
                stacklevel=3,
            )


def _sharded(layer):
    """A `ShardedEmbedding` like an `Embedding`, unbuilt."""
    lora_rank = getattr(layer, "lora_rank", None)
    mode = getattr(layer, "quantization_mode", None)
    if lora_rank is not None or mode is not None:
        raise ValueError(
            f"The layer '{layer.name}' uses LoRA or is quantized, which "
            "ShardedEmbedding does not support. Received: "
            f"lora_rank={lora_rank}, quantization_mode={mode!r}. Shard the "
            "model before `enable_lora` and `quantize`, or train it whole."
        )
    return ShardedEmbedding(
        layer.input_dim, layer.output_dim, **embedding_options(layer)
    )
