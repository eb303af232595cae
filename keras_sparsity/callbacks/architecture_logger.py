"""Shows in TensorBoard how each variable travels, and its cost."""

import collections
import dataclasses
import os
import time

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity import sparsity
from keras_sparsity._tf import checks
from keras_sparsity.board import model_plan, search_plot
from keras_sparsity.board.written_plan import PLAN, RUN
from keras_sparsity.callbacks.epoch_steps import EpochSteps
from keras_sparsity.callbacks.partition_search import PartitionSearch
from keras_sparsity.health import journal
from keras_sparsity.health.journal import UPDATE
from keras_sparsity.health.meter import Totals
from keras_sparsity.placement import server_sums
from keras_sparsity.placement.gathered import AllGather
from keras_sparsity.placement.mirrored import AllReduce

_MOST_ROWS = 100_000


class ArchitectureLogger(keras.callbacks.Callback):
    """Writes how each variable travels, and its cost, for TensorBoard.

    - `plan` (text): a table of all variables: shape, size, alpha,
      architecture, partitions, balance of owners, the bytes of a step under
      each architecture, and the bytes counted. Written again when the
      architecture or partitions of a variable change, and at the end.
    - `alpha/...` (scalars): of each sparse variable, and of the model.
    - `bytes/...`: bytes sent and received in a step on each path: `pull` and
      `push` of rows between ranks and owners, `allreduce` of dense gradients,
      `allgather` of row gradients of ordinary embeddings, `machine` between
      the processes of one machine, and `other` messages; the mean over the
      processes.
    - `seconds/...`: time of a whole `step`, of its `update`, and of each path,
      from the moment at which the last process has the path's inputs. `stall`
      is the time that the other processes wait for this moment. Messages of
      several tables overlap.
    - `rows/...` (histograms, with each new plan and after each epoch): touches
      of each row in the sampled steps, as powers of two, without rows that
      were never touched; `owners/...`: the share of touches that each owner
      served.
    - `search/...`: the samples of a `ks.callbacks.PartitionSearch`, as scalars
      over the number of partitions, and as a plot with the fitted curve and
      the choice.

    In asynchronous training with a bound it writes the figures of each epoch
    instead: `plan` is a table of workers and servers;
    `staleness/...` how many updates had come between a pull and its push (a
    histogram of all pushes, their mean and largest), `version` the number of
    updates so far, `steps/...` and `waiting seconds/...` of each worker, and
    `server .../...` each server's updates and the bytes that workers pulled
    from it and pushed to it.

    Rank 0 alone writes, figures of all processes. `keras-sparsity plan
    LOG_DIR` and `keras-sparsity report LOG_DIR` print them on a terminal.

    Needs TensorBoard, and Matplotlib for the plot:
    `pip install tensorboard matplotlib`.

    Args:
        log_dir: folder, as for `keras.callbacks.TensorBoard`, which can have
            the same.
        every_steps: number of steps after which scalars are written; they are
            means over these steps.

    Raises:
        ImportError: if TensorBoard or Matplotlib is missing.

    Example:

    >>> import tempfile
    >>> logger = ArchitectureLogger(tempfile.mkdtemp(), every_steps=50)

    References:
        EuroSys 3.1 (architectures, alpha), 3.2 (the search).
    """

    def __init__(self, log_dir, every_steps=100):
        super().__init__()
        checks.path("log_dir", log_dir, "the path of a folder")
        search_plot.check_installed()
        self.log_dir = os.fspath(log_dir)
        self.every_steps = checks.positive_integer("every_steps", every_steps)
        self.searches = []
        self._epoch_steps = EpochSteps(self)
        self._writer = None
        self._measured_function = None

    def see(self, callbacks):
        """Takes those of a `fit` whose findings it is to show."""
        self.searches = [c for c in callbacks if isinstance(c, PartitionSearch)]

    # Called by Keras.

    def on_train_begin(self, logs=None):
        strategy = getattr(self.model, "distribute_strategy", None)
        self._collectives = getattr(strategy, "collectives", None)
        if self._collectives is None:
            raise ValueError(
                "ArchitectureLogger shows models that were compiled inside of "
                "`strategy.scope()`, with `strategy = ks.HybridStrategy()`. "
                f"Received: the model '{self.model.name}'."
            )
        if self._collectives.rank == 0:
            self._writer = tf.summary.create_file_writer(
                os.path.join(self.log_dir, RUN)
            )
        self._has_steps = getattr(strategy, "epoch_figures", None) is None
        if self._has_steps:
            self._measure()
        # Others may have been trained before.
        before = journal.current().totals()
        self._before = collections.defaultdict(Totals, before)
        self._steps = self._steps_since = 0
        self._seconds = 0.0
        self._plan = self._decisions = None
        self._popularity_step = None
        self._shown = {}

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch_steps.begin()

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._seconds += time.perf_counter() - self._start
        count = self._epoch_steps.add_execution()
        self._steps += count
        self._steps_since += count * self._has_steps
        if self._steps_since >= self.every_steps:
            self._log()

    def on_epoch_end(self, epoch, logs=None):
        if self._has_steps:
            self._log_popularity()
        elif self._writer is not None:
            figures = self.model.distribute_strategy.epoch_figures
            with self._writer.as_default(step=figures.version):
                figures.write_summaries()
            self._writer.flush()

    def on_train_end(self, logs=None):
        if self._steps_since:
            self._log()
        journal.current().measures = False
        for search in self.searches:
            search.end()  # Else it would, behind this callback.
        if self._writer is not None:
            if self._plan is not None:
                with self._writing():
                    self._log_searches()
                    plan = _with_partitions(self._plan, self.model)
                    tf.summary.text(PLAN, plan.markdown())
            self._writer.close()

    # Measuring.

    def _measure(self):
        """Functions traced from now on measure; the step is traced anew."""
        journal.current().measures = True
        function = self.model.train_function
        if function is not None and function is not self._measured_function:
            self._measured_function = self.model.make_train_function(force=True)

    def _since_last(self):
        """dict from a call's role to this rank's `Totals` since the last."""
        since = collections.defaultdict(Totals)
        found = journal.current().totals()
        # Others evaluate and predict.
        of_steps = {scope for role, scope in found if role == UPDATE}
        for key, totals in found.items():
            role, scope = key
            if scope in of_steps and totals != self._before[key]:
                role = role.removeprefix("across/")
                since[role] += totals - self._before[key]
            self._before[key] = totals
        return dict(since)

    # Writing.

    def _log(self):
        plan = model_plan.of_running(self.model)
        mine = {role: t.to_list() for role, t in self._since_last().items()}
        of_ranks = self._collectives.gather_objects(
            (mine, self._seconds), name="architecture_logger/totals"
        )
        is_new = self._is_new(plan)
        if self._writer is not None:
            totals = _of_a_step([t for t, _ in of_ranks], self._steps_since)
            seconds = max(seconds for _, seconds in of_ranks)
            figures = {
                "seconds/step": seconds / self._steps_since,
                **_figures(totals),
            }
            self._plan = plan = _with_measured(plan, self.model, totals)
            with self._writing():
                for name, value in figures.items():
                    tf.summary.scalar(name, value)
                for variable in plan.variables:
                    facts = variable.sparsity
                    if facts.alpha is not None:
                        tf.summary.scalar(f"alpha/{facts.name}", facts.alpha)
                tf.summary.scalar("alpha/of the model", plan.alpha_model)
                if is_new:
                    tf.summary.text(PLAN, plan.markdown())
                self._log_searches()
        if is_new:
            self._log_popularity()
        if self._writer is not None:
            self._writer.flush()
        self._steps_since, self._seconds = 0, 0.0

    def _writing(self):
        return self._writer.as_default(step=self._steps)

    def _is_new(self, plan):
        """Whether it has other decisions than the last; alike on all ranks."""
        before, self._decisions = (
            self._decisions,
            [
                (v.architecture, v.num_partitions, v.sparsity.alpha is None)
                for v in plan.variables
            ],
        )
        return self._decisions != before

    def _log_searches(self):
        for search in self.searches:
            for name, choice in search.result.items():
                if self._shown.get(name) is choice:
                    continue
                self._shown[name] = choice
                for count, seconds in sorted(choice.sampled_seconds.items()):
                    tf.summary.scalar(
                        f"search/{name}/seconds by partitions",
                        seconds,
                        step=count,
                    )
                tf.summary.image(
                    f"search/{name}/samples and fit",
                    search_plot.image(name, choice),
                )
                tf.summary.text(f"search/{name}/choice", choice.explained())

    def _log_popularity(self):
        if self._popularity_step == self._steps:
            return
        self._popularity_step = self._steps
        popularity = sparsity.popularity(self.model)
        measured = sparsity.measured(self.model)
        if self._writer is None:
            return
        with self._writing():
            for name, (touches, num_rows) in popularity.items():
                # Most rows are never touched, and a few are all the time: as
                # they are, all that is seen is a line at zero.
                is_touched = touches > 0
                touches, num_rows = touches[is_touched], num_rows[is_touched]
                # Of a large table a part of the rows: the shape is the same.
                share = min(1.0, _MOST_ROWS / max(1, num_rows.sum()))
                num_rows = np.ceil(num_rows * share).astype(np.int64)
                tf.summary.histogram(
                    f"rows/{name}/log2 of touches",
                    np.repeat(np.log2(touches), num_rows),
                )
            for facts in measured:
                if facts.owner_shares:
                    tf.summary.histogram(
                        f"owners/{facts.name}/share of touches",
                        facts.owner_shares,
                    )


