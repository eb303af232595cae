"""Gives sparse variables the fastest architecture, while a model trains."""

import collections
import time

import keras
import numpy as np

from keras_sparsity import architectures, moves, planning, saving, sparsity
from keras_sparsity.callbacks import rank_zero
from keras_sparsity.collectives import speeds
from keras_sparsity.model_plan import (
    as_sent,
    pulled_bytes_of,
    running_cluster,
)
from keras_sparsity.planning import transfer_cost
from keras_sparsity.tables.table_variable import TableVariable

# The first decision: by then the first steps, all of them sampled, are over.
_FIRST_STEPS = 16
# Decided anew, if a variable's alpha has drifted by such a factor since, after
# twice as many steps each time, and at the latest after so many.
_DRIFT = 2.0
_MOST_STEPS = 4_096
_MOST_TIMES = 256
# Another architecture must promise so much of the time that one takes.
_GAIN = 0.2
# A step that has become slower by so much is no noise: back again.
_LOSS = 0.2
# Every process would have the whole table, with its slots.
_MOST_BYTES = 256 * 2**20


class AutoArchitecture(keras.callbacks.Callback):
    """Part of every `fit` of a model, where an architecture is to be found.

    After some steps, whose alpha is measured, each table of `"auto"` gets the
    architecture that takes the least time by the bytes that it moves, the
    speeds of each path on this cluster, and what it has to update; and so do
    the gradients of ordinary embeddings, if that is the strategy's; all this
    where it saves more time in the steps that are left than it takes to trace
    the step anew. Then the
    steps' times are compared with those before: if they have become longer,
    all go back. Decided again when alpha drifts, also in the `fit`s that
    follow.

    Args:
        strategy: the `HybridStrategy`.

    Attributes:
        is_ready: function that tells whether a decision may be made now; the
            same on all ranks.

    References:
        EuroSys 3.1 (the hybrid architecture).
    """

    def __init__(self, strategy):
        super().__init__()
        self.is_ready = lambda: True
        self._strategy = strategy
        self._collectives = strategy.collectives
        self._cluster = running_cluster(strategy.collectives)
        self._speeds = None
        self._alphas = {}  # by the variables' paths, at the last decision
        self._fixed = set()
        self._undo = None
        # Of the slowest trace so far, the same on all ranks once they decide.
        self._trace_seconds = 0.0
        self._earlier_steps = self._steps = 0
        self._refused = set()  # what was too short to pay for, by path

    def on_train_begin(self, logs=None):
        self._earlier_steps += self._steps
        self._steps = self._steps_of_epoch = 0
        self._longest_epoch = self._epoch = 0
        self._next = _FIRST_STEPS
        self._forget_times()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch, self._steps_of_epoch = epoch, 0

    def on_epoch_end(self, epoch, logs=None):
        self._longest_epoch = max(self._longest_epoch, self._steps_of_epoch)

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        count = self.model.steps_per_execution
        seconds = time.perf_counter() - self._start
        if not self._seconds:  # with the tracing
            self._trace_seconds = max(self._trace_seconds, seconds)
        self._seconds.append(seconds / count)
        self._steps += count
        self._steps_of_epoch += count
        if self._steps < self._next or not self.is_ready():
            return
        if self._undo:
            self._compare()
        else:
            self._decide()
        interval = min(2 * self._steps, self._steps + _MOST_STEPS)
        self._next = self._steps + _FIRST_STEPS if self._undo else interval

    def _forget_times(self):
        # The last ones: a long training has many steps between decisions.
        self._seconds = collections.deque(maxlen=_MOST_TIMES)

    def _step_seconds(self):
        """Of the steps since the last decision, by the slowest rank.

        Their lower quartile: other work on a machine makes steps longer only.
        """
        seconds = list(self._seconds)
        seconds = seconds[2:] or seconds  # without the tracing
        of_ranks = self._collectives.gather_objects(
            float(np.quantile(seconds, 0.25)), name="auto_architecture/seconds"
        )
        return max(of_ranks)

    # Deciding.

    def _decide(self):
        found = [
            (place, facts)
            for place, facts in self._places()
            if place.path not in self._fixed
            and facts.alpha is not None
            and self._has_drifted(place.path, facts.alpha)
        ]
        if not found:
            return
        if self._speeds is None:
            self._speeds = speeds.measure(
                self._collectives, self._bytes_of_probe
            )
        costs = {
            place.path: self._costs(place, facts) for place, facts in found
        }
        # Rank 0's arithmetic: a rounding error is not to divide the ranks.
        costs, self._trace_seconds = self._collectives.gather_objects(
            (costs, self._trace_seconds), name="auto_architecture/decision"
        )[0]
        chosen = {
            place.path: _best(costs[place.path], place.architecture)
            for place, _ in found
        }
        places = [p for p, _ in found if chosen[p.path] != p.architecture]
        gain = sum(
            costs[p.path][p.architecture] - costs[p.path][chosen[p.path]]
            for p in places
        )
        pays = self._pays(gain)
        for place, facts in found:
            self._explain(place, facts, costs[place.path], chosen, pays)
            if pays or place not in places:
                self._alphas[place.path] = facts.alpha
        if not places or not pays:
            return
        self._before = self._step_seconds()
        self._undo = [(place, place.target) for place in places]
        self._move([(place, chosen[place.path]) for place in places])

    def _places(self):
        """Each `_Table` and `_Rows` that may change, and its sparsity."""
        variables = self.model.trainable_variables
        architecture = architectures.of(self._strategy)
        for variable, facts in zip(
            variables, sparsity.measured(variables), strict=True
        ):
            if isinstance(variable, TableVariable):
                if _is_found(variable.table, architecture):
                    yield _Table(variable), facts
            elif architecture.rows == "auto":
                yield _Rows(variable, self._strategy), facts

    def _move(self, targets):
        moves.move_for_now(
            self.model,
            {
                p.variable.table: to
                for p, to in targets
                if isinstance(p, _Table)
            },
            [(p.variable, to) for p, to in targets if isinstance(p, _Rows)],
        )
        self._forget_times()

    def _has_drifted(self, path, alpha):
        before = self._alphas.get(path)
        if before is None:
            return True
        low, high = sorted((max(alpha, 1e-12), max(before, 1e-12)))
        return high > _DRIFT * low

    def _costs(self, place, facts):
        """Seconds that each architecture takes for a place in a step."""
        spec = facts.spec(place.num_partitions)
        slots = len(self.model.optimizer.slots_of(place.variable))
        fits = spec.num_bytes() * (1 + slots) <= _MOST_BYTES
        return {
            name: self._seconds_of(place.variable, spec, name, slots)
            for name in place.architectures
            if fits or name in ("ps", place.architecture)
        }

    def _pays(self, gain):
        """Whether so many seconds of each step are worth another trace."""
        return gain * self._steps_left() > self._trace_seconds

    def _steps_left(self):
        """How many more steps there will be, as far as this can be known."""
        steps = self.params.get("steps") or max(
            self._longest_epoch, 2 * self._steps_of_epoch
        )
        epochs = max(1, self.params.get("epochs", 1) - self._epoch)
        left = steps * epochs - self._steps_of_epoch
        # After one `fit` as many more may come.
        return max(left, self._earlier_steps)

    def _explain(self, place, facts, costs, chosen, pays):
        now, best = place.architecture, chosen[place.path]
        change = f"stays {now}"
        why = ""
        if best != now and pays:
            change = f"goes from {now} to {best}"
        elif best != now:
            if place.path in self._refused:
                return
            self._refused.add(place.path)
            why = (
                f"; {best} would not save, in about {self._steps_left()} more "
                f"steps, the {self._trace_seconds:.2g} s of another trace"
            )
        listed = ", ".join(
            f"{name} {1e3 * value:.3g} ms" for name, value in costs.items()
        )
        self._say(
            f"'{place.name}' {change}: alpha {facts.alpha:.3g}; {listed}{why}."
        )

    def _seconds_of(self, variable, spec, architecture, num_slots):
        cost = planning.engine_bytes(
            as_sent(spec, self._strategy),
            architecture,
            self._cluster,
            self._collectives.engine,
            local_aggregation=architectures.aggregates_locally(self._strategy),
            pulled_bytes=pulled_bytes_of(variable),
        )
        path = self._speeds[architecture]
        seconds = path.seconds(cost.busiest_bytes)
        if architecture == "allreduce" or (
            architecture == "ps" and variable.table.shares_messages
        ):  # with dense ones, or with other tables
            seconds -= path.latency_seconds
        whole = spec.num_bytes()
        # By one process: its part of a spread table, or all of it.
        updated = whole / self._collectives.size
        if self.model.optimizer.updates_rows_of(variable):
            updated = spec.alpha * whole
        if architecture != "ps":
            updated = min(whole, updated * self._collectives.size)
        updated *= 1 + num_slots
        if architecture == "allreduce":  # the gradient is made dense
            updated += 2 * whole
        return seconds + self._speeds["update"].seconds_per_byte * updated

    def _bytes_of_probe(self, path, num_rows):
        rows = num_rows * (self._collectives.size if path == "ps" else 1)
        spec = planning.VariableSpec("probe", (rows, 16), alpha=1.0)
        return planning.engine_bytes(
            spec, path, self._cluster, self._collectives.engine
        ).busiest_bytes

    # Looking back.

    def _compare(self):
        """Takes moves back that have made the steps slower."""
        after, undo, self._undo = self._step_seconds(), self._undo, None
        if after <= (1 + _LOSS) * self._before:
            return
        if not self._pays(after - self._before):
            return
        names = ", ".join(f"'{place.name}'" for place, _ in undo)
        self._say(
            f"{names} back: {1e3 * after:.3g} ms a step in place of "
            f"{1e3 * self._before:.3g} ms."
        )
        self._fixed.update(place.path for place, _ in undo)
        self._move(undo)

    def _say(self, text):
        if self.params.get("verbose") and self._collectives.rank == 0:
            rank_zero.say(f"Architecture: {text}")


