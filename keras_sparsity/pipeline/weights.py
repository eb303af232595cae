"""Each weight on the rank of its stage, and on no other."""

import contextlib

import tensorflow as tf

from keras_sparsity._tf import (
    keras_models,
    keras_optimizers,
    keras_scopes,
    keras_variables,
)
from keras_sparsity.conversion import exporting, saving
from keras_sparsity.global_batch import random_states
from keras_sparsity.pipeline.slots import Slots, places_among_all
from keras_sparsity.pipeline.tables import is_spread
from keras_sparsity.tables import whole
from keras_sparsity.training.binding import Binding
from keras_sparsity.update import state as optimizer_state

# A method of `Normalization` and the like: it makes constants of weights, and
# Keras calls it when it has loaded them.
_FINALIZE = "finalize_state"


class Weights(Binding):
    """Frees the weights of other stages; gathers them to be read or saved.

    Values that all ranks assign (`set_weights`, `load_weights`) stay where a
    weight lives.
    """

    def __init__(self, model, parts, steps, updates):
        self._steps, self._updates = steps, updates
        strategy = model.distribute_strategy
        self._stages_of_ranks = strategy.stages_of_ranks
        self._stage = self._stages_of_ranks[strategy.rank]
        self._stages = {
            id(variable): number
            for number, part in enumerate(parts)
            for variable in part.model.variables
        }
        names = ["get_weights", "set_weights", "load_weights"]
        super().__init__(model, [*names, "save", "save_weights"])
        self._others = [
            variable
            for variable in model.weights
            if not self._is_here(variable)
        ]
        for variable in self._others:
            self._take_away(variable)
        self._finalized = [
            layer
            for layer in keras_models.all_layers(model)
            if hasattr(layer, _FINALIZE)
            and not all(map(self._is_here, layer.weights))
        ]
        self._leave_constants()
        self._peers = strategy.peers
        self._of_stage = parts[self._stage].model
        self._share(self._of_stage.weights)
        self.part_random_states()
        object.__setattr__(model, exporting.WHOLE, self._whole_everywhere)
        if model.optimizer is not None:
            _load_own_part(model.optimizer, updates)

    def _is_here(self, variable):
        return self._stages[id(variable)] == self._stage

    def _owner(self, variable):
        """The first rank that has a weight."""
        return self._stages_of_ranks.index(self._stages[id(variable)])

    def _take_away(self, variable):
        path, owner = variable.path, self._owner(variable)

        def placeholder(shape, dtype):
            if keras_scopes.in_symbolic_scope():
                return tf.zeros(shape, dtype)
            fix = (
                "`model.get_weights()` gives all weights, and "
                "`ks.export(model)` a copy that has them, to compute with "
                "parts of the model, such as an encoder; call either on every "
                "rank."
            )
            if self._steps.is_in_step:
                fix = (
                    "There a layer computes with them that does not have "
                    "them as weights of its own, by which a model is cut. "
                    "Cut it elsewhere (`stages`), or make the layer of the "
                    "weights an attribute of the other one."
                )
            raise ValueError(
                f"The weights '{path}' are on rank {owner}, whose stage they "
                f"belong to, and were read on rank {self._collectives.rank}. "
                f"{fix}"
            )

        keras_variables.take_away(variable, placeholder)

    def _leave_constants(self):
        """Layers of other stages make no constants: the weights are gone."""
        for layer in self._finalized:
            object.__setattr__(layer, _FINALIZE, lambda: None)

    def unbind(self):
        self._finalize_again()
        super().unbind()

    def _finalize_again(self):
        for layer in self._finalized:
            vars(layer).pop(_FINALIZE, None)

    def part_random_states(self):
        """Lets the ranks of a stage draw differently, of other examples.

        Before each run: a loaded model has the same on all of them.
        """
        states = [
            variable
            for variable in self._of_stage.variables
            if random_states.is_state(variable)
        ]
        self._share(states)
        for state in filter(random_states.is_own, states):
            random_states.fold_rank(state, self._peers.rank)

    def _share(self, weights):
        """Gives the ranks of a stage the weights of the first of them."""
        weights = [variable for variable in weights if not is_spread(variable)]
        if self._peers.size == 1 or not weights:
            return
        values = self._peers.broadcast(
            [variable.value for variable in weights], name="pipeline/shared"
        )
        for variable, value in zip(weights, values, strict=True):
            variable.assign(value)

    def get_weights(self):
        """All weights, on every rank; every rank calls it."""
        self._steps.settle()
        return [self._value(v).numpy() for v in self._model.weights]

    def set_weights(self, weights):
        # Updates that are under way belong to the weights before.
        self._steps.settle()
        self._stock["set_weights"](weights)

    def load_weights(self, *args, **kwargs):
        self._steps.settle()
        self._stock["load_weights"](*args, **kwargs)

    def _save(self, name, args, kwargs):
        self._check_same_call(name, {})
        self._steps.settle()
        is_writer = self._collectives.rank == 0
        # The others wait for the file, or for its error.
        with self._whole(is_writer), saving.on_rank_zero(self._model):
            if is_writer:
                saving.write(self._stock[name], args, kwargs)

    @contextlib.contextmanager
    def shown_on_rank_zero(self):
        """While entered, rank 0 holds all weights; every rank enters."""
        self._steps.settle()
        is_reader = self._collectives.rank == 0
        # The others wait for its block to end.
        with self._held(is_reader), saving.on_rank_zero(self._model):
            yield

    @contextlib.contextmanager
    def _held(self, is_reader):
        """While entered, some ranks hold all weights; every rank enters."""
        with contextlib.ExitStack() as held:
            for variable in self._model.weights:
                value = self._value(variable)
                if is_reader:
                    self._hold(variable, value, held)
            if is_reader:
                held.callback(self._leave_constants)
                self._finalize_again()
                for layer in self._finalized:
                    layer.finalize_state()
            yield

    @contextlib.contextmanager
    def _whole(self, is_reader):
        """While entered, readers hold the whole state; every rank enters."""
        model, optimizer = self._model, self._model.optimizer
        self._tell_samples()
        values = []
        if optimizer is not None:
            values = self._slot_values(is_reader)
        with self._held(is_reader), contextlib.ExitStack() as held:
            if optimizer is not None and is_reader:
                held.callback(setattr, model, "optimizer", optimizer)
                model.optimizer = _with_values(
                    optimizer, self._updates.all_built, values
                )
            yield

    def _tell_samples(self):
        """Gives all ranks the random states that layers save: of samples."""
        for variable in self._model.variables:
            if random_states.is_state(variable) and random_states.is_shared(
                variable
            ):
                (value,) = self._collectives.broadcast(
                    [variable.value],
                    root=self._owner(variable),
                    name="pipeline/samples",
                )
                variable.assign(value)

    def _hold(self, variable, value, held):
        """Has a rank hold the whole of a weight until `held` ends."""
        if not self._is_here(variable):
            keras_variables.give_back(variable, value)
            held.callback(self._take_away, variable)
        elif is_spread(variable):
            held.enter_context(whole.in_one_piece(variable.table, value))

    def _whole_everywhere(self):
        self._check_same_call("export", {})
        self._steps.settle()
        return self._whole(True)

    def _slot_values(self, is_reader):
        """List of the values of an optimizer for all weights, at readers.

        Every rank calls it. Slots travel one after the other: ranks that only
        send theirs hold one of the others' at a time.
        """
        slots = Slots(self._model.optimizer, self._updates, self._collectives)
        found = []
        for place, (ranks, (_, *shape_and_dtype)) in enumerate(slots.of_all):
            # All ranks of a stage read the slot of a table together.
            own = slots.own.get(place)
            value = _value_of(own) if own else tf.zeros(*shape_and_dtype)
            (value,) = self._collectives.broadcast(
                [value], root=ranks[0], name="pipeline/slots/values"
            )
            if is_reader:
                found.append(value)
        return found

    def _value(self, variable):
        """A weight's value, on every rank; every rank calls it."""
        owner = self._owner(variable)
        if is_spread(variable):
            value = tf.convert_to_tensor(variable.table.read())
        elif owner == self._collectives.rank:
            value = tf.convert_to_tensor(variable.value)
        else:
            value = tf.zeros(variable.shape, variable.dtype)
        (value,) = self._collectives.broadcast(
            [value], root=owner, name="pipeline/weights"
        )
        return value


def _with_values(optimizer, variables, values):
    """A copy of an optimizer for the variables of all stages, with values."""
    of_all = keras_optimizers.unbuilt(optimizer)
    of_all.build(variables)
    for variable, value in zip(of_all.variables, values, strict=True):
        variable.assign(value)
    return of_all


def _value_of(place):
    """The value of an optimizer's variable, of a table the whole."""
    table, pieces = place
    if table is not None:
        return tf.convert_to_tensor(whole.read_like(table, pieces))
    return tf.convert_to_tensor(pieces[0].value)


def _load_own_part(optimizer, updates):
    """Lets a rank's optimizer load its slots from those of all weights."""
    stock = type(optimizer).load_own_variables

    def load(store):
        number, places = places_among_all(optimizer, updates)
        if len(store.keys()) == number:
            values = [store[str(place)] for place in places]
            optimizer_state.assign(updates.places, values)
        else:
            stock(optimizer, store)

    object.__setattr__(optimizer, "load_own_variables", load)
