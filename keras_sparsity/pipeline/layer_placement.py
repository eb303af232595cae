"""`LayerPlacementStrategy`: heads on all workers, the tail on one or few."""

import contextlib
import dataclasses
import functools

import tensorflow as tf

from keras_sparsity._tf import checks, deferred_weights, patches
from keras_sparsity.board import measured_plan
from keras_sparsity.callbacks import rank_zero
from keras_sparsity.exchange.options import check_wire_dtype
from keras_sparsity.global_batch import random_states
from keras_sparsity.pipeline import columns
from keras_sparsity.pipeline.fan import fan
from keras_sparsity.pipeline.head_sums import HeadSums
from keras_sparsity.pipeline.links import peers
from keras_sparsity.pipeline.splits import Splits
from keras_sparsity.pipeline.staged import (
    StagedStrategy,
    start_without_servers,
)
from keras_sparsity.placement import choice
from keras_sparsity.placement.traffic import as_sent, running_cluster
from keras_sparsity.stages import measurements, model_facts
from keras_sparsity.stages.column_split import column_sizes
from keras_sparsity.stages.measurements import Measurable
from keras_sparsity.stages.schedule import Kind, Schedule, Task
from keras_sparsity.stages.split_costs import parts_of_ranks
from keras_sparsity.strategy import HybridStrategy
from keras_sparsity.tables.table_variable import TableVariable
from keras_sparsity.training import compiling


