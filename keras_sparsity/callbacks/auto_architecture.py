"""Gives tables the architecture that is fastest, while a model trains."""

import collections
import time

import keras
import numpy as np

from keras_sparsity import moves, planning, saving, sparsity
from keras_sparsity.callbacks import rank_zero
from keras_sparsity.collectives import speeds
from keras_sparsity.model_plan import running_cluster
from keras_sparsity.planning import transfer_cost

# The first decision: by then the first steps, all of them sampled, are over.
_FIRST_STEPS = 16
# Decided anew, if a table's alpha has drifted by such a factor since, after
# twice as many steps each time, and at the latest after so many.
_DRIFT = 2.0
_MOST_STEPS = 4_096
_MOST_TIMES = 256
# Another architecture must promise so much of the time that a table takes.
_GAIN = 0.2
# A step that has become slower by so much is no noise: back again.
_LOSS = 0.2
# Every process would have the whole table, with its slots.
_MOST_BYTES = 256 * 2**20


class AutoArchitecture(keras.callbacks.Callback):
    """Part of every `fit` with tables of `architecture="auto"`.

    After some steps, whose alpha is measured, each such table gets the
    architecture that takes the least time by the bytes that it moves, the
    speeds of each path on this cluster, and what it has to update. Then the
    steps' times are compared with those before: if they have become longer,
    the tables go back. Decided again when alpha drifts.

    Args:
        tables: list of those tables.
        communicator: `Collectives` of all ranks.
        is_ready: function that tells whether a decision may be made now; the
            same on all ranks.

    References:
        EuroSys 3.1 (the hybrid architecture).
    """

    def __init__(self, tables, communicator, is_ready):
        super().__init__()
        self._tables = tables
        self._collectives = communicator
        self._is_ready = is_ready
        self._cluster = running_cluster(communicator)
        self._speeds = None
        self._alphas = {}  # of each table, at its last decision
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
        if self._steps < self._next or not self._is_ready():
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
        tables = [t for t in self._tables if t not in self._fixed]
        measured = sparsity.measured([t.variable for t in tables])
        drifted = [
            (table, facts)
            for table, facts in zip(tables, measured, strict=True)
            if facts.alpha is not None and self._has_drifted(table, facts.alpha)
        ]
        if not drifted:
            return
        if self._speeds is None:
            self._speeds = speeds.measure(
                self._collectives, self._bytes_of_probe
            )
        chosen = {}
        for table, facts in drifted:
            self._alphas[table] = facts.alpha
            architecture = self._best(table, facts)
            if architecture != table.architecture:
                chosen[table] = architecture
        # Rank 0's arithmetic: a rounding error is not to divide the ranks.
        names = {t.owner_name: a for t, a in chosen.items()}
        names = self._collectives.gather_objects(
            names, name="auto_architecture/decision"
        )[0]
        chosen = {
            table: names[table.owner_name]
            for table, _ in drifted
            if table.owner_name in names
        }
        if not chosen:
            return
        self._before = self._step_seconds()
        self._undo = {t: _place(t) for t in chosen}
        moves.move_for_now(self.model, chosen)
        self._forget_times()

    def _has_drifted(self, table, alpha):
        before = self._alphas.get(table)
        if before is None:
            return True
        low, high = sorted((max(alpha, 1e-12), max(before, 1e-12)))
        return high > _DRIFT * low

    def _best(self, table, facts):
        spec = facts.spec(table.requested_partitions)
        slots = self._num_slots(table)
        seconds = {
            name: self._seconds_of(table, spec, name, slots)
            for name in transfer_cost.ARCHITECTURES
            if name == "ps" or spec.num_bytes() * (1 + slots) <= _MOST_BYTES
        }
        best = min(seconds, key=seconds.get)
        now = table.architecture
        if now in seconds and seconds[best] > (1 - _GAIN) * seconds[now]:
            best = now
        costs = ", ".join(
            f"{name} {1e3 * value:.3g} ms" for name, value in seconds.items()
        )
        change = f"stays {now}" if best == now else f"goes from {now} to {best}"
        self._say(
            f"'{table.owner_name}' {change}: alpha {facts.alpha:.3g}; {costs}."
        )
        return best

    def _seconds_of(self, table, spec, architecture, num_slots):
        cost = planning.engine_bytes(
            spec, architecture, self._cluster, self._collectives.engine
        )
        path = self._speeds[architecture]
        seconds = path.seconds(cost.busiest_bytes)
        if architecture == "allreduce":  # in one message with dense ones
            seconds -= path.latency_seconds
        whole = spec.num_bytes()
        # By one process: its part of a spread table, or all of it.
        updated = whole / self._collectives.size
        if self.model.optimizer.updates_rows_of(table.variable):
            updated = spec.alpha * whole
        if architecture != "ps":
            updated = min(whole, updated * self._collectives.size)
        updated *= 1 + num_slots
        if architecture == "allreduce":  # the gradient is made dense
            updated += 2 * whole
        return seconds + self._speeds["update"].seconds_per_byte * updated

    def _num_slots(self, table):
        return len(self.model.optimizer.slots_of(table.variable))

    def _bytes_of_probe(self, path, num_rows):
        rows = num_rows * (self._collectives.size if path == "ps" else 1)
        spec = planning.VariableSpec("probe", (rows, 16), alpha=1.0)
        return planning.engine_bytes(
            spec, path, self._cluster, self._collectives.engine
        ).busiest_bytes

    # Looking back.

    def _compare(self):
        """Takes a move back that has made the steps slower."""
        after, undo, self._undo = self._step_seconds(), self._undo, None
        if after <= (1 + _LOSS) * self._before:
            return
        names = ", ".join(f"'{table.owner_name}'" for table in undo)
        self._say(
            f"{names} back: {1e3 * after:.3g} ms a step in place of "
            f"{1e3 * self._before:.3g} ms."
        )
        self._fixed.update(undo)
        moves.move_for_now(self.model, undo)
        self._forget_times()

    def _say(self, text):
        if self.params.get("verbose") and self._collectives.rank == 0:
            rank_zero.say(self, f"Architecture: {text}")


def _place(table):
    if table.architecture == "ps":
        return "ps", table.layout.num_partitions
    return table.architecture


def tables_of(model, strategy):
    """Those of a model's tables whose architecture is to be found."""
    return [
        table
        for table in saving.tables_of(model)
        if (table.requested_architecture or strategy.architecture) == "auto"
    ]
