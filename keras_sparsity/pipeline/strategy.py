"""`PipelineStrategy`: each process trains one stage of a model."""

import math

from keras_sparsity._tf import checks
from keras_sparsity.exchange.options import check_wire_dtype
from keras_sparsity.pipeline import cuts, versions
from keras_sparsity.pipeline.fan import between, own_pieces
from keras_sparsity.pipeline.links import peers
from keras_sparsity.pipeline.memory import Limit
from keras_sparsity.pipeline.planning import Planner
from keras_sparsity.pipeline.staged import (
    StagedStrategy,
    start_without_servers,
)
from keras_sparsity.stages import schedule as schedules
from keras_sparsity.stages.schedule import FLUSHED
from keras_sparsity.stages.simulation import simulate
from keras_sparsity.stages.turns import Turns

_NUM_MICRO_BATCHES = 4
SCHEDULES = ("spectrain", "vanilla", "stash", *FLUSHED)


class PipelineStrategy(StagedStrategy):
    """Pipelined model parallelism: each process trains one stage of a model.

    `compile` inside of its scope cuts a functional or sequential model into
    as many stages as there are processes, or with `replicas` as there are
    processes for each. If there are more processes than stages, several of
    them share the mini-batches of the slowest stages. A process holds the
    weights and optimizer slots of its stage alone; activations and their
    gradients travel between neighbours. Every process reads whole batches:
    inputs are used by the stages that take them, labels by the last one. Logs
    are the same on all processes.

    Args:
        schedule: the order of forward and backward passes.
            `"spectrain"`: each pass of a mini-batch with weights that are
            predicted from the optimizer's smoothed gradients.
            `"vanilla"`: each pass with the weights of its moment.
            `"stash"`: the backward pass with the weights of the forward pass,
            of which N - k copies are held at stage k of N; of an `Embedding`
            the rows that were looked up.
            In these three, several mini-batches are in flight, and the logs
            of a batch come N - 1 batches late (0 at first); those of an
            epoch are exact.
            `"1f1b"`, `"gpipe"`: micro-batches of one mini-batch, and an update
            when all have come back: the result of one process that accumulates
            their gradients, weighted by examples. `"gpipe"` holds the
            activations of all micro-batches, `"1f1b"` at stage k those of
            N - k.
        stages: where the model is cut. None, or the number N of stages: so
            that the slowest stage or message is as fast as can be, by the
            layers' times, which rank 0 measures, and those of the links. None:
            as many stages as processes, or as the model can be cut into. Or a
            list of the names of the layers after which the model is cut, or a
            list of the layers' names for each stage, which may leave out
            operations such as those of masks; of a model within the model
            `"encoder/dense"`.
        num_micro_batches: the number M of parts of a pipeline's part of a
            mini-batch, which are computed one after the other. Messages of one
            travel while the next is computed. None: 4 for `"1f1b"`, `"gpipe"`,
            `evaluate` and `predict`, and 1 for training by the others; more of
            them can be faster where messages take as long as computation. A
            model with an input of a fixed batch size, or with a stateful
            layer, needs 1, which `evaluate` and `predict` then use, too.
        prediction: for `"spectrain"`, the weights that are predicted.
            `"paper"`: those when the mini-batch's round trip ends.
            `"sequential"`: those after the updates of all earlier
            mini-batches, as sequential training would have.
        decay: for `"spectrain"`, gamma of equation 1, for optimizers without
            a first moment.
        wire_dtype: `"bfloat16"` or `"float16"`: activations and their gradients
            travel in 16 bits. None: in their own dtype.
        replicas: the number R of pipelines side by side, each of N stages on N
            consecutive processes; N x R is the number of processes. Each
            trains on its part of every mini-batch. A stage's gradients are
            summed over its R processes by AllReduce, those of rows that an
            `Embedding` looks up by AllGather. Of one pipeline, with fewer
            stages than processes, the others share the mini-batches
            of the slowest stages, by the measured times; the first model that
            is compiled decides. Or a list of N numbers, whose sum is that of
            the processes: so many share the mini-batches of each stage.
        memory_bytes: the most bytes that a stage may hold by the plan: weights,
            gradients, slots, copies of weights, and layers' outputs, see
            `ks.plan`. A model whose stage exceeds it is an error of `compile`,
            or of the first step if that is due to the layers' outputs. None:
            any number.
        messages_ahead: whether, in the schedules without a flush, each message
            travels during a whole step of its own: the one before computes it,
            the one after uses it. A step then takes as long as the slowest
            stage's passes or message, rather than as both together; stage k
            has 4 (N - 1 - k) + 1 mini-batches in flight in place of N - k: as
            many updates more are missed or predicted, copies of `"stash"`
            held, and logs are 4 (N - 1) batches late.
        engine, timeout: see `ks.HybridStrategy`.

    Attributes:
        collectives: `ks.collectives.Collectives` of all processes.
        rank, size: this process's number, and the number of processes.

    Raises:
        ValueError: if an argument is not valid, or the processes are not as
            many as `stages` and `replicas` say; see also `ks.HybridStrategy`.
            By `compile`: if the model is a subclass, has sharded layers, sparse
            inputs or fewer layers than stages, if a layer's weights are used on
            both sides of a cut, or if, without a flush, the optimizer needs a
            number of all stages (`global_clipnorm`, loss scaling), if a stage
            exceeds `memory_bytes`, if mini-batches are divided that an input of
            a fixed batch size, a stateful layer or one that computes with pairs
            of examples takes whole, or if another model in stages has some of
            the weights on other processes. By training: if `trainable` of a
            layer has changed since `compile`.
        tf.errors.InvalidArgumentError: in the first step, on every rank, if a
            stage exceeds `memory_bytes` by the layers' outputs.

    Example:

    >>> import keras, numpy as np, keras_sparsity as ks
    >>> strategy = ks.PipelineStrategy("1f1b", num_micro_batches=2)
    >>> model = keras.Sequential([
    ...     keras.Input((4,)),
    ...     keras.layers.Dense(8, activation="relu"),
    ...     keras.layers.Dense(1),
    ... ])
    >>> with strategy.scope():
    ...     model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    >>> x = np.ones((16, 4), "float32")
    >>> history = model.fit(x, x[:, :1], batch_size=8, verbose=0)
    >>> list(history.history)
    ['loss']

    References:
        SpecTrain (arXiv:1809.02839); PipeDream (arXiv:1806.03377), 3;
        GPipe (arXiv:1811.06965), 2.3.
    """

    def __init__(
        self,
        schedule="spectrain",
        stages=None,
        num_micro_batches=None,
        prediction="paper",
        decay=0.9,
        wire_dtype=None,
        replicas=1,
        memory_bytes=None,
        messages_ahead=False,
        engine=None,
        timeout=None,
    ):
        checks.one_of("schedule", schedule, SCHEDULES)
        checks.one_of("prediction", prediction, ("paper", "sequential"))
        if num_micro_batches is not None:
            checks.positive_integer(
                "num_micro_batches", num_micro_batches, " or None"
            )
        if memory_bytes is not None:
            checks.positive_integer("memory_bytes", memory_bytes, " or None")
        checks.check(
            checks.is_number(decay) and 0 <= decay < 1,
            "decay",
            decay,
            "a number from 0 to below 1",
        )
        if schedule != "spectrain" and (prediction, decay) != ("paper", 0.9):
            raise ValueError(
                '`prediction` and `decay` are of "spectrain" alone, which '
                f"predicts weights. Received: schedule={schedule!r}, "
                f"prediction={prediction!r} and decay={decay}. Leave them out, "
                'or choose schedule="spectrain".'
            )
        check_wire_dtype(wire_dtype)
        checks.boolean("messages_ahead", messages_ahead)
        if messages_ahead and schedule in FLUSHED:
            raise ValueError(
                "A schedule with a flush waits for all micro-batches, so that "
                "no message can travel while the next mini-batch is computed. "
                f"Received: schedule={schedule!r} and messages_ahead=True. "
                'Choose "spectrain", "vanilla" or "stash", or more '
                "`num_micro_batches`."
            )
        self.messages_ahead = messages_ahead
        self.schedule, self.asked_micro_batches = schedule, num_micro_batches
        self._num_of_flushed = num_micro_batches or _NUM_MICRO_BATCHES
        self.num_micro_batches = num_micro_batches or 1
        if self.is_flushed:
            self.num_micro_batches = self._num_of_flushed
        self.prediction, self.decay = prediction, float(decay)
        self.memory_bytes = memory_bytes
        communicator = start_without_servers(engine, timeout, self)
        self._num_ranks = _num_ranks(stages, replicas, communicator.size)
        self._num_stages = len(self._num_ranks)
        self._wire_dtype, self._is_open = wire_dtype, False
        self._may_be_fewer = stages is None
        self.replicas = 1
        if not isinstance(replicas, (list, tuple)):
            self.replicas = replicas
            self._is_open = replicas == 1
        if self._is_open:
            # Until a model is cut, a rank for each stage and the others, too.
            self._num_ranks = (1,) * communicator.size
        super().__init__(
            communicator,
            *self._ways(communicator),
            None if _is_number(stages) else stages,
        )

    def _ways(self, communicator):
        """`(peers, links)` of this rank."""
        return (
            peers(communicator, self._num_ranks),
            between(communicator, self._num_ranks, self._wire_dtype),
        )

    @property
    def is_flushed(self):
        return self.schedule in FLUSHED

    @property
    def num_stages(self):
        return self._num_stages

    @property
    def stages_of_ranks(self):
        return tuple(
            stage
            for stage, number in enumerate(self._num_ranks)
            for _ in range(number)
        )

    @property
    def pieces(self):
        """`(number of a mini-batch's pieces, range of this rank's)`."""
        number = math.lcm(*self._num_ranks)
        return number, own_pieces(number, self.peers.size, self.peers.rank)

    def profile(self, cutter, optimizer):
        del optimizer
        if self._is_open and self._may_be_fewer:
            self._num_stages = min(self.size, len(cutter.places) + 1)
        is_cut_by_times = self.stages is None and self._num_stages > 1
        are_left = self._is_open and self._num_stages < self.size
        if is_cut_by_times or are_left:
            return cuts.measured(cutter, self)
        return None

    def found_places(self, cutter, profile):
        if self._num_stages == 1:
            return []
        return profile(cutter.places, self._possible_ranks(), self.size)[0]

    def divide_ranks(self, places, profile):
        if self._is_open and self._num_stages < self.size:
            possible = self._possible_ranks()
            _, found = profile(places, possible, self.size)
            self._num_ranks = tuple(found)
            self.connect(*self._ways(self.collectives))
        self._is_open = False

    def _possible_ranks(self):
        """For each stage, the possible numbers of its ranks."""
        if not self._is_open:
            return [[number] for number in self._num_ranks]
        left = self.size - self._num_stages
        return [range(1, left + 2)] * self._num_stages

    def limit(self, model, parts, stage, passes):
        if self.memory_bytes is None:
            return None
        return Limit(model, parts, stage, *passes)

    def plan_function(self, model, stage, passes, profile):
        return Planner(model, stage, *passes).plan

    def num_parts(self, schedule, versions):
        if versions is None:
            return super().num_parts(schedule, versions)
        return self.num_micro_batches * self.pieces[0]

    def passes(self, stage, optimizer, is_whole):
        name = self.schedule
        make = FLUSHED.get(name, schedules.one_forward_one_backward)
        number = self.num_micro_batches if is_whole else self._num_of_flushed
        schedule = make(self.num_stages, number)
        # An error, if stages would wait for each other for ever.
        simulate(schedule)
        if self.replicas > 1:
            schedule = schedule.of_replica(self.peers.rank, self.replicas)
        elif self._num_stages < self.size:
            num_pieces, own = self.pieces
            schedule = schedule.of_pieces(own, num_pieces)
        if self.is_flushed or optimizer is None:
            return schedule, None
        # So many mini-batches that the pipeline fills, is full and empties.
        turns = Turns(self.num_stages, self.messages_ahead)
        simulate(
            schedules.without_flush(
                self.num_stages,
                2 * turns.backward(0) + 3,
                self.messages_ahead,
            )
        )
        if name == "vanilla":
            return schedule, versions.Vanilla(stage, turns)
        if name == "stash":
            return schedule, versions.Stashed(stage, turns)
        return schedule, versions.Predicted(
            stage, turns, optimizer, self.prediction, self.decay
        )


