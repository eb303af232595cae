"""Finds the number of partitions of sharded tables while a model trains."""

import dataclasses
import os
import time

import keras

from keras_sparsity import moves
from keras_sparsity._tf import checks
from keras_sparsity.callbacks import cycles, rank_zero, saved_partitions
from keras_sparsity.callbacks.epoch_steps import EpochSteps
from keras_sparsity.callbacks.step_seconds import StepEnd, StepSeconds
from keras_sparsity.callbacks.table_groups import TableMemory, groups_of
from keras_sparsity.checkpoint import storage
from keras_sparsity.conversion import saving
from keras_sparsity.planning.partition_search import MAX_SAMPLES


class PartitionSearch(keras.callbacks.Callback):
    """Finds how many partitions make a training step fastest.

    While `fit` trains, the tables are given one number of partitions after
    another (see `ks.planning.PartitionSampler`: at most seven), some steps are
    timed with each, and the best is kept. These steps train as any others do:
    the result of training depends on the search by rounding only.

    A step's time is that of the slowest rank, and the median over the steps
    counts; with `gradient_accumulation_steps`, over the means of steps that
    end in an update together. A sample ends early once its median is known
    well enough. When training ends before the search does, the best so far is
    kept; another `fit` with the same callback goes on.

    Tables whose layers have the same `partition_group` get the same number of
    partitions; those without one are a group together. With several groups,
    one is searched after the other.

    In one process, or without sharded tables, there is nothing to search.

    Args:
        num_steps: steps to time in each sample, at most. (The paper: 50.)
        num_warm_up_steps: steps at the beginning of each sample that do not
            count. The first execution, which traces, never does. (The paper:
            50.)
        max_seconds: time budget. When it is over, the best so far is kept.
        memory_limit_bytes: most memory of the tables with their slots in each
            process, or None. Numbers of partitions with which the busiest
            owner has more are not tried. While a table moves, its old and its
            new parts take more for a moment.
        start: number of partitions to try first; by default the number of
            machines, or the next that `memory_limit_bytes` allows.
        per_table: whether each table without a `partition_group` is searched
            by itself.
        path: a JSON file, or None. The choice is saved there, and the next run
            takes it without searching, if it has the same tables, optimizer
            and processes.
        verbose: 0, or 1 to print a line for each sample, and one that
            explains the choice, on rank 0.

    Attributes:
        result: dict from a group's name ("tables", for those without one) to
            its `ks.planning.PartitionChoice`: the number of partitions, the
            samples, and the fit. Empty until the first group is done.

    Raises:
        ValueError: if an argument has another type or value; in `fit`, if it
            has several of these callbacks, or if the tables need more than
            `memory_limit_bytes` with any number of partitions.
        OSError: in `fit`, on every rank, if rank 0 cannot write to the folder
            of `path`.

    Example:

    >>> import keras, keras_sparsity as ks
    >>> strategy = ks.HybridStrategy()
    >>> model = keras.Sequential([
    ...     keras.Input((3,)), ks.layers.ShardedEmbedding(100, 8)])
    >>> with strategy.scope():
    ...     model.compile("adagrad", loss="mse")
    >>> search = ks.callbacks.PartitionSearch()
    >>> x, y = keras.ops.ones([4, 3]), keras.ops.ones([4, 3, 8])
    >>> history = model.fit(x, y, verbose=0, callbacks=[search])
    PartitionSearch: nothing to search, the model trains in one process.

    References:
        EuroSys 3.2.
    """

    def __init__(
        self,
        num_steps=100,
        num_warm_up_steps=5,
        max_seconds=300,
        memory_limit_bytes=None,
        start=None,
        per_table=False,
        path=None,
        verbose=1,
    ):
        super().__init__()
        checks.positive_integer("num_steps", num_steps)
        checks.check(
            checks.is_integer(num_warm_up_steps) and num_warm_up_steps >= 0,
            "num_warm_up_steps",
            num_warm_up_steps,
            "an integer that is not negative",
        )
        checks.positive_number("max_seconds", max_seconds)
        if memory_limit_bytes is not None:
            checks.positive_integer(
                "memory_limit_bytes", memory_limit_bytes, ", or None"
            )
        if start is not None:
            checks.num_partitions(
                "start", start, ", or None for the number of machines"
            )
        checks.boolean("per_table", per_table)
        if path is not None:
            checks.path("path", path, "None or the path of a file")
        is_flag = isinstance(verbose, (bool, int)) and verbose in (0, 1)
        checks.check(is_flag, "verbose", verbose, "0 or 1")
        self.num_steps = num_steps
        self.num_warm_up_steps = int(num_warm_up_steps)
        self.max_seconds = max_seconds
        self.memory_limit_bytes = memory_limit_bytes
        self.start = start
        self.per_table = per_table
        self.path = None if path is None else os.fspath(path)
        self.verbose = verbose
        self.result = {}
        self.step_end = StepEnd()
        self._epoch_steps = EpochSteps(self)
        self._tables, self._rule, self._collectives = [], None, None
        self._groups = []  # those still to be searched, the present one first
        # The `StepSeconds` of the present one, and its number of partitions.
        self._sample = self._sampled_count = None
        self._seconds_before = 0.0

    @property
    def is_searching(self):
        """Whether a `fit` with it would still try numbers of partitions."""
        return bool(self._groups)

    # Called by Keras.

    def on_train_begin(self, logs=None):
        strategy = getattr(self.model, "distribute_strategy", None)
        self._collectives = getattr(strategy, "collectives", None)
        self._fit_start = time.monotonic()
        self._next()
        if not self._tables:
            self._say(f"nothing to search, {self._why_nothing()}.")

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch_steps.begin()

    def on_train_batch_begin(self, batch, logs=None):
        self._step_start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        num_steps = self._epoch_steps.add_execution()
        if self._sample is None:
            return
        seconds = self.step_end.seconds - self._step_start
        known = self._sample.add(seconds, num_steps)
        if known is not None:
            self._record(*known)
        if known is not None or self._sample.is_late:
            self._next()

    def _record(self, seconds, error_seconds):
        group, count = self._groups[0], self._sampled_count
        group.sampler.record(count, seconds, error_seconds)
        self._say(
            f"{count} partitions for '{group.name}': "
            f"{1e3 * seconds:.4g} ms a step (+- {1e3 * error_seconds:.2g})."
        )

    def on_train_end(self, logs=None):
        self.end()

    def end(self):
        """As training does; an `ArchitectureLogger` needs the result before."""
        if self._sample is None:
            return
        self._sample = None
        self._seconds_before = self._elapsed()
        self._keep_best("training ended")

    # The search.

    def _begin(self):
        """Sets a search up for the present tables."""
        self.result = {}
        self._seconds_before = 0.0
        # Of rank 0, whose local rank every machine has.
        num_machines = self._of_rank_zero(lambda: self._collectives.cross_size)
        num_servers = self._collectives.num_servers
        num_steps = cycles.steps_of(self.model)
        limit, slots = self.memory_limit_bytes, saving.with_slots(self.model)
        self._memory = TableMemory(self._tables, slots, limit)
        self._groups = groups_of(
            self._tables,
            self._memory,
            self.start or num_machines,
            self.per_table,
        )
        self._conditions = {
            "processes": self._collectives.size,
            "machines": num_machines,
            "engine": self._collectives.engine,
            "optimizer": saved_partitions.described(self.model.optimizer),
            **({"servers": num_servers} if num_servers else {}),
            **({"steps of an update": num_steps} if num_steps > 1 else {}),
            **{
                f"table '{table.owner_name}'": (
                    f"{table.num_rows} x {table.dim} "
                    f"{table.variable.dtype} in group '{group.name}'"
                )
                for group in self._groups
                for table in group.tables
            },
        }
        self._num_groups = len(self._groups)
        if self.path is not None and self._take_saved():
            self._groups = []

    def _next(self):
        """Begins the next sample, or keeps the fastest number."""
        self._sample = None
        tables = [t for t in saving.tables_of(self.model) if t.is_sharded]
        rule = tables and _rule_of(self.model)
        if (tables, rule) != (self._tables, self._rule):
            # Another model or optimizer, or some tables have become dense.
            self._tables, self._rule, self._groups = tables, rule, []
            if tables:
                self._begin()
        if not self._groups:
            return
        while self._groups:
            group = self._groups[0]
            elapsed, count = self._of_rank_zero(
                lambda group=group: (self._elapsed(), group.sampler.proposal())
            )
            left = self.max_seconds - elapsed
            if left <= 0:
                self._keep_best(f"{self.max_seconds} seconds ended")
                self._groups = []
            elif count is None:
                self._keep(group)
                del self._groups[0]
            else:
                self._move(group.counts(count))
                self._sampled_count = count
                self._sample = StepSeconds(
                    self._collectives,
                    self.num_steps,
                    self.num_warm_up_steps,
                    left / self._num_samples_left(),
                    cycles.steps_of(self.model),
                    left,
                )
                return
        self._save()

    def _num_samples_left(self):
        taken = len(self._groups[0].sampler.samples)
        return MAX_SAMPLES * len(self._groups) - taken

    def _keep(self, group):
        choice = group.sampler.choice()
        count = self._of_rank_zero(lambda: choice.num_partitions)
        choice = dataclasses.replace(choice, num_partitions=count)
        self._move(group.counts(count))
        self.result[group.name] = choice
        self._say(f"'{group.name}' gets {choice.explained()}.")

    def _keep_best(self, why):
        """Ends a search that is not complete."""
        self._say(f"{why} before the search did; the best so far is kept.")
        for group in self._groups:
            if group.sampler.samples:
                self._keep(group)
            else:
                self._move(group.first)
                self._say(
                    f"'{group.name}' stays as it was: no sample was complete."
                )

    def _move(self, counts):
        moves.repartition(self.model, counts)

    # The file.

    def _take_saved(self):
        """Whether the file has a choice that can be taken."""

        def load():
            if self._collectives.rank != 0:
                return None
            folder = os.path.dirname(os.path.abspath(self.path))
            os.makedirs(folder, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(f"the folder {folder} is read-only")
            names = [group.name for group in self._groups]
            return saved_partitions.load(self.path, self._conditions, names)

        choices, reason = storage.on_all_ranks(
            self._collectives, f"keep a choice in {self.path}", load
        )[0]
        counts = {}
        if choices is not None:
            for group in self._groups:
                count = choices[group.name].num_partitions
                counts.update(group.counts(count))
            if not self._memory.allows(counts):
                reason = (
                    "with its choice a process would have more of the tables "
                    f"than {self.memory_limit_bytes} bytes"
                )
        if reason is not None:
            self._say(f"searching; {self.path} is not taken: {reason}.")
            return False
        self._move(counts)
        self.result = choices
        listed = ", ".join(
            f"{choice.num_partitions} partitions for '{name}'"
            for name, choice in choices.items()
        )
        self._say(f"{listed}, as found before (in {self.path}).")
        return True

    def _save(self):
        is_complete = len(self.result) == self._num_groups
        is_writer = self.path is not None and self._collectives.rank == 0
        if not (is_complete and is_writer):
            return
        try:
            saved_partitions.save(self.path, self._conditions, self.result)
        except OSError as error:  # training is worth more
            self._say(f"the choice could not be saved: {error}.")

    # The ranks' agreements, and their lines.

    def _of_rank_zero(self, function):
        """The result of a function on rank 0, whose numbers decide.

        The same samples on another processor may give another fit.
        """
        value = function() if self._collectives.rank == 0 else None
        return self._collectives.gather_objects(
            value, name="partition_search/decision"
        )[0]

    def _elapsed(self):
        return self._seconds_before + time.monotonic() - self._fit_start

    def _why_nothing(self):
        if self._collectives is None:
            return "the model was not compiled in `strategy.scope()`"
        if self._collectives.size == 1:
            return "the model trains in one process"
        return "the model has no sharded table"

    def _say(self, text):
        is_first = self._collectives is None or self._collectives.rank == 0
        if self.verbose and is_first:
            rank_zero.say(f"PartitionSearch: {text}")


def _rule_of(model):
    """An optimizer, as far as a search's times and memory depend on it."""
    num_slots = sum(len(each.places()) for each in saving.with_slots(model))
    return (
        saved_partitions.described(model.optimizer),
        cycles.steps_of(model),
        num_slots,
    )


def arranged(callbacks, size):
    """A `fit`'s callbacks, in an order in which a search times the steps only.

    Its clock stops before other callbacks see a step's end, and starts after
    they have seen its beginning.
    """
    searches = [c for c in callbacks if isinstance(c, PartitionSearch)]
    if len(searches) > 1:
        raise ValueError(
            "Give `fit` one PartitionSearch. Received: "
            f"{len(searches)}. It searches for all tables: see "
            "`partition_group`."
        )
    for search in searches:
        # In one process it does nothing: Keras need not wait for it.
        search.async_safe = size == 1
        others = [c for c in callbacks if c is not search]
        clock = [search.step_end] if size > 1 else []
        callbacks = [*clock, *others, search]
    return callbacks
