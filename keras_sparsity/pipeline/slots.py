"""The slots of all stages, in the order of one optimizer for all weights."""

import collections
import re

import numpy as np

from keras_sparsity._tf import keras_optimizers, keras_variables
from keras_sparsity.checkpoint import state

_UNNAMED = "variable"


class Slots:
    """The variables of all ranks' optimizers; every rank makes it.

    Attributes:
        own: dict from the places of this rank's variables among all to
            `(table, pieces)`, see `update.state`.
        of_all: list of `(ranks, (name, shape, dtype))`: the ranks that have
            each variable, and the variable as one process has it.
    """

    def __init__(self, optimizer, updates, collectives):
        number, places = places_among_all(optimizer, updates)
        self.own = dict(zip(places, updates.places, strict=True))
        mine = {place: state.described(*of) for place, of in self.own.items()}
        of_ranks = collectives.gather_objects(
            (not updates.trained, mine), name="pipeline/slots"
        )
        # Last those that train no variable: their optimizers count no steps.
        order = sorted(range(len(of_ranks)), key=lambda rank: of_ranks[rank][0])
        self.of_all = []
        for place in range(number):
            ranks = tuple(r for r in order if place in of_ranks[r][1])
            self.of_all.append((ranks, of_ranks[ranks[0]][1][place]))


def places_among_all(optimizer, updates):
    """The number of variables of an optimizer for all, and a rank's places.

    A place for each variable of the rank's optimizer.
    """
    stand_ins = _stand_ins(updates.all_built)
    found = []
    for some in (updates.all_built, updates.own_built):
        alike = keras_optimizers.unbuilt(optimizer)
        alike.build([stand_ins[id(v)] for v in some])
        found.append([_path(variable) for variable in alike.variables])
    if len({paths.count(_UNNAMED) for paths in found}) > 1:
        raise ValueError(
            "The slots of a stage are found among those of all by their paths."
            f" Received: a {type(optimizer).__name__} that makes variables "
            "without names for each weight. Make them by "
            "`add_variable_from_reference`, or give each a name of its own."
        )
    of_all, of_own = map(_counted, found)
    return len(of_all), [of_all.index(each) for each in of_own]


def _path(variable):
    """Its path, of an optimizer's variable without a name without a number.

    Keras numbers these over all models and optimizers, as Nadam's product of
    momentums.
    """
    is_unnamed = re.fullmatch(r"(.*/)?variable(_\d+)?", variable.path)
    return _UNNAMED if is_unnamed else variable.path


def _counted(paths):
    """Pairs of each path and the number of those before that are the same.

    Adafactor has several slots of one path.
    """
    seen = collections.Counter()
    found = []
    for path in paths:
        found.append((path, seen[path]))
        seen[path] += 1
    return found


def _stand_ins(variables):
    """Small variables for an optimizer to be built with, a dict by ids.

    Slots are found again by their paths. Keras makes these of a variable's
    name, so that it is a number here; or of its path, of which the choice of
    slots may depend, as of the number of dimensions. So it stays, but where
    the slots of two would have the same.
    """
    flat = [variable.path.replace("/", "_") for variable in variables]
    numbers = collections.Counter(flat)
    found = {}
    for i, (variable, path) in enumerate(zip(variables, flat, strict=True)):
        name = f"weight_{i}"
        is_unique = numbers[path] == 1
        found[id(variable)] = keras_variables.at_path(
            variable.path if is_unique else f"{name}/{variable.path}",
            np.zeros([1] * len(variable.shape)),
            name=name,
        )
    return found
