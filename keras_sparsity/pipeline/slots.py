"""The slots of all stages, in the order of one optimizer for all weights."""

import keras
import numpy as np

from keras_sparsity.checkpoint import state


class Slots:
    """The variables of all ranks' optimizers; every rank makes it.

    Args:
        optimizer: the rank's, built.
        updates: the rank's `Updates`.
        collectives: `Collectives` of all ranks.

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

    Args:
        optimizer: the rank's.
        updates: its `Updates`.
    """
    stand_ins = {
        # As many dimensions, of which a rule's slots may depend.
        id(v): keras.Variable(np.zeros([1] * len(v.shape)), name=f"weight_{i}")
        for i, v in enumerate(updates.all_built)
    }
    paths = []
    for some in (updates.all_built, updates.own_built):
        alike = type(optimizer).from_config(optimizer.get_config())
        alike.build([stand_ins[id(v)] for v in some])
        paths.append([v.path for v in alike.variables])
    of_all, of_own = paths
    return len(of_all), [of_all.index(path) for path in of_own]
