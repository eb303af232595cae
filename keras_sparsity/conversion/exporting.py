"""Models in stock Keras layers, without a trace of this package."""

import contextlib

import keras

from keras_sparsity._tf import (
    keras_models,
    keras_optimizers,
    keras_variables,
)
from keras_sparsity.conversion import stock_layers
from keras_sparsity.conversion.replacing import (
    check_is_built,
    check_is_model,
    copied,
    globals_of,
    in_place,
)
from keras_sparsity.global_batch.losses import GlobalMean
from keras_sparsity.layers.sampled_softmax import SampledSoftmax
from keras_sparsity.layers.sampled_softmax_loss import SampledSoftmaxLoss
from keras_sparsity.layers.sharded_embedding import ShardedEmbedding
from keras_sparsity.layers.sharded_embedding_bag import ShardedEmbeddingBag
from keras_sparsity.layers.sharded_embedding_collection import (
    ShardedEmbeddingCollection,
)
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.tables.sharded_table import ShardedTable
from keras_sparsity.tables.table_variable import TableVariable
from keras_sparsity.update import optimizer_arguments
from keras_sparsity.update import rows as row_update

# Set on a model whose weights are on several ranks: a function that returns a
# context in which every rank holds all of them.
WHOLE = "_keras_sparsity_whole"

# Before any scope of a strategy replaces it.
_COMPILE = keras.Model.compile


def export(model):
    """The same model in stock Keras layers, without a trace of this package.

    The copy has layers of the same classes, registered or not. Layers of this
    package become stock ones, wherever they are: in the model, in a layer's
    attributes, in a function's closure. The copy has the same weights,
    compiled loss and metrics, and the optimizer with its state. With several
    processes every rank must call it, and every rank gets the whole model,
    which it may then use by itself.

    A `SampledSoftmax` with a `table` becomes a `keras.layers.EinsumDense` whose
    kernel is the variable of the `Embedding`: the copy is tied, too. Files of
    Keras keep no such tie, but the matrix twice: what is loaded (with
    `compile=False`, as the optimizer has slots of one) has the same weights
    and, if it is trained, two matrices.

    Args:
        model: a built model with layers of this package.

    Returns:
        A new model. The given one stays as it is.

    Raises:
        ValueError: if `model` is no built `keras.Model`, or has a layer
            without a stock counterpart.

    Example:

    >>> import keras
    >>> from keras_sparsity.layers import ShardedEmbedding
    >>> model = keras.Sequential(
    ...     [keras.Input((3,)), ShardedEmbedding(10, 4)])
    >>> type(export(model).layers[0]).__name__
    'Embedding'

    References:
        The inverse of `ks.shard_embeddings`; weights as `keras.Model.save`
        stores them.
    """
    check_is_model(model)
    check_is_built(model)
    with getattr(model, WHOLE, contextlib.nullcontext)():
        return _exported(model)


def _exported(model):
    to_stock = _ToStock()
    plain, copier = copied(to_stock, model)
    missed = globals_of(copier, ShardedEmbedding)
    if missed:
        raise ValueError(
            "These global names hold a ShardedEmbedding, so the model "
            f"'{model.name}' cannot be exported: {missed}. Make the layer an "
            "attribute of the layer or model that calls it."
        )
    for original, copy in copier.known():
        if isinstance(original, keras.Model):
            _compile_as(original, copy, copier)
    to_stock.hand_over_state(copier)
    return plain


