"""Facts about a model and a call of it that all ranks must share.

Ranks with different models or arguments would wait for each other, or
silently train different models.
"""

import hashlib
import re
import warnings

import keras

from keras_sparsity._tf import keras_models

# Each process numbers names by itself, ranks may differ in seeds, and the rest
# is where a class was found.
_NOT_COMPARED = (
    "build_config",
    "module",
    "name",
    "registered_name",
    "seed",
    "shared_as",
)
# Of a strategy; those of stages choose the ranks' messages, which differ then.
_OF_STRATEGY = (
    *("architecture", "wire_dtype", "local_aggregation", "bucket_bytes"),
    *("prefetch", "synchronous", "max_staleness", "delay", "staleness_aware"),
    "delay_compensation",
)
_OF_OPTIMIZER = "sparse_updates", "dense_aggregation", "sparse_aggregation"
# Of `compile`, beside the optimizer.
_OF_COMPILE = "loss", "loss_weights", "metrics", "weighted_metrics"
# Arguments in which ranks may differ.
_A_RANKS_OWN = ("callbacks", "verbose")
_MOST_CHARACTERS = 200
_MOST_ENTRIES = 16


def of_call(method, arguments):
    """Facts about a call of a method: a dict from arguments to values.

    Arrays count by shape and dtype.

    Example:

    >>> of_call("fit", {"x": keras.ops.ones([4, 2]), "epochs": 3})
    {'method': 'fit', 'x': 'float32 of shape (4, 2)', 'epochs': 3}
    """
    return {
        "method": method,
        **{
            name: _describe(value)
            for name, value in arguments.items()
            if name not in _A_RANKS_OWN and not name.startswith("_")
        },
    }


def of_model(model):
    """Facts about a model's layers, variables, optimizer and strategy.

    And about its losses and metrics.
    """
    facts = {}
    for number, layer in enumerate(keras_models.all_layers(model)):
        if not isinstance(layer, keras.Model):  # its layers are listed too
            _add(facts, f"layers[{number}]", _serialized(layer))
    facts.update(of_variables(model.variables))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        _add(facts, "optimizer", _serialized(inner))
        for option in _OF_OPTIMIZER:
            value = getattr(optimizer, option, None)
            facts[f"optimizer.{option}"] = value
    strategy = getattr(model, "distribute_strategy", None)
    for option in _OF_STRATEGY:
        if hasattr(strategy, option):
            facts[f"strategy.{option}"] = getattr(strategy, option)
    return {**facts, **_of_compile(model)}


def _of_compile(model):
    facts, arguments = {}, keras_models.compile_arguments(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a lambda is not safe to load
        for name in _OF_COMPILE:
            _add_each(facts, name, arguments.get(name))
    return facts


def of_variables(variables):
    """The variables' paths, dtypes and shapes."""
    return {
        v.path: f"{v.dtype} of shape {_spell_shape(v.shape)}" for v in variables
    }


def _serialized(thing):
    kind = {"class_name": type(thing).__name__}
    try:
        return {**kind, "config": thing.get_config()}
    except Exception:  # of a user's class that cannot be serialized
        return kind


def _add(facts, name, value):
    """Adds a serialized object's entries to `facts`, in depth."""
    if isinstance(value, dict) and "class_name" in value:
        facts[name] = value["class_name"]
        if value["class_name"] == "__lambda__":
            return  # its bytes may differ between processes
        value = value.get("config")
        if not isinstance(value, dict):
            value = {} if value is None else {"config": value}
    if isinstance(value, dict):
        for key, entry in value.items():
            if key not in _NOT_COMPARED:
                _add(facts, f"{name}.{key}", entry)
    else:
        facts[name] = _spell(value)


def _add_each(facts, name, value):
    """Adds the objects, functions and values in lists and dictionaries."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, entry in value.items():
            _add_each(facts, f"{name}[{key!r}]", entry)
    elif hasattr(value, "get_config"):
        _add(facts, name, _serialized(value))
    else:
        facts[name] = _spell(value)


def _describe(value):
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = getattr(value.dtype, "name", value.dtype)
        return f"{dtype} of shape {_spell_shape(value.shape)}"
    if isinstance(value, (list, tuple, dict)) and len(value) > _MOST_ENTRIES:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        return {key: _describe(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_describe(entry) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return _spell(value)
    return type(value).__name__


def _spell(value):
    is_plain = value is None or isinstance(value, (bool, int, float))
    if is_plain and value == value:  # NaN is not equal to itself
        return value
    # Functions have different addresses on each rank.
    text = re.sub(" at 0x[0-9a-f]+", "", str(value))
    if len(text) > _MOST_CHARACTERS:
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        text = f"{text[:_MOST_CHARACTERS]}... (digest {digest})"
    return text


def _spell_shape(shape):
    return tuple(shape) if getattr(shape, "rank", 0) is not None else "unknown"
