"""Whole models from spread ones: saving on rank 0, plain Keras models."""

import contextlib

import keras
import tensorflow as tf

from keras_sparsity import checks, row_update
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.tables import sharded_table
from keras_sparsity.tables.table_variable import TableVariable

_DONE, _FAILED = -1, -2


def tables_of(model):
    """The sharded tables among a model's weights, each once."""
    tables = {}
    for variable in model.variables:
        if isinstance(variable, TableVariable):
            tables[id(variable.table)] = variable.table
    return list(tables.values())


@contextlib.contextmanager
def on_rank_zero(model):
    """Runs a block on rank 0, which may read whole tables in it.

    Every rank enters it. Rank 0 gets True and runs the block; meanwhile the
    others hand it the parts of whatever table or slots it reads, in whatever
    order, and then get False: their block must do nothing.

    Raises:
        RuntimeError: on the other ranks, when the block failed on rank 0.
    """
    communicator = model.distribute_strategy.collectives
    if communicator.size == 1:
        yield True
        return
    readable = _readable(model)

    def tell(code):
        return int(
            communicator.broadcast(
                [tf.constant(code, tf.int32)], name="saving/next"
            )[0]
        )

    if communicator.rank == 0:
        index = {id(pieces[0]): i for i, (_, pieces) in enumerate(readable)}
        code = _FAILED
        try:
            with sharded_table.announcing(lambda p: tell(index[id(p[0])])):
                yield True
            code = _DONE
        finally:
            tell(code)
        return
    while (code := tell(0)) >= 0:
        table, pieces = readable[code]
        table.read_like(pieces)
    if code == _FAILED:
        raise RuntimeError(
            "Rank 0 failed while it saved the model; its own error says why."
        )
    yield False


def _readable(model):
    """All that can be read whole, in the same order on every rank."""
    readable = [
        (table, table.partitions)
        for table in tables_of(model)
        if table.is_sharded
    ]
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, HybridOptimizer) and optimizer.built:
        readable.extend(
            place for place in optimizer.places() if place[0] is not None
        )
    return readable


