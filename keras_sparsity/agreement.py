"""What the ranks must have in common when they call a method of a model.

Ranks whose models or arguments differ would wait for each other, or train
something else each without a word.
"""

import hashlib
import re

import keras

from keras_sparsity import compat

# Names count anew in each process, seeds may be a rank's own, and the rest
# says where a class was found.
_NOT_COMPARED = ("build_config", "module", "name", "registered_name", "seed")
# What a rank may do by itself.
_A_RANKS_OWN = ("callbacks", "verbose")
_MOST_CHARACTERS = 200
_MOST_ENTRIES = 16


def of_call(method, arguments):
    """The method and its arguments, a dict of what is compared.

    Args:
        method: Name of the method.
        arguments: dict of its arguments; of arrays shape and dtype count.

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
    """A model's layers, its variables and its optimizer."""
    facts = {}
    for number, layer in enumerate(compat.all_layers(model)):
        if not isinstance(layer, keras.Model):  # its layers are in the list
            _add(facts, f"layers[{number}]", _serialized(layer))
    facts.update(of_variables(model.variables))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        _add(facts, "optimizer", _serialized(inner))
        mode = getattr(optimizer, "sparse_updates", None)
        facts["optimizer.sparse_updates"] = mode
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
    except (NotImplementedError, TypeError, ValueError):
        return kind  # a user's own class that cannot be serialized


def _add(facts, name, value):
    """Adds a serialized object's entries, those within others too."""
    if isinstance(value, dict) and "class_name" in value:
        facts[name] = value["class_name"]
        value = value.get("config")
        if not isinstance(value, dict):
            value = {} if value is None else {"config": value}
    if isinstance(value, dict):
        for key, entry in value.items():
            if key not in _NOT_COMPARED:
                _add(facts, f"{name}.{key}", entry)
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
    # A function's address is the process's own.
    text = re.sub(" at 0x[0-9a-f]+", "", str(value))
    if len(text) > _MOST_CHARACTERS:
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        text = f"{text[:_MOST_CHARACTERS]}... (digest {digest})"
    return text


def _spell_shape(shape):
    return tuple(shape) if getattr(shape, "rank", 0) is not None else "unknown"