class LayerPlacementStrategy(StagedStrategy):
    """Layer placement: many parameters stay on one worker, activations travel.

    `compile` inside of its scope divides a functional or sequential model into
    a head and a tail. All processes but the last train the head, each on its
    part of a mini-batch; the last one alone holds the tail and trains it on
    all parts together. Activations travel to it and their gradients back;
    gradients of the head are summed over the workers by AllReduce, those of
    the tail travel nowhere. Weights are updated once a mini-batch: the result
    is that of one process. It pays where the last layers have most of the
    parameters, as in VGG and AlexNet. Every process reads whole batches, of
    which the workers use their parts. Logs are the same on all processes.

    Sharded tables (`ks.layers.ShardedEmbedding` and the like) are in the head.
    Each worker owns some of their rows: it pulls those of its part from their
    owners, pushes the gradients there, and updates its own. The tables of a
    `ks.layers.SampledSoftmax` are in the tail, of one worker, and whole on it:
    it draws the samples, and no row travels.

    Args:
        stages: where the model is divided, as for `ks.PipelineStrategy`: the
            name of the head's last layer in a list, or two lists of names.
            None: by `rule`.
        num_tail_workers: the number M of processes that train the tail, the
            last ones. Each has the parts of some of the workers, and the
            tail's gradients are summed over them by AllReduce. With more tail
            workers than workers each has a part of one worker's examples; let
            M then be a multiple of the number of workers, or these have parts
            of different sizes. Statistics of a batch in the tail are those of
            its own part, if the layer is not `synchronized`.
        tail_split: what several tail workers divide. `"batch"`: as above.
            `"columns"`: each has the whole batch, and of the widest `Dense`
            layers, where that saves bytes, computes and updates its columns
            alone; outputs are gathered, and gradients of inputs summed, in
            place of the kernels' gradients. None: whichever sends less on
            the busiest link, for `num_examples`.
        tail_batches: `"whole"`: a tail computes the parts of its workers as
            one batch. `"by_worker"`: one after the other, which holds the
            activations of one part at a time; statistics of a batch, and the
            sample of a `SampledSoftmax`, are then those of a part.
        head_gradients: `"allreduce"`: the workers sum the head's gradients by
            AllReduce. `"server"`, for comparison, as in the paper: each sends
            them to its tail worker, which sends back the sums; several
            workers then need as many as there are tail workers, or more. Rows
            of embeddings travel among the workers in both.
        rule: where the model is divided without `stages`. `"fastest"`: where
            the predicted step is shortest, as `ks.plan` predicts it, by the
            measured times of layers, updates and messages. `"published"`: by
            the paper's rule, by bytes, see "Layers on one worker". A model
            that gains nothing is left to data parallelism, by a
            `ks.HybridStrategy`.
        num_examples: the number of examples of a worker's part, for which both
            rules look.
        threshold: K; by the paper's rule, a model whose skewness is not below
            it gains nothing.
        wire_dtype: as for `ks.PipelineStrategy`; of tables' rows, too.
        engine, timeout: see `ks.HybridStrategy`.

    Attributes:
        collectives: `ks.collectives.Collectives` of all processes.
        rank, size: this process's number, and the number of processes.

    Raises:
        ValueError: if an argument is not valid, or no process is left for the
            head. By `compile`: as under `ks.PipelineStrategy`, but for sharded
            layers in the head, and a `SampledSoftmax` without `table` in the
            tail of one worker.

    Example:

    >>> import keras, numpy as np, keras_sparsity as ks
    >>> strategy = ks.LayerPlacementStrategy(["pool"])
    >>> model = keras.Sequential([
    ...     keras.Input((8, 8, 1)),
    ...     keras.layers.Conv2D(2, 3, activation="relu"),
    ...     keras.layers.MaxPooling2D(name="pool"),
    ...     keras.layers.Flatten(),
    ...     keras.layers.Dense(1),
    ... ])
    >>> with strategy.scope():
    ...     model.compile("adam", "mse")
    >>> x = np.ones((16, 8, 8, 1), "float32")
    >>> history = model.fit(x, x[:, 0, 0], batch_size=8, verbose=0)
    >>> list(history.history)
    ['loss']

    References:
        RALP (Park et al.): `head_gradients="server"`,
        `tail_batches="by_worker"`, one tail worker.
    """

    def __init__(
        self,
        stages=None,
        num_tail_workers=1,
        tail_batches="whole",
        head_gradients="allreduce",
        rule="fastest",
        num_examples=32,
        threshold=-0.5,
        wire_dtype=None,
        engine=None,
        timeout=None,
        tail_split=None,
    ):
        _check_tails(num_tail_workers, tail_batches, tail_split, head_gradients)
        _check_rule(rule, num_examples, threshold)
        check_wire_dtype(wire_dtype)
        self.num_tail_workers = num_tail_workers
        self.tail_batches, self.num_examples = tail_batches, num_examples
        self.head_gradients, self.tail_split = head_gradients, tail_split
        self.rule, self.threshold = rule, float(threshold)
        self._wire_dtype = wire_dtype
        self.options = dataclasses.replace(self.options, wire_dtype=wire_dtype)
        self._hybrid = None  # the strategy of models that gain nothing
        self._divides_columns = False  # of the model that was cut last
        communicator = start_without_servers(engine, timeout, self)
        self._splits = self._splits_among(communicator)
        if communicator.size == 1:
            super().__init__(communicator, communicator, (None, None), stages)
            self.stages = None  # One process trains the whole model.
            return
        first = self._splits.num_workers
        self._parts_of_ranks = parts_of_ranks(first, num_tail_workers)
        super().__init__(
            communicator,
            peers(communicator, (first, num_tail_workers)),
            fan(communicator, self._parts_of_ranks, wire_dtype),
            stages,
        )

    def _splits_among(self, communicator):
        size, num_tails = communicator.size, self.num_tail_workers
        if 1 < size <= num_tails:
            raise ValueError(
                "A worker must train the head. Received: "
                f"num_tail_workers={num_tails} and {size} processes; "
                f"expected: at most {size - 1}."
            )
        is_star = self.head_gradients == "server"
        if is_star and 1 < size - num_tails < num_tails:
            raise ValueError(
                'With head_gradients="server" each tail worker needs a worker '
                f"of its own. Received: num_tail_workers={num_tails} and "
                f"{size} processes; expected: at most {size // 2}, or "
                'head_gradients="allreduce".'
            )
        return Splits(
            self.rule,
            self.num_examples,
            self.threshold,
            "native" if size == 1 else communicator.engine,
            num_workers=max(1, size - num_tails),
            num_tails=min(num_tails, size - 1),
            is_star=is_star,
            tail_split="batch" if self._by_worker else self.tail_split,
            is_by_worker=self._by_worker,
        )

    spreads_tables = True

    @contextlib.contextmanager
    def scope(self):
        """Context in which `model.compile` divides a model.

        A model that gains nothing is trained by a `ks.HybridStrategy`.

        Yields:
            The strategy.
        """
        # TensorFlow's own scope of this strategy would not let that one run.
        adopting = patches.models_compile_by(self.adopt)
        with adopting, deferred_weights.deferring():
            yield self

    def adopt(self, stock, model, args, kwargs):
        known = getattr(model, "distribute_strategy", None)
        if self._hybrid is None or known is not self._hybrid:
            try:
                with tf.distribute.Strategy.scope(self):  # for its slots
                    super().adopt(stock, model, args, kwargs)
                return
            except _NoGain as no_gain:
                (whole,) = no_gain.args
                if self.rank == 0:
                    rank_zero.say(
                        "LayerPlacementStrategy leaves the model "
                        f"'{model.name}' to data parallelism: "
                        f"{self._splits.why_none(whole)}."
                    )
                plan = functools.partial(self._splits.plan, whole, None)
                object.__setattr__(model, measured_plan.OF_STAGES, plan)
        if self._hybrid is None:
            self._hybrid = HybridStrategy(wire_dtype=self._wire_dtype)
        with choice.entering(self._hybrid.placements):
            deferred_weights.initialize(model.weights)
        compiling.compile_adopted(stock, model, args, kwargs, self._hybrid)

    @property
    def is_flushed(self):
        return True

    @property
    def stages_of_ranks(self):
        if self.size == 1:
            return (0,)
        num_tails = self.num_tail_workers
        return (*([0] * (self.size - num_tails)), *([1] * num_tails))

    def profile(self, cutter, optimizer):
        return Measurable(cutter, lambda: self._measured(cutter, optimizer))

    def _measured(self, cutter, optimizer):
        number = self._splits.num_batch_examples
        # As data parallelism sends them.
        part = max(1, number // self.size)
        specs = model_facts.variable_specs(cutter, num_examples=part)
        found = measurements.measured(
            cutter,
            number,
            optimizer,
            running_cluster(self.collectives),
            self.collectives,
            specs=[as_sent(spec, self.options) for spec in specs],
            wire_dtype=self._wire_dtype,
        )
        if self.tail_split != "columns":
            return found
        asked = column_sizes(cutter.calls, optimizer, is_asked=True)
        return found.with_columns(asked)

    def found_places(self, cutter, profile):
        if self.size == 1:
            return []
        place = self._splits.place(profile)
        if place is None:
            raise _NoGain(profile)
        return [place]

    def plan_function(self, model, stage, passes, profile):
        chosen = None
        if self.size > 1:
            own = len(stage.part.names)
            others = len(profile.cutter.calls) - own
            chosen = (others if stage.is_last else own) - 1
        return functools.partial(self._splits.plan, profile, chosen)

    @property
    def _by_worker(self):
        return self.tail_batches == "by_worker"

    def check_columns(self, parts, optimizer):
        if self.tail_split == "columns" and self._splits.num_tails > 1:
            self._to_divide(parts, optimizer)

    def _to_divide(self, parts, optimizer):
        return columns.to_divide(
            parts[1].model,
            optimizer,
            self._splits.num_batch_examples,
            self.tail_split == "columns",
        )

    def divide_columns(self, stage, parts, profile, optimizer):
        splits, self._divides_columns = self._splits, False
        if splits.num_tails < 2 or splits.tail_split == "batch":
            return
        layers, place = self._to_divide(parts, optimizer), len(parts[0].names)
        if not splits.divides_columns(profile, place - 1):
            layers = []
        self._divides_columns = bool(layers)  # each has whole batches then
        random_states.share(parts[1].model.variables, bool(layers))
        if stage.is_last and layers:
            stage.columns = columns.Columns(layers, optimizer, self.peers)
            parts = self._parts_of_ranks[splits.num_workers :]
            stage.before = stage.before.shared(self.peers, parts)

    def head_sums(self, parts):
        weights = parts[0].model.trainable_variables
        has_dense = not all(isinstance(v, TableVariable) for v in weights)
        is_server = self._splits.is_star and self._splits.num_workers > 1
        if not (is_server and has_dense):
            return None
        before, behind = self.links
        return HeadSums(
            (before or behind).pairs,
            self.peers if before else None,
            [v.dtype for v in weights],
        )

    def computes_whole(self, stage):
        is_alone = self._splits.num_tails == 1 and not self._by_worker
        return stage > 0 and (is_alone or self._divides_columns)

    def passes(self, stage, optimizer, is_whole):
        del optimizer, is_whole
        if self.size == 1:
            return Schedule(1, (_in_turn([0]),)), None
        own = self._parts_of_ranks[self.rank]
        number = self._parts_of_ranks[-1].stop
        if not stage.is_last:
            tasks = _in_turn([own if len(own) > 1 else own.start]), ()
        else:
            if stage.columns is not None:
                own = range(number)
            is_whole = self.tail_batches == "whole"
            tasks = (), _in_turn([own] if is_whole else own)
        # Of the other stage it knows nothing.
        return Schedule(number, tasks), None


class _NoGain(Exception):
    """A model, as its `Measurable`, that its rule does not divide."""


def _in_turn(batches):
    """Each micro-batch's forward and backward pass."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return tuple(Task(kind, batch) for batch in batches for kind in kinds)


def _check_tails(num_tail_workers, tail_batches, tail_split, head_gradients):
    checks.positive_integer("num_tail_workers", num_tail_workers)
    checks.one_of("tail_batches", tail_batches, ("whole", "by_worker"))
    checks.one_of("head_gradients", head_gradients, ("allreduce", "server"))
    if tail_split is not None:
        known = ("batch", "columns")
        checks.one_of("tail_split", tail_split, known, " or None")
    if tail_split == "columns" and tail_batches == "by_worker":
        raise ValueError(
            "Tail workers that divide columns compute whole batches. "
            'Received: tail_split="columns" and tail_batches="by_worker". '
            'Use tail_batches="whole", or tail_split="batch".'
        )


def _check_rule(rule, num_examples, threshold):
    checks.one_of("rule", rule, ("published", "fastest"))
    checks.positive_integer("num_examples", num_examples)
    is_number = checks.is_number(threshold)
    checks.check(is_number, "threshold", threshold, "a number")