def export(model):
    """The same model in stock Keras layers, without a trace of this package.

    Weights, the compiled loss and metrics, and the optimizer with its state
    are carried over. With several processes every rank must call it, and
    every rank gets the whole model, which it may then use by itself.

    Args:
        model: a model with layers of this package, of a class that Keras can
            rebuild from its configuration.

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
    plain = _rebuild(model, _to_stock)
    if any(isinstance(v, TableVariable) for v in plain.variables):
        raise ValueError(
            f"The model '{model.name}' makes sharded layers in its own code, "
            "so they cannot be replaced. Give such layers to its constructor "
            "and return them from `get_config`. Received a model of class "
            f"{type(model).__name__}."
        )
    _copy_variables(model, plain)
    return plain


def shard_embeddings(model):
    """The same model with `ShardedEmbedding` for each `keras.layers.Embedding`.

    Args:
        model: a model of a class that Keras can rebuild from its
            configuration.

    Returns:
        A new model with the same weights. Compile it inside
        `strategy.scope()`.

    Example:

    >>> import keras
    >>> model = keras.Sequential(
    ...     [keras.Input((3,)), keras.layers.Embedding(10, 4)])
    >>> type(shard_embeddings(model).layers[0]).__name__
    'ShardedEmbedding'
    """
    sharded = _rebuild(model, _to_sharded, with_compile=False)
    _copy_variables(model, sharded)
    return sharded


def _rebuild(model, replace, with_compile=True):
    checks.check(
        isinstance(model, keras.Model),
        "model",
        model,
        "a built `keras.Model` (not its class, a layer or a file's name)",
    )
    if not model.built:
        raise ValueError(
            f"The model '{model.name}' has no weights yet. Build it first, by "
            "`model.build(input_shape)` or by calling it on a batch. Received: "
            f"model={checks.spell(model)}."
        )
    config = _walk(keras.saving.serialize_keras_object(model), replace)
    if not with_compile:
        config.pop("compile_config", None)
    return keras.saving.deserialize_keras_object(config)


def _walk(config, replace):
    """Replaces serialized objects, from the inside out."""
    if isinstance(config, (list, tuple)):
        return type(config)(_walk(item, replace) for item in config)
    if not isinstance(config, dict):
        return config
    config = {key: _walk(value, replace) for key, value in config.items()}
    return replace(config) if "class_name" in config else config


def _to_stock(config):
    name = config.get("registered_name") or ""
    if not name.startswith("keras_sparsity>"):
        return config
    kind = name.removeprefix("keras_sparsity>")
    inner = dict(config["config"])
    if kind == "ShardedEmbedding":
        inner.pop("num_partitions", None)
        inner.pop("partition_group", None)
        inner.pop("architecture", None)
        return _stock_layer(config, "Embedding", inner)
    if kind == "ShardedEmbeddingBag":
        return _stock_bag(config, inner)
    if kind == "SampledSoftmax":
        return _stock_layer(config, "Dense", _dense_config(inner))
    if kind == "HybridOptimizer":
        return inner["inner_optimizer"]
    if kind == "GlobalMean":
        return inner["loss"]
    if kind == "SampledSoftmaxLoss":
        return keras.saving.serialize_keras_object(
            keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    raise ValueError(
        f"{kind} has no counterpart in stock Keras, so the model cannot be "
        "exported."
    )


def _stock_bag(config, inner):
    """A small model of stock layers, for bags in a dense tensor."""
    calls = config.get("inbound_nodes", ())
    if any(
        len(call["args"]) > 1 or call["kwargs"].get("weights") is not None
        for call in calls
    ):
        raise ValueError(
            f"The layer '{inner['name']}' is called with weights, and has no "
            "counterpart in stock Keras then, so the model cannot be exported."
        )
    for name in ("num_partitions", "partition_group", "architecture"):
        inner.pop(name, None)
    combiner, name = inner.pop("combiner"), inner.pop("name")
    is_masked = inner.pop("mask_zero")
    embedding = keras.layers.Embedding.from_config({**inner, "name": name})
    ids = keras.Input((None,), dtype="int32", name=f"{name}_ids")
    rows = embedding(ids)
    weights = keras.ops.cast(
        (ids != 0) if is_masked else keras.ops.ones_like(ids), rows.dtype
    )
    vectors = keras.ops.sum(rows * weights[..., None], axis=-2)
    counts = keras.ops.sum(weights, axis=-1, keepdims=True)
    if combiner == "sqrtn":
        counts = keras.ops.sqrt(counts)
    if combiner != "sum":
        vectors = keras.ops.divide_no_nan(vectors, counts)
    bag = keras.Model(ids, vectors, name=name)
    return {**config, **keras.saving.serialize_keras_object(bag)}


def _dense_config(config):
    kept = {
        key: config[key] for key in ("name", "trainable", "dtype", "use_bias")
    }
    # Its logits are float32 under mixed precision, too.
    policy = keras.dtype_policies.get(config["dtype"])
    is_double = policy.compute_dtype == "float64"
    kept["dtype"] = "float64" if is_double else "float32"
    return {**kept, "units": config["num_classes"]}


def _to_sharded(config):
    is_stock = config.get("class_name") == "Embedding" and str(
        config.get("module")
    ).startswith("keras")
    if not is_stock or config.get("registered_name") not in (None, "Embedding"):
        return config
    inner = dict(config["config"])
    if inner.get("lora_rank") is not None:
        raise ValueError(
            f"The layer '{inner.get('name')}' uses LoRA, which "
            "ShardedEmbedding does not support. Received: "
            f"lora_rank={inner['lora_rank']}."
        )
    for key in ("lora_rank", "lora_alpha", "quantization_config"):
        inner.pop(key, None)
    return {
        **config,
        "module": "keras_sparsity.layers.sharded_embedding",
        "class_name": "ShardedEmbedding",
        "registered_name": "keras_sparsity>ShardedEmbedding",
        "config": inner,
    }


def _stock_layer(config, class_name, inner):
    return {
        **config,
        "module": "keras.layers",
        "class_name": class_name,
        "registered_name": None,
        "config": inner,
    }


def _copy_variables(source, target):
    """Copies weights and the optimizer's state, one variable at a time."""
    # A stock layer draws no samples of its own.
    sources = [
        v
        for v in source.variables
        if not getattr(v, "is_same_on_all_ranks", False)
    ]
    if len(sources) != len(target.variables):
        raise ValueError(
            f"The rebuilt model '{source.name}' has other weights. Received: "
            f"{len(sources)} variables. Got: {len(target.variables)}."
        )
    for old, new in zip(sources, target.variables, strict=True):
        value = _as_stock(old)
        if _is_spread(new) and not isinstance(old, TableVariable):
            # Ranks may have drawn different ones; rank 0's count, as always.
            (value,) = new.table.collectives.broadcast(
                [tf.constant(value)], name=f"{new.table.role}/copy"
            )
        new.assign(value)
    optimizer = getattr(source, "optimizer", None)
    copied = getattr(target, "optimizer", None)
    if optimizer is None or copied is None or not optimizer.built:
        return
    if not copied.built:
        copied.build(target.trainable_variables)
    state = _optimizer_state(optimizer, source)
    for (table, value), variable in zip(state, copied.variables, strict=True):
        if table is not None and value.shape == tuple(table.variable.shape):
            value = table.to_stock(value)
        variable.assign(value)


def _is_spread(variable):
    return isinstance(variable, TableVariable) and variable.table.is_sharded


def _as_stock(variable):
    value = variable.numpy()
    if isinstance(variable, TableVariable):
        return variable.table.to_stock(value)
    return value


def _optimizer_state(optimizer, model):
    """Arrays, each with the table of whose rows it is the slot, or None."""
    # Slots of tables in one piece are variables like any others.
    rule = optimizer
    while hasattr(rule, "inner_optimizer"):
        rule = rule.inner_optimizer
    table_of = {}
    for variable in model.trainable_variables:
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