def _with_partitions(plan, model):
    """The plan, with the numbers that tables of rows have now.

    A table that has just moved has no measurements: those before stay.
    """
    variables = [
        dataclasses.replace(planned, num_partitions=layout.num_partitions)
        if layout is not None
        else planned
        for planned, layout in (
            (planned, getattr(getattr(v, "table", None), "layout", None))
            for planned, v in zip(
                plan.variables, model.trainable_variables, strict=True
            )
        )
    ]
    return dataclasses.replace(plan, variables=tuple(variables))


def _of_a_step(of_ranks, num_steps):
    """The ranks' counts, of one step: list of dicts from roles to arrays.

    A function that was traced anew, for a search or a move, takes its
    counts with it as soon as Python forgets it: each rank has counts of steps
    of its own number.
    """
    known = [(totals, totals.get(UPDATE, [0])[0]) for totals in of_ranks]
    known = [(totals, steps) for totals, steps in known if steps]
    return [
        {role: np.array(total) / steps for role, total in totals.items()}
        for totals, steps in known
        or [(totals, num_steps) for totals in of_ranks]
    ]


def _figures(of_ranks):
    """The scalars: dict from their names to values, of one step."""
    roles = {role for totals in of_ranks for role in totals}
    figures = collections.defaultdict(float)
    for role in roles:
        path = path_of(role)
        _, seconds, sent, received = np.transpose(
            [totals.get(role, np.zeros(4)) for totals in of_ranks]
        )
        if path == "update":
            figures["seconds/update"] += seconds.mean()
            continue
        # The last to come has not waited.
        figures[f"seconds/{path}"] += seconds.min()
        figures["seconds/stall"] += seconds.mean() - seconds.min()
        figures[f"bytes/{path}/sent"] += sent.mean()
        figures[f"bytes/{path}/received"] += received.mean()
    return dict(sorted(figures.items()))


