"""Copies of models with other layers in place of some."""

import inspect

import keras

from keras_sparsity._tf import checks, keras_models
from keras_sparsity.conversion.copying import Copier
from keras_sparsity.global_batch.losses import GlobalMean
from keras_sparsity.layers.sampled_softmax_loss import SampledSoftmaxLoss
from keras_sparsity.tables.sharded_table import ShardedTable


def check_is_model(model):
    checks.check(
        isinstance(model, keras.Model),
        "model",
        model,
        "a built `keras.Model` (not its class, a layer or a file's name)",
    )


def check_is_built(model):
    if not model.built:
        raise ValueError(
            f"The model '{model.name}' has no weights yet. Build it first, by "
            "`model.build(input_shape)` or by calling it on a batch. Received: "
            f"model={checks.spell(model)}."
        )


def _is_table_or_loss(value):
    return isinstance(value, (ShardedTable, GlobalMean, SampledSoftmaxLoss))


def copied(replace, model):
    """The copy of a model, and the `Copier` that made it.

    Args:
        replace: function of the copier and an object, as `Copier` takes it;
            it is also asked about tables and losses.
    """
    copier = Copier(replace, _is_table_or_loss)
    # First in the model's order, which is the same on every rank.
    return copier.copy([*keras_models.all_layers(model), model])[-1], copier


def embedding_options(layer):
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


def in_place(copier, layer, made, value_of):
    """Puts a new layer in place of another, with its values."""
    copier.put_in_place(made, layer)
    for old, new in carried_over(layer, made, value_of):
        copier.remember(old, new)
    return made


def carried_over(layer, made, value_of):
    """Builds a new layer like another one; pairs of their weights."""
    if not layer.built:
        return []
    if not made.built:
        made.build(**keras_models.built_with(layer))
    # Not the state of a softmax's sampler.
    olds = [
        v
        for v in layer.weights
        if not getattr(v, "is_same_on_all_ranks", False)
    ]
    pairs = list(zip(olds, made.weights, strict=True))
    for old, new in pairs:
        new.assign(value_of(old))
        new.trainable = old.trainable
    return pairs


def globals_of(copier, kind):
    """Names of globals that hold a layer which a copied function reads."""
    functions = list(copier.functions)
    for original, _ in copier.known():
        package = type(original).__module__.partition(".")[0]
        is_of_user = package not in ("keras", "keras_sparsity")
        if isinstance(original, keras.Layer) and is_of_user:
            methods = vars(type(original)).values()
            functions += [m for m in methods if inspect.isfunction(m)]
    names = set()
    for function in functions:
        for name in _names(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, keras.Layer) and any(
                isinstance(layer, kind)
                for layer in (value, *keras_models.all_layers(value))
            ):
                names.add(f"{name} (in {function.__qualname__})")
    return ", ".join(sorted(names))


def _names(code):
    """The global names that a code object and those in it may read."""
    inner = [c for c in code.co_consts if inspect.iscode(c)]
    return set(code.co_names).union(*map(_names, inner))