class _ToStock:
    """Has a `Copier` replace all objects of this package."""

    def __init__(self):
        self._optimizers = []

    def __call__(self, copier, value):
        if isinstance(value, keras.Optimizer):
            return self._optimizer(value)
        if isinstance(value, GlobalMean):
            return copier.reference(value.loss)
        if isinstance(value, SampledSoftmaxLoss):
            return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if type(value) is SampledSoftmax and value.table is not None:
            return _tied(copier, value)
        make = _STOCK.get(type(value))
        if make is not None:
            return in_place(copier, value, make(value), _whole)
        if type(value) is ShardedEmbeddingCollection:
            made = stock_layers.collection(value, copier.reference)
            copier.put_in_place(made, value)
            return made
        if isinstance(value, TableVariable) and value.table.is_of_stock_layer:
            return keras_variables.plain_like(value, value.table.read())
        if isinstance(value, _NEEDS_COUNTERPART):
            raise ValueError(_no_counterpart(value))
        return None

    def _optimizer(self, optimizer):
        rule = optimizer
        if isinstance(optimizer, HybridOptimizer):
            rule = optimizer.inner_optimizer
        made = keras_optimizers.unbuilt(rule)
        self._optimizers.append((optimizer, made))
        return made

    def hand_over_state(self, copier):
        """Gives the copied optimizers the state of the originals."""
        for optimizer, made in self._optimizers:
            if not optimizer.built:
                continue
            # That of Keras 3.5's loss scaling knows none.
            rule = optimizer_arguments.rule_of(optimizer)
            trained = keras_optimizers.built_variables(rule)
            made.build([copier.copy(v) for v in trained])
            state = _optimizer_state(optimizer, trained)
            for (table, value), variable in zip(
                state, made.variables, strict=True
            ):
                if table is not None and value.shape == tuple(
                    table.variable.shape
                ):
                    value = table.to_stock(value)
                variable.assign(value)


def _tied(copier, softmax):
    copier.reference(softmax.table)  # with its variable
    made = stock_layers.tied_dense(softmax, copier.reference(softmax.kernel))
    copier.put_in_place(made, softmax)
    if softmax.use_bias:
        copier.remember(softmax.bias, made.bias)
        made.bias.assign(_whole(softmax.bias))
        made.bias.trainable = softmax.bias.trainable
    return made


def _no_counterpart(value):
    if not isinstance(value, keras.Layer):
        value = getattr(value, "table", value)
    name = getattr(value, "owner_name", None) or value.name
    return (
        f"'{name}' (of type {type(value).__name__}) has no counterpart in "
        "stock Keras, so the model cannot be exported. Layers of this package "
        "have one, but subclasses of them and layers of your own with a "
        "`ks.ShardedTable` have not."
    )


_STOCK = {
    ShardedEmbedding: stock_layers.embedding,
    ShardedEmbeddingBag: stock_layers.bag,
    SampledSoftmax: stock_layers.dense,
}
_NEEDS_COUNTERPART = (
    *_STOCK,
    ShardedEmbeddingCollection,
    ShardedTable,
    TableVariable,
)


def _whole(variable):
    value = variable.numpy()
    if isinstance(variable, TableVariable):
        return variable.table.to_stock(value)
    return value


def _compile_as(original, copy, copier):
    arguments = keras_models.compile_arguments(original)
    if not arguments:
        return
    arguments["optimizer"] = getattr(original, "optimizer", None)
    arguments = copier.copy(arguments)
    # Loss scaling is around the optimizer already.
    _COMPILE(copy, **arguments, auto_scale_loss=False)


def _optimizer_state(optimizer, trained):
    """Arrays of an optimizer, each with the table it is a slot of, or None."""
    # Slots of tables in one piece are variables like any others.
    rule = optimizer
    while hasattr(rule, "inner_optimizer"):
        rule = rule.inner_optimizer
    table_of = {}
    for variable in trained:
        if isinstance(variable, TableVariable) and not (
            variable.table.is_sharded
        ):
            for (slot,) in row_update.slots_of(rule, [variable]).values():
                table_of[id(slot)] = variable.table
    if isinstance(optimizer, HybridOptimizer):
        tables = [
            table or table_of.get(id(pieces[0]))
            for table, pieces in optimizer.places()
        ]
        return list(zip(tables, optimizer.state(), strict=True))
    return [(table_of.get(id(v)), v.numpy()) for v in optimizer.variables]
