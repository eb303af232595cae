"""Gives sparse variables the fastest placement while a model trains."""

import collections

import keras

from keras_sparsity import planning, sparsity
from keras_sparsity._tf import keras_models
from keras_sparsity.callbacks import cycles, move_times, rank_zero
from keras_sparsity.callbacks.epoch_steps import EpochSteps
from keras_sparsity.conversion import saving
from keras_sparsity.moves import moving
from keras_sparsity.placement.traffic import Traffic, as_sent, running_cluster

# Steps before the first decision: touches of each of these are counted.
_FIRST_STEPS = 16
# Where times of steps are compared, updates before: steps between them add up
# gradients alone, with `gradient_accumulation_steps`.
_FIRST_UPDATES = 4
# Decided anew if alpha has drifted by this factor; looked at after twice as
# many steps each time, at most after this many.
_DRIFT = 2.0
_MOST_STEPS = 4_096
# Fraction of a variable's time that another placement must save.
_GAIN = 0.2
# A step that is slower by this fraction is no noise: the moves are taken back.
_LOSS = 0.2
# Largest table, with its slots, that every process may hold.
_MOST_BYTES = 256 * 2**20


class AutoArchitecture(keras.callbacks.Callback):
    """Chooses placements during `fit`, under `"auto"` and `"measured"`.

    After the first steps, which count alpha, each variable of rows moves to
    the placement with the lowest predicted time: of its messages, by their
    bytes and the speeds of a network, and of its update. The move must save
    more time in the remaining steps than tracing the step anew costs. A drift
    of alpha, also in a later `fit`, repeats the decision.

    Under `"auto"` the speeds are those of a reference network, so that two
    runs decide alike. Under `"measured"` they are those of this cluster, and
    longer steps after a move take it back.

    Attributes:
        is_ready: function that returns whether a decision may be made now,
            the same on all ranks.

    References:
        EuroSys 3.1 (the hybrid architecture).
    """

    def __init__(self, strategy):
        super().__init__()
        self.is_ready = lambda: True
        self._placements = strategy.placements
        self._collectives = strategy.collectives
        self._cluster = running_cluster(strategy.collectives)
        self._times = move_times.of(strategy.placements)
        self._alphas = {}  # by the places' keys, at the last decision
        self._fixed = set()
        self._undo = self._run = None
        self._earlier_steps = self._steps = 0
        self._due = 0  # The next look, in steps of all `fit`s.
        self._epoch_steps = EpochSteps(self)
        self._refused = set()  # keys of moves that were not worth a trace

    def on_train_begin(self, logs=None):
        before, self._steps = self._steps, 0
        self._earlier_steps += before
        self._longest_epoch = self._epoch = 0
        self._next = first = self._first_steps()
        if before < first and not self._times.looks_back:
            # Short `fit`s count together, but for times of their steps.
            left = max(self._due, first) - self._earlier_steps
            self._next = min(first, max(1, left))
        run = self.params.get("steps"), self.model.optimizer
        if run != self._run:
            self._undo = None  # Steps of another kind say nothing of a move.
        self._run = run
        self._times.forget()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._epoch_steps.begin()

    def on_epoch_end(self, epoch, logs=None):
        self._longest_epoch = max(self._longest_epoch, self._epoch_steps.number)

    def on_train_batch_begin(self, batch, logs=None):
        self._times.begin()

    def on_train_batch_end(self, batch, logs=None):
        count = self._epoch_steps.add_execution()
        self._times.end(count)
        self._steps += count
        if self._steps < self._next or not self.is_ready():
            return
        if self._undo:
            self._compare()
        else:
            self._decide()
        self._next = _doubled(self._steps)
        if self._undo:
            self._next = self._steps + self._first_steps()
        self._due = _doubled(self._earlier_steps + self._steps)

    def _first_steps(self):
        """Steps before a first decision, and before a look back at it."""
        if not self._times.looks_back:
            return _FIRST_STEPS
        return max(_FIRST_STEPS, _FIRST_UPDATES * cycles.steps_of(self.model))

    def _step_seconds(self):
        return self._times.step_seconds(cycles.steps_of(self.model))

    # Deciding.

    def _decide(self):
        of_rows = [each for each in self._places() if each[1].alpha is not None]
        found = [
            (place, facts)
            for place, facts in of_rows
            if place.key not in self._fixed
            and self._has_drifted(place.key, facts.alpha)
        ]
        if not found:
            return
        self._speeds = self._times.speeds(self._bytes_of_probe)
        self._num_of = collections.Counter(
            name for each in of_rows for name in self._possible(*each)
        )
        costs = {p.key: self._costs(p, facts) for p, facts in found}
        # Rank 0's numbers: a rounding error must not divide the ranks.
        costs, self._trace_seconds = self._collectives.gather_objects(
            (costs, self._times.trace_seconds),
            name="auto_architecture/decision",
        )[0]
        chosen = {
            place.key: _best(costs[place.key], place.name) for place, _ in found
        }
        places = [p for p, _ in found if chosen[p.key] != p.name]
        gain = sum(
            costs[p.key][p.name] - costs[p.key][chosen[p.key]] for p in places
        )
        pays = self._pays(gain)
        for place, facts in found:
            self._explain(place, facts, costs[place.key], chosen, pays)
            if pays or place not in places:
                self._alphas[place.key] = facts.alpha
        if not places or not pays:
            return
        if self._times.looks_back:
            self._before = self._step_seconds()
            self._undo = [(place, place.target) for place in places]
        self._move([(place, chosen[place.key]) for place in places])

    def _places(self):
        """Each `_Place` that may change, and its sparsity."""
        # Layers of two models within one may have the same names.
        keys, numbers = {}, collections.Counter()
        for variable in self.model.variables:
            keys[id(variable)] = variable.path, numbers[variable.path]
            numbers[variable.path] += 1
        variables = self.model.trainable_variables
        for variable, facts in zip(
            variables, sparsity.measured(variables), strict=True
        ):
            if self._placements.is_found(variable):
                key = keys[id(variable)]
                yield _Place(variable, self._placements, key), facts

    def _move(self, targets):
        moving.move_for_now(self.model, [(p.variable, to) for p, to in targets])
        self._times.forget()

    def _has_drifted(self, key, alpha):
        before = self._alphas.get(key)
        if before is None:
            return True
        low, high = sorted((max(alpha, 1e-12), max(before, 1e-12)))
        return high > _DRIFT * low

    def _possible(self, place, facts):
        """The placements that memory allows: dict from names."""
        num_bytes = facts.spec(place.num_partitions).num_bytes()
        fits = num_bytes * (1 + self._num_slots(place)) <= _MOST_BYTES
        return {
            name: placement
            for name, placement in place.candidates.items()
            if fits or placement.layout is not None or name == place.name
        }

    def _costs(self, place, facts):
        """Seconds that each placement takes in a step: dict from names."""
        spec = facts.spec(place.num_partitions)
        slots = self._num_slots(place)
        return {
            name: self._seconds_of(place.variable, spec, placement, slots)
            for name, placement in self._possible(place, facts).items()
        }

    def _num_slots(self, place):
        return sum(
            len(optimizer.slots_of(place.variable))
            for optimizer in saving.with_slots(self.model)
        )

    def _pays(self, gain):
        """Whether saving these seconds in each step is worth another trace."""
        return gain * self._steps_left() > self._trace_seconds

    def _steps_left(self):
        """Estimate of the number of remaining steps."""
        steps = self.params.get("steps") or max(
            self._longest_epoch, 2 * self._epoch_steps.number
        )
        epochs = max(1, self.params.get("epochs", 1) - self._epoch)
        left = steps * epochs - self._epoch_steps.number
        # A `fit` may be followed by another one as long.
        return max(left, self._earlier_steps)

    def _explain(self, place, facts, costs, chosen, pays):
        now, best = place.name, chosen[place.key]
        change = f"stays {now}"
        why = ""
        if best != now and pays:
            change = f"goes from {now} to {best}"
        elif best != now:
            if place.key in self._refused:
                return
            self._refused.add(place.key)
            why = (
                f"; {best} would not save, in about {self._steps_left()} more "
                f"steps, the {self._trace_seconds:.2g} s of another trace"
            )
        listed = ", ".join(
            f"{name} {1e3 * value:.3g} ms" for name, value in costs.items()
        )
        self._say(
            f"'{place.label}' {change}: alpha {facts.alpha:.3g}; {listed}{why}."
        )

    def _seconds_of(self, variable, spec, placement, num_slots):
        _, reducer = placement.reducers
        sent = as_sent(spec, self._placements.options, self._collectives)
        cost = reducer.transfer_bytes(
            sent, Traffic.of(variable, self._placements)
        )
        path = self._speeds[reducer.path]
        seconds = path.seconds(cost.busiest_bytes)
        seconds -= path.latency_seconds * self._share(variable, placement)
        whole = spec.num_bytes()
        own = whole / self._collectives.size
        # Some models have several in other attributes, and none here.
        if any(
            optimizer.updates_rows_of(variable)
            or optimizer.may_keep_rows_of(variable)
            for optimizer in saving.with_slots(self.model)
        ):
            own = sent.alpha * whole
        updated = reducer.updated_bytes(
            own, whole, self._collectives.size, num_slots
        )
        return seconds + self._speeds["update"].seconds_per_byte * updated

    def _share(self, variable, placement):
        """Fraction of its messages' latency that others have, too."""
        _, of_rows = placement.reducers
        if of_rows.shares_message(variable):
            return 1.0
        table = getattr(variable, "table", None)
        is_pulled = table is not None and table.is_sharded
        if placement.layout is not None and is_pulled:
            return 0.0
        # Rows travel together: variables that may be placed so pay once.
        return 1 - 1 / self._num_of[placement.name]

    def _bytes_of_probe(self, path, num_rows):
        of_each = {"ps": self._collectives.size}  # owners
        spec = planning.VariableSpec(
            "probe", (num_rows * of_each.get(path, 1), 16), alpha=1.0
        )
        return planning.engine_bytes(
            spec, path, self._cluster, self._collectives.engine
        ).busiest_bytes

    # Looking back.

    def _compare(self):
        """Takes back moves that have made steps slower."""
        after = self._step_seconds()
        undo, self._undo = self._undo, None
        if after <= (1 + _LOSS) * self._before:
            return
        if not self._pays(after - self._before):
            return
        names = ", ".join(f"'{place.label}'" for place, _ in undo)
        self._say(
            f"{names} back: {1e3 * after:.3g} ms a step in place of "
            f"{1e3 * self._before:.3g} ms."
        )
        self._fixed.update(place.key for place, _ in undo)
        self._move(undo)

    def _say(self, text):
        if self.params.get("verbose") and self._collectives.rank == 0:
            rank_zero.say(f"Architecture: {text}")


def _doubled(steps):
    """The number of steps at which to look again."""
    return min(2 * steps, steps + _MOST_STEPS)


def _best(costs, now):
    """Name of the fastest placement, if it saves enough."""
    best = min(costs, key=costs.get)
    return best if costs[best] <= (1 - _GAIN) * costs[now] else now


class _Place:
    """The placement of a variable of rows, and its alternatives.

    Args:
        key: tells the model's variables apart, from one `fit` to the next.
    """

    def __init__(self, variable, placements, key):
        self.variable, self.key = variable, key
        table = getattr(variable, "table", None)
        self.label = table.owner_name if table else variable.path
        self.num_partitions = table and table.requested_partitions
        placement = placements.of(variable)
        self.name = self.target = placement.name
        if placement.layout is not None:
            self.target = (self.name, placement.layout.num_partitions)
        self.candidates = placements.candidates(variable)


def is_asked_for(model, strategy):
    """Whether there may be a placement to find, also of a layer to be built."""
    placements = strategy.placements
    return (
        placements.finds_rows
        or any(
            placements.is_found(table.variable)
            for table in saving.tables_of(model)
        )
        or not all(layer.built for layer in keras_models.all_layers(model))
    )