def _is_number(stages):
    return not (stages is None or isinstance(stages, (list, tuple)))


def _num_ranks(stages, replicas, size):
    """The number of ranks of each stage; of one pipeline, one at least."""
    number = None
    if _is_number(stages):
        number = checks.positive_integer(
            "stages",
            stages,
            ", None, a list of layers' names, or a list of such lists",
        )
    if isinstance(replicas, (list, tuple)):
        for stage, each in enumerate(replicas):
            checks.positive_integer(f"replicas[{stage}]", each)
        if sum(replicas) != size or number not in (None, len(replicas)):
            raise ValueError(
                "A list of `replicas` has a number for each stage, and their "
                "sum is the number of processes. Received: "
                f"stages={checks.spell(stages)}, "
                f"replicas={checks.spell(replicas)} and {size} processes."
            )
        return tuple(replicas)
    checks.positive_integer("replicas", replicas, " or a list of such")
    is_fitting = number is None or number * replicas == size
    if replicas == 1 and (is_fitting or number < size):
        return (1,) * min(size, number or _num_named(stages) or size)
    if not is_fitting or size % replicas:
        fitting = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            "As many processes as stages train each replica, or more if there "
            f"is one. Received: stages={checks.spell(stages)}, "
            f"replicas={replicas} and {size} processes. Expected: "
            + " or ".join(
                f"stages={n} with replicas={size // n}" for n in fitting
            )
            + "."
        )
    return (replicas,) * (size // replicas)


def _num_named(stages):
    """The number of stages that names tell; 0 if they do not."""
    if not (isinstance(stages, (list, tuple)) and stages):
        return 0
    return len(stages) + (not isinstance(stages[0], (list, tuple)))
