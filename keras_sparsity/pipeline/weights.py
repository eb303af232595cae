"""Each weight on the rank of its stage, and on no other."""

import contextlib

import tensorflow as tf

from keras_sparsity._tf import keras_scopes, keras_variables
from keras_sparsity.training.binding import Binding


class Weights(Binding):
    """Frees the weights of other stages; gathers them to be read or saved.

    Values that all ranks assign (`set_weights`, `load_weights`) stay where a
    weight lives.

    Args:
        model: an adopted model.
        parts: the `Part`s of all stages.
    """

    def __init__(self, model, parts):
        self._owners = {
            id(variable): rank
            for rank, part in enumerate(parts)
            for variable in part.model.weights
        }
        super().__init__(model, ["get_weights", "save", "save_weights"])
        self._others = [
            variable
            for variable in model.weights
            if self._owner(variable) != self._collectives.rank
        ]
        for variable in self._others:
            self._take_away(variable)

    def _owner(self, variable):
        return self._owners[id(variable)]

    def _take_away(self, variable):
        path, owner = variable.path, self._owner(variable)

        def placeholder(shape, dtype):
            if keras_scopes.in_symbolic_scope():
                return tf.zeros(shape, dtype)
            raise ValueError(
                f"The weights '{path}' are on rank {owner}, whose stage they "
                f"belong to, and were read on rank {self._collectives.rank}. "
                "`model.get_weights()` gives all weights; call it on every "
                "rank."
            )

        keras_variables.take_away(variable, placeholder)

    def get_weights(self):
        """All weights, on every rank; every rank calls it."""
        return [self._value(v).numpy() for v in self._model.weights]

    def save(self, *args, **kwargs):
        self._save("save", args, kwargs)

    def save_weights(self, *args, **kwargs):
        self._save("save_weights", args, kwargs)

    def _save(self, name, args, kwargs):
        self._check_same_call(name, {})
        with self._whole_on_rank_zero() as is_writer:
            if is_writer:
                self._stock[name](*args, **kwargs)

    @contextlib.contextmanager
    def _whole_on_rank_zero(self):
        """While entered, rank 0 holds all weights; yields whether it is."""
        is_writer = self._collectives.rank == 0
        held = []
        try:
            for variable in self._model.weights:
                if self._owner(variable) != 0:
                    value = self._value(variable)
                    if is_writer:
                        keras_variables.give_back(variable, value)
                        held.append(variable)
            yield is_writer
        finally:
            for variable in held:
                self._take_away(variable)

    def _value(self, variable):
        """A weight's value, on every rank; every rank calls it."""
        owner = self._owner(variable)
        if owner == self._collectives.rank:
            value = tf.convert_to_tensor(variable.value)
        else:
            value = tf.zeros(variable.shape, variable.dtype)
        (value,) = self._collectives.broadcast(
            [value], root=owner, name="pipeline/weights"
        )
        return value
