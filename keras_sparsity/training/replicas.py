"""Weights that all ranks must have alike, compared when a run begins."""

import hashlib
import zlib

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_models
from keras_sparsity.collectives.differences import raise_if_different
from keras_sparsity.conversion.saving import tables_of
from keras_sparsity.optimizer import HybridOptimizer

# Largest difference, in terms of a variable's largest weight, that counts as
# rounding: processors that round differently make less of equal gradients.
_ROUNDING = 1e-4
_EVERY_RANK = (
    "Make such changes (`set_weights`, `load_weights`, `assign`) on every "
    "rank, with the same values."
)


class Replicas:
    """Finds weights that a rank has changed by itself since the last run.

    Trained weights and an optimizer's slots of them have the same values on
    all ranks. A rank's own state (random states, running statistics, metrics)
    is not compared.

    Args:
        model: an adopted model.

    Attributes:
        synchronised: dict of the variables whose values all ranks have had
            from rank 0, by their `id`s.
    """

    def __init__(self, model):
        self._model = model
        self._collectives = model.distribute_strategy.collectives
        # The variables too, so that no other one takes over an id.
        self.synchronised = {}

    def check(self, trains=False):
        """Raises, on every rank, where a rank has other weights.

        Args:
            trains: whether to compare the optimizer's state, too.
        """
        communicator = self._collectives
        if communicator.size == 1:
            return
        tables = [t for t in tables_of(self._model) if t.is_sharded]
        variables = self._variables(trains)
        given = {k: v for table in tables for k, v in table.given.items()}
        values = [(v.path, _fingerprint(v)) for v in variables]
        mine = sorted(given.items()), values
        digest = hashlib.blake2b(repr(mine).encode(), digest_size=16).digest()
        digests = communicator.all_gather(
            np.frombuffer(digest, np.uint8)[np.newaxis], name="model/replicas"
        ).numpy()
        if (digests != digests[0]).any():
            everyone = communicator.gather_objects(
                (given, values), name="model/replicas/each"
            )
            _check_given([of_rank[0] for of_rank in everyone])
            self._check_values(
                communicator, variables, [of_rank[1] for of_rank in everyone]
            )
        for table in tables:
            table.given.clear()

    def _variables(self, trains):
        tables = {
            id(t.variable) for t in tables_of(self._model) if t.is_sharded
        }
        drawn_alike = [
            v
            for v in self._model.variables
            if getattr(v, "is_same_on_all_ranks", False)
        ]
        weights = keras_models.weights_that_were_trainable(self._model)
        variables = [
            v
            for v in [*weights, *drawn_alike]
            if id(v) in self.synchronised and id(v) not in tables
        ]
        optimizer = getattr(self._model, "optimizer", None)
        if trains and isinstance(optimizer, HybridOptimizer):
            if optimizer.built:
                places = optimizer.places()
                variables += [p[0] for table, p in places if table is None]
        return variables

    def _check_values(self, communicator, variables, of_ranks):
        """Raises if values are further apart than rounding; mends that.

        Args:
            communicator: `Collectives` of all ranks.
            variables: variables whose values may differ.
            of_ranks: for each rank, a list of their paths and fingerprints.
        """
        raise_if_different(
            [[path for path, _ in of_rank] for of_rank in of_ranks],
            "The weights of the model and its optimizer",
            "Build the same model on every rank.",
        )
        variables = [
            variable
            for variable, *of_variable in zip(variables, *of_ranks, strict=True)
            if len(set(of_variable)) > 1
        ]
        values = communicator.broadcast(
            [tf.convert_to_tensor(v.value) for v in variables],
            name="model/replicas/first",
        )
        apart = communicator.gather_objects(
            [
                _distance(variable.value.numpy(), value.numpy())
                for variable, value in zip(variables, values, strict=True)
            ],
            name="model/replicas/apart",
        )
        lines = [
            f"  {variable.path}: rank {rank} has other values than rank 0"
            for place, variable in enumerate(variables)
            for rank, of_rank in enumerate(apart)
            if of_rank[place] > _ROUNDING
        ]
        if lines:
            listed = "\n".join(lines)
            raise ValueError(
                f"Weights of the model '{self._model.name}' must be the same "
                "on all ranks, but a rank has changed some by itself since "
                f"the last run:\n{listed}\n{_EVERY_RANK}"
            )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def _check_given(of_ranks):
    """Raises unless all ranks have set the same values of a table.

    Args:
        of_ranks: for each rank, a dict from the path of a variable or slot to
            the fingerprint of its values.
    """
    lines = []
    for path in dict.fromkeys(path for given in of_ranks for path in given):
        values = [given.get(path) for given in of_ranks]
        if all(value == values[0] for value in values):
            continue
        ranks = [str(rank) for rank, value in enumerate(values) if value]
        which = "different values" if len(ranks) == len(values) else "values"
        lines.append(f"  {path}: {which} were set on rank {', '.join(ranks)}")
    if lines:
        listed = "\n".join(lines)
        raise ValueError(
            "Each rank keeps its own rows of the values that a sharded table "
            "is given, so all ranks must set the same ones. Received:\n"
            f"{listed}\n{_EVERY_RANK}"
        )


def _fingerprint(variable):
    value = np.ascontiguousarray(variable.value.numpy())
    return zlib.crc32(value.reshape(-1).view(np.uint8))


def _distance(mine, first):
    """The largest difference, in terms of the largest value."""
    mine, first = (np.asarray(x, np.float64) for x in (mine, first))
    is_same = (mine == first) | (np.isnan(mine) & np.isnan(first))
    if is_same.all():
        return 0.0
    difference = np.abs(mine - first)[~is_same]
    if not np.isfinite(difference).all():
        return np.inf
    largest = np.abs(first[np.isfinite(first)]).max(initial=0.0)
    return float(difference.max() / max(largest, np.finfo(np.float64).tiny))
