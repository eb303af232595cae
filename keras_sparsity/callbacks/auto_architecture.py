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
    the gradients of ordinary embeddings, if that is the strategy's. Then the
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

    def on_train_begin(self, logs=None):
        self._steps = 0
        self._next = _FIRST_STEPS
        self._forget_times()

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        count = self.model.steps_per_execution
        self._seconds.append((time.perf_counter() - self._start) / count)
        self._steps += count
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
        chosen = {}
        for place, facts in found:
            self._alphas[place.path] = facts.alpha
            architecture = self._best(place, facts)
            if architecture != place.architecture:
                chosen[place.path] = architecture
        # Rank 0's arithmetic: a rounding error is not to divide the ranks.
        chosen = self._collectives.gather_objects(
            chosen, name="auto_architecture/decision"
        )[0]
        places = [place for place, _ in found if place.path in chosen]
        if not places:
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

    def _best(self, place, facts):
        spec = facts.spec(place.num_partitions)
        slots = len(self.model.optimizer.slots_of(place.variable))
        fits = spec.num_bytes() * (1 + slots) <= _MOST_BYTES
        now = place.architecture
        seconds = {
            name: self._seconds_of(place.variable, spec, name, slots)
            for name in place.architectures
            if fits or name in ("ps", now)
        }
        best = min(seconds, key=seconds.get)
        if seconds[best] > (1 - _GAIN) * seconds[now]:
            best = now
        costs = ", ".join(
            f"{name} {1e3 * value:.3g} ms" for name, value in seconds.items()
        )
        change = f"stays {now}" if best == now else f"goes from {now} to {best}"
        self._say(f"'{place.name}' {change}: alpha {facts.alpha:.3g}; {costs}.")
        return best

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
        names = ", ".join(f"'{place.name}'" for place, _ in undo)
        self._say(
            f"{names} back: {1e3 * after:.3g} ms a step in place of "
            f"{1e3 * self._before:.3g} ms."
        )
        self._fixed.update(place.path for place, _ in undo)
        self._move(undo)

    def _say(self, text):
        if self.params.get("verbose") and self._collectives.rank == 0:
            rank_zero.say(self, f"Architecture: {text}")


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
