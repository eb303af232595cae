"""Models with stock Keras layers in place of sharded ones, and the reverse."""

import functools
import inspect
import warnings

import keras
import tensorflow as tf

from keras_sparsity import checks, collectives, compat, losses, row_update
from keras_sparsity.copying import Copier
from keras_sparsity.layers.sampled_softmax import (
    SampledSoftmax,
    SampledSoftmaxLoss,
)
from keras_sparsity.layers.sharded_embedding import ShardedEmbedding
from keras_sparsity.layers.sharded_embedding_bag import ShardedEmbeddingBag
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.tables.sharded_table import ShardedTable
from keras_sparsity.tables.table_variable import TableVariable

# Before any scope of a strategy replaces it.
_COMPILE = keras.Model.compile


def export(model):
    """The same model in stock Keras layers, without a trace of this package.

    The copy has the same layers, of the same classes, registered or not, but
    for those of this package, wherever they are: in the model, in a layer's
    attributes, in a function's closure. Weights, the compiled loss and metrics,
    and the optimizer with its state are carried over. With several processes
    every rank must call it, and every rank gets the whole model, which it may
    then use by itself.

    Args:
        model: a built model with layers of this package.

    Returns:
        A new model. The given one is left as it is.

    Raises:
        ValueError: if the model has a layer that has no stock counterpart.

    Example:

    >>> import keras
    >>> from keras_sparsity.layers import ShardedEmbedding
    >>> model = keras.Sequential(
    ...     [keras.Input((3,)), ShardedEmbedding(10, 4)])
    >>> type(export(model).layers[0]).__name__
    'Embedding'
    """
    _check_is_model(model)
    _check_is_built(model)
    to_stock = _ToStock()
    copier = Copier(to_stock, is_replaced=_is_table_or_loss)
    plain = _copied(copier, model)
    missed = _globals_of(copier, ShardedEmbedding)
    if missed:
        raise ValueError(
            "These global names hold a ShardedEmbedding, so the model "
            f"'{model.name}' cannot be exported: {missed}. Make the layer an "
            "attribute of the layer or model that calls it."
        )
    for original, copied in copier.known():
        if isinstance(original, keras.Model):
            _compile_as(original, copied, copier)
    to_stock.hand_over_state(copier)
    return plain


def shard_embeddings(model):
    """The same model with `ShardedEmbedding` for each `keras.layers.Embedding`.

    Also for those that layers make in their own code, in `__init__` or in
    `build`, and those that a function's closure refers to. A subclass of
    `keras.layers.Embedding` stays as it is, with a warning: derive it from
    `ShardedEmbedding`.

    Args:
        model: a model, built or not. One that is not built is to hold an
            `Embedding` already.

    Returns:
        A new model with the same weights, of several processes those of rank
        0. Compile it inside `strategy.scope()`. The given model is left as it
        is.

    Raises:
        ValueError: if an `Embedding` uses LoRA or is quantized.

    Example:

    >>> import keras
    >>> model = keras.Sequential(
    ...     [keras.Input((3,)), keras.layers.Embedding(10, 4)])
    >>> type(shard_embeddings(model).layers[0]).__name__
    'ShardedEmbedding'
    """
    _check_is_model(model)
    to_sharded = _ToSharded()
    copier = Copier(to_sharded, is_replaced=_is_table_or_loss)
    sharded = _copied(copier, model)
    to_sharded.report(model, copier)
    return sharded


def _check_is_model(model):
    checks.check(
        isinstance(model, keras.Model),
        "model",
        model,
        "a built `keras.Model` (not its class, a layer or a file's name)",
    )


def _check_is_built(model):
    if not model.built:
        raise ValueError(
            f"The model '{model.name}' has no weights yet. Build it first, by "
            "`model.build(input_shape)` or by calling it on a batch. Received: "
            f"model={checks.spell(model)}."
        )


def _is_table_or_loss(value):
    return isinstance(
        value, (ShardedTable, losses.GlobalMean, SampledSoftmaxLoss)
    )


def _copied(copier, model):
    # First in the model's order, which is the same on every rank.
    return copier.copy([*compat.all_layers(model), model])[-1]


# To stock layers.