def _best(costs, now):
    """The cheapest architecture, if it is cheaper by enough."""
    best = min(costs, key=costs.get)
    return best if costs[best] <= (1 - _GAIN) * costs[now] else now


class _Table:
    """A sharded table's variable, as it is held now."""

    architectures = transfer_cost.ARCHITECTURES

    def __init__(self, variable):
        table = variable.table
        self.variable, self.path = variable, variable.path
        self.name = table.owner_name
        self.num_partitions = table.requested_partitions
        self.architecture = self.target = table.architecture
        if table.is_sharded:
            self.target = ("ps", table.layout.num_partitions)


class _Rows:
    """A variable that each rank has, with a gradient of rows."""

    architectures = ("allreduce", "allgather")
    num_partitions = None

    def __init__(self, variable, strategy):
        self.variable, self.path = variable, variable.path
        self.name = variable.path
        self.architecture = self.target = architectures.of_rows(
            variable, strategy
        )


def is_asked_for(model, strategy):
    """Whether there may be an architecture to find."""
    architecture = architectures.of(strategy)
    return architecture.rows == "auto" or any(
        _is_found(table, architecture) for table in saving.tables_of(model)
    )


def _is_found(table, architecture):
    """Whether a table's own architecture is to be found."""
    return (table.requested_architecture or architecture.tables) == "auto"
