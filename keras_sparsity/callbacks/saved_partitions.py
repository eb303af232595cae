"""Numbers of partitions that a search has found, kept in a file."""

import dataclasses
import json
import os

from keras_sparsity._tf import checks
from keras_sparsity.planning.partition_search import (
    PartitionChoice,
    PartitionSample,
)

_VERSION = 1


def described(optimizer):
    """The parts of an optimizer that decide the time of an update."""
    if optimizer is None:  # of a model that has others, in other attributes
        return "none"
    rule = type(optimizer.inner_optimizer).__name__
    return f"{rule}, {optimizer.sparse_updates}"


def save(path, conditions, choices):
    """Writes choices and their conditions as a JSON file.

    Args:
        path: the file. One that is there is replaced.
        conditions: flat dict of strings and numbers.
        choices: dict from a group of tables to its `PartitionChoice`.
    """
    document = {
        "version": _VERSION,
        "conditions": conditions,
        "choices": {
            group: dataclasses.asdict(choice)
            for group, choice in choices.items()
        },
    }
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    os.replace(temporary, path)


def load(path, conditions, groups):
    """The choices of a file, if they were found for the same.

    Args:
        conditions: as for `save`, those of now.
        groups: names of the groups that a choice is wanted for.

    Returns:
        `(choices, reason)`: a dict from a group to its `PartitionChoice` and
        None, or None and why there are no choices.
    """
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        version = document["version"]
        if version != _VERSION:
            return None, f"it is of version {version}, not {_VERSION}"
        differing = _differences(document["conditions"], conditions)
        if differing:
            return None, differing
        choices = {
            group: _choice(choice)
            for group, choice in document["choices"].items()
        }
        if set(choices) != set(groups):
            return None, f"it has choices for {sorted(choices)}"
    except FileNotFoundError:
        return None, "there is no such file yet"
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        *(RecursionError, IndexError),
    ) as error:
        return None, f"it cannot be read ({type(error).__name__}: {error})"
    return choices, None


def _choice(saved):
    """The `PartitionChoice` of a file, once its entries are numbers."""
    for sample in saved["samples"]:
        checks.num_partitions("num_partitions", sample["num_partitions"])
        checks.positive_number("seconds", sample["seconds"])
    checks.num_partitions("num_partitions", saved["num_partitions"])
    checks.positive_integer("size", saved["size"])
    return PartitionChoice(
        **{
            **saved,
            "samples": tuple(PartitionSample(**s) for s in saved["samples"]),
            "theta": tuple(float(number) for number in saved["theta"]),
            "misfit": float(saved["misfit"]),
        }
    )


def _differences(saved, now):
    names = [*now, *(name for name in saved if name not in now)]
    return "; ".join(
        f"{name} was {saved.get(name, 'not there')} and is "
        f"{now.get(name, 'not there')}"
        for name in names
        if saved.get(name) != now.get(name)
    )