class _ToStock:
    """Has a `Copier` replace all that is of this package."""

    def __init__(self):
        self._optimizers = []

    def __call__(self, copier, value):
        if isinstance(value, keras.Optimizer):
            return self._optimizer(value)
        if isinstance(value, losses.GlobalMean):
            return copier.reference(value.loss)
        if isinstance(value, SampledSoftmaxLoss):
            return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        make = _STOCK.get(type(value))
        if make is not None:
            return _in_place(copier, value, make(value), _whole)
        if isinstance(value, (*_STOCK, ShardedTable, TableVariable)):
            raise ValueError(_no_counterpart(value))
        return None

    def _optimizer(self, optimizer):
        rule = optimizer
        if isinstance(optimizer, HybridOptimizer):
            rule = optimizer.inner_optimizer
        made = _unbuilt(rule)
        self._optimizers.append((optimizer, made))
        return made

    def hand_over_state(self, copier):
        """Gives the copied optimizers the state of the originals."""
        for optimizer, made in self._optimizers:
            if not optimizer.built:
                continue
            trained = compat.built_variables(optimizer)
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


def _stock_embedding(layer):
    return keras.layers.Embedding(
        layer.input_dim, layer.output_dim, **_embedding_options(layer)
    )


def _embedding_options(layer):
    return {
        "embeddings_initializer": layer.embeddings_initializer,
        "embeddings_regularizer": layer.embeddings_regularizer,
        "embeddings_constraint": layer.embeddings_constraint,
        "activity_regularizer": layer.activity_regularizer,
        "mask_zero": layer.mask_zero,
        "name": layer.name,
        "dtype": layer.dtype_policy,
        "trainable": layer.trainable,
    }


def _stock_bag(layer):
    """A small model of stock layers, for bags in a dense tensor."""
    name = layer.name
    if compat.calls_with_more_arguments(layer, "weights"):
        raise ValueError(
            f"The layer '{name}' is called with weights, and has no "
            "counterpart in stock Keras then, so the model cannot be exported."
        )
    ids = keras.Input((None,), dtype="int32", name=f"{name}_ids")
    rows = _stock_embedding(layer)(ids)
    weights = keras.ops.cast(
        (ids != 0) if layer.mask_zero else keras.ops.ones_like(ids), rows.dtype
    )
    vectors = keras.ops.sum(rows * weights[..., None], axis=-2)
    counts = keras.ops.sum(weights, axis=-1, keepdims=True)
    if layer.combiner == "sqrtn":
        counts = keras.ops.sqrt(counts)
    if layer.combiner != "sum":
        vectors = keras.ops.divide_no_nan(vectors, counts)
    return keras.Model(ids, vectors, name=name)


def _stock_dense(layer):
    return keras.layers.Dense(
        layer.num_classes,
        use_bias=layer.use_bias,
        activity_regularizer=layer.activity_regularizer,
        # Its logits are float32 under mixed precision, too.
        dtype=layer.output_dtype,
        name=layer.name,
        trainable=layer.trainable,
    )


_STOCK = {
    ShardedEmbedding: _stock_embedding,
    ShardedEmbeddingBag: _stock_bag,
    SampledSoftmax: _stock_dense,
}


def _in_place(copier, layer, made, value_of):
    """Puts a layer that was made in place of another; gives it its values."""
    copier.put_in_place(made, layer)
    for old, new in _carried_over(layer, made, value_of):
        copier.remember(old, new)
    return made


def _carried_over(layer, made, value_of):
    """Builds a new layer as another one; pairs of their weights."""
    if not layer.built:
        return []
    if not made.built:
        made.build(**compat.built_with(layer))
    # Of a softmax, not the state of its sampler.
    olds = [v for v in layer.weights if not _draws_samples(v)]
    pairs = list(zip(olds, made.weights, strict=True))
    for old, new in pairs:
        new.assign(value_of(old))
        new.trainable = old.trainable
    return pairs


def _draws_samples(variable):
    return getattr(variable, "is_same_on_all_ranks", False)


def _whole(variable):
    value = variable.numpy()
    if isinstance(variable, TableVariable):
        return variable.table.to_stock(value)
    return value


def _compile_as(original, copied, copier):
    arguments = compat.compile_arguments(original)
    if not arguments:
        return
    arguments["optimizer"] = getattr(original, "optimizer", None)
    arguments = copier.copy(arguments)
    # Loss scaling is around the optimizer already.
    _COMPILE(copied, **arguments, auto_scale_loss=False)