def path_of(role):
    """The path of a call's role."""
    if role.startswith(("table/", "tables/")):
        for path in ("pull", "push"):
            if f"/{path}/" in role:
                return path
    if role.startswith("machine/"):
        return "machine"
    if role.startswith(AllGather.role):
        return "allgather"
    if role.startswith(server_sums.ROLE):
        return "pull" if role.endswith("pull") else "push"
    if role.startswith(AllReduce.role):
        return "allreduce"
    return "update" if role == UPDATE else "other"


def _with_measured(plan, model, of_ranks):
    """The plan, with the bytes that were counted for each variable."""
    if not any(of_ranks):
        return plan  # Eager steps are not measured.
    counted = collections.Counter()
    for totals in of_ranks:
        for role, (_, _, sent, received) in totals.items():
            counted[role] += (sent + received) / len(of_ranks)
    placements = model.distribute_strategy.placements
    starts, sizes = [], []
    for planned, variable in zip(
        plan.variables, model.trainable_variables, strict=True
    ):
        facts = planned.sparsity
        is_of_rows = facts.alpha is not None
        reducer = placements.of(variable).reducers[is_of_rows]
        share = 1.0 if reducer.makes_dense else facts.alpha or 1.0
        starts.append(reducer.role_of(variable))
        sizes.append(facts.spec().num_bytes() * share)
    together = collections.Counter()
    for start, size in zip(starts, sizes, strict=True):
        together[start] += size
    measured = []
    for planned, start, size in zip(plan.variables, starts, sizes, strict=True):
        num_bytes = sum(
            n for role, n in counted.items() if role.startswith(start)
        )
        # Of those in one message each has its share.
        num_bytes *= size / together[start]
        measured.append(dataclasses.replace(planned, measured_bytes=num_bytes))
    return dataclasses.replace(plan, variables=tuple(measured))
