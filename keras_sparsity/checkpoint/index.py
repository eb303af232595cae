"""A checkpoint's index: JSON that is checked before anything is done with it.

A checkpoint may come from someone else, with checksums that fit: the index
names no file but a checkpoint's own, and nothing in it is trusted to have the
type, the size or the depth that this version writes.
"""

import hashlib
import json
import os
import reprlib

import numpy as np

from keras_sparsity._tf import checks
from keras_sparsity.checkpoint import folder

FORMAT = "keras_sparsity checkpoint"
# Of new files. Those of every earlier one can be read (tests/data).
FORMAT_VERSION = 1
INDEX = "index.json"
# Both far beyond a training's own: 10,000 variables are 3 MB.
_MOST_BYTES = 1 << 28
_MOST_LEVELS = 32
_SECTIONS = ("model", "optimizer", "metrics", "prediction")


def plain(value, where, levels=_MOST_LEVELS - 4):
    """A value as JSON has it: numbers, strings, lists and dicts.

    NumPy's and TensorFlow's numbers and arrays become Python's; of other values
    an error says `where` they stand. Lists and dicts may be nested so many
    `levels` deep.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (dict, list, tuple)) and levels == 0:
        raise ValueError(
            f"A checkpoint cannot keep {where}: it is nested too deeply."
        )
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {
            key: plain(entry, f"{where}[{key!r}]", levels - 1)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain(entry, where, levels - 1) for entry in value]
    try:
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        if array.dtype.kind in "fV":  # V: bfloat16
            array = array.astype("float64")
        is_plain, cause = array.dtype.kind in "biufU", None
    except Exception as error:  # whatever an object's own method raises
        is_plain, cause = False, error
    if not is_plain:
        raise ValueError(
            f"A checkpoint cannot keep {where}. Expected: numbers, strings, "
            "arrays of them, or lists and dicts with strings as keys. "
            f"Received: {checks.spell(value)} (of type "
            f"{type(value).__name__}). Leave it out, or make numbers of it."
        ) from cause
    return array.tolist()


def write(path, index):
    """Writes the index of a checkpoint's folder, and has it on disk."""
    index = {"format": FORMAT, "format_version": FORMAT_VERSION, **index}
    index["checksum"] = _checksum(index)
    with open(os.path.join(path, INDEX), "w") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read(path, is_resumed=False):
    """The index of a checkpoint.

    Args:
        path: the checkpoint's folder.
        is_resumed: whether a training is to go on from it.

    Raises:
        ValueError: if it is damaged, or of a later version.
    """
    file = os.path.join(path, INDEX)
    try:
        index = _parsed(file)
        kind, version = index["format"], index["format_version"]
        checksum = index.pop("checksum")
        found = _checksum(index)
    except (
        *(OSError, ValueError, KeyError, AttributeError, TypeError),
        *(RecursionError, MemoryError),
    ) as error:
        raise ValueError(
            f"the index {file} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if kind == FORMAT and _is_integer(version, 1) and version > FORMAT_VERSION:
        raise ValueError(
            f"its format is version {version}, and this version of "
            f"keras_sparsity reads up to {FORMAT_VERSION}: update it"
        )
    if kind != FORMAT or not _is_integer(version, 1):
        raise ValueError(
            f"the index {file} is not of a checkpoint: it has format="
            f"{reprlib.repr(kind)} and format_version={reprlib.repr(version)}"
        )
    if checksum != found:
        raise ValueError(f"the index {file} is damaged: its checksum is wrong")
    try:
        _check(index, is_resumed)
    except ValueError as error:
        raise ValueError(f"the index {file} is damaged: {error}") from error
    return index


def _parsed(file):
    with folder.opened(file) as opened:
        text = opened.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    index = json.loads(text)
    _check_levels(index, _MOST_LEVELS)
    return index


def _check_levels(value, levels):
    if not isinstance(value, (dict, list)):
        return
    if not levels:
        raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
    for entry in value.values() if isinstance(value, dict) else value:
        _check_levels(entry, levels - 1)


def _checksum(index):
    text = json.dumps(index, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _check(index, is_resumed):
    """Raises ValueError where the index is not as `write` is given it."""
    count = _get(index, "num_processes", lambda v: _is_integer(v, 1))
    # In this order: the count may be any number.
    _get(
        index,
        "files",
        lambda files: (
            isinstance(files, dict)
            and len(files) == count + 1
            and files.keys() == set(folder.files(count))
            and all(isinstance(sealed, dict) for sealed in files.values())
        ),
    )
    for sealed in index["files"].values():
        _get(sealed, "bytes", _is_integer)
        _get(sealed, "checksum", lambda v: isinstance(v, str))
    for record in _get(index, "variables", _is_list_of(dict)):
        _check_record(record, count)
    position = _get(index, "position", lambda v: isinstance(v, dict))
    _get(position, "epoch", _is_integer)
    _get(position, "step", _is_integer)
    if is_resumed:
        _check_training(position)


def _check_record(record, num_processes):
    _get(record, "section", lambda v: v in _SECTIONS)
    _get(record, "name", lambda v: isinstance(v, str))
    _get(record, "dtype", lambda v: isinstance(v, str))
    shape = _get(
        record,
        "shape",
        lambda v: isinstance(v, list) and all(map(_is_integer, v)),
    )
    if "each_rank" in record:
        _get(record, "each_rank", lambda v: isinstance(v, bool))
    if "holder" in record:
        _get(record, "holder", _is_integer)
    if "ranks" in record:
        _get(record, "ranks", _is_list_of_ranks(num_processes))
    if "num_partitions" in record:
        _get(record, "num_partitions", lambda v: shape and _is_integer(v, 1))
        _get(record, "owners", _is_list_of_ranks(num_processes))


def _check_training(position):
    # Earlier versions did not say these.
    position.setdefault("has_begun", True)
    position.setdefault("input", {})
    _get(
        position,
        "input",
        lambda v: (
            isinstance(v, dict)
            and all(
                each is None or isinstance(each, str) or _is_integer(each)
                for each in v.values()
            )
        ),
    )
    for name in ("has_begun", "has_stopped"):
        _get(position, name, lambda v: isinstance(v, bool))
    _get(position, "seed", lambda v: v is None or _is_integer(v))
    _get(position, "order_seed", lambda v: v is None or _is_integer(v))
    _get(
        position,
        "history",
        lambda v: (
            isinstance(v, list)
            and [type(part) for part in v] == [list, dict]
            and all(map(_is_integer, v[0]))
            and _is_list_of(list)(list(v[1].values()))
        ),
    )
    _get(
        position,
        "callbacks",
        lambda v: (
            _is_list_of(list)(v)
            and all([type(part) for part in e] == [str, dict] for e in v)
        ),
    )


def _get(entries, key, is_valid):
    if key not in entries:
        raise ValueError(f"it has no {key!r}")
    if not is_valid(entries[key]):
        raise ValueError(f"it has {key}={reprlib.repr(entries[key])}")
    return entries[key]


def _is_integer(value, least=0):
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer and least <= value < 1 << 64


def _is_list_of_ranks(num_processes):
    return lambda value: (
        isinstance(value, list)
        and value
        and all(_is_integer(rank) and rank < num_processes for rank in value)
    )


def _is_list_of(kind):
    return lambda value: (
        isinstance(value, list) and all(isinstance(e, kind) for e in value)
    )