def _unbuilt(optimizer):
    """An optimizer of the same configuration, without state."""
    known, inner = {}, optimizer
    while inner is not None:  # classes of the user's, registered or not
        classes = [type(v) for v in (inner, *vars(inner).values())]
        known.update((c.__name__, c) for c in classes)
        inner = getattr(inner, "inner_optimizer", None)
    with keras.saving.custom_object_scope(known):
        return type(optimizer).from_config(optimizer.get_config())


def _optimizer_state(optimizer, trained):
    """Arrays, each with the table of whose rows it is the slot, or None."""
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


# To sharded layers.


class _ToSharded:
    """Has a `Copier` replace each `keras.layers.Embedding`."""

    def __init__(self):
        self._is_any_sharded = False
        self._left = []

    def __call__(self, copier, value):
        if type(value) is keras.layers.Embedding:
            self._is_any_sharded = True
            return _in_place(copier, value, _sharded(value), _of_rank_zero)
        if isinstance(value, keras.Optimizer):
            return _unbuilt(value)
        if isinstance(value, (ShardedTable, TableVariable)):
            return self._of_table(copier, value)
        if isinstance(value, ShardedEmbedding):
            self._is_any_sharded = True
        elif isinstance(value, keras.layers.Embedding):
            self._left.append(value)
        elif isinstance(value, keras.Layer) and not value.built:
            copier.afterwards(value, _shard_what_build_makes)
        return None

    def _of_table(self, copier, value):
        self._is_any_sharded = True
        table = value.table if isinstance(value, TableVariable) else value
        copied = copier.remember(table, table.copy())
        copier.remember(table.variable, copied.variable)
        return copied if value is table else copied.variable

    def report(self, model, copier):
        """Says what stays whole, and why."""
        if not (self._is_any_sharded or self._left):
            _check_is_built(model)
        left = [f"'{v.name}' ({type(v).__name__})" for v in self._left]
        if left:
            warnings.warn(
                f"The tables of {', '.join(left)} stay whole on every process: "
                "their classes are subclasses of `keras.layers.Embedding`, "
                "which may do something else. Derive them from "
                "`ks.layers.ShardedEmbedding` to shard them.",
                stacklevel=3,
            )
        missed = _globals_of(copier, keras.layers.Embedding)
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
        layer.input_dim, layer.output_dim, **_embedding_options(layer)
    )


def _of_rank_zero(variable):
    communicator = collectives.current()
    value = tf.constant(variable.numpy())
    if communicator.size == 1:
        return value.numpy()
    (value,) = communicator.broadcast([value], name="shard_embeddings")
    return value.numpy()


def _shard_what_build_makes(layer):
    """Has an unbuilt layer shard each `Embedding` that its `build` makes."""
    if type(layer).build.__module__.partition(".")[0] == "keras":
        return
    stock = layer.build

    @functools.wraps(stock)
    def build(*args, **kwargs):
        stock(*args, **kwargs)
        with tf.init_scope():  # which has values, in a function too
            for holder in (layer, *compat.all_layers(layer)):
                for made in compat.sublayers(holder):
                    if type(made) is keras.layers.Embedding:
                        sharded = _sharded(made)
                        _carried_over(made, sharded, _of_rank_zero)
                        compat.replace_sublayer(holder, made, sharded)

    vars(layer)["build"] = build


def _globals_of(copier, kind):
    """Names of globals that hold a layer which a copied function reads."""
    functions = list(copier.functions)
    for original, _ in copier.known():
        of_user = type(original).__module__.partition(".")[0] not in (
            "keras",
            __package__,
        )
        if isinstance(original, keras.Layer) and of_user:
            methods = vars(type(original)).values()
            functions += [m for m in methods if inspect.isfunction(m)]
    names = set()
    for function in functions:
        for name in _names(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, keras.Layer) and any(
                isinstance(layer, kind)
                for layer in (value, *compat.all_layers(value))
            ):
                names.add(f"{name} (in {function.__qualname__})")
    return ", ".join(sorted(names))


def _names(code):
    """The global names that a function's code, and that inside, may read."""
    inner = [c for c in code.co_consts if inspect.iscode(c)]
    return set(code.co_names).union(*map(_names, inner))
