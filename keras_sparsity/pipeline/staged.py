"""The base of strategies whose models are cut into stages."""

import abc
import contextlib

from keras_sparsity import collectives
from keras_sparsity._tf import checks, contexts, patches
from keras_sparsity._tf.deferred_weights import deferring
from keras_sparsity.data import distribution
from keras_sparsity.exchange.options import Options
from keras_sparsity.pipeline import adoption
from keras_sparsity.training.extended import HybridExtended, ProcessStrategy


def start_without_servers(engine, timeout, strategy):
    """As `collectives.start`, for a strategy without dedicated servers.

    Raises:
        ValueError: if some processes are dedicated servers.
    """
    communicator = collectives.start(engine, timeout)
    if communicator.num_servers:
        name = type(strategy).__name__
        raise ValueError(
            f"{name} has each weight on processes that compute with it, so "
            "that dedicated servers would have none. "
            f"Received: {communicator.num_servers} servers beside "
            f"{communicator.num_workers} workers. Start it without servers, "
            "or train with `ks.HybridStrategy`."
        )
    return communicator


class StagedStrategy(ProcessStrategy, abc.ABC):
    """A strategy under which each rank trains one stage of a model.

    `adoption` calls its functions with the `Cutter` of a model, the `Part`s of
    all stages, this rank's `Stage`, and the rank's optimizer or None; `profile`
    and `passes` are the results of the functions of these names, `places` those
    of the cuts.

    Attributes:
        options: `Options` of the messages of tables' rows.
        asked_micro_batches: the number of a mini-batch's parts that the user
            asks for, or None.
        planned_cuts: `PlannedCuts` in place of `stages`, or None.
        compiling: the model whose `compile` is under way, or None.
        spreads_tables: whether sharded tables of the first stage live on all
            of its ranks; else they are refused.

    Args:
        communicator: `Collectives` of all ranks.
        peers: `Collectives` of the ranks of this rank's stage, which share
            each mini-batch.
        links: `(link to the stage before, link to the one behind)`.
        stages: a user's `stages`, see `PipelineStrategy`.
    """

    # A group of ranks has no groups by machine.
    options = Options(local_aggregation=False)
    spreads_tables = False
    asked_micro_batches = None
    planned_cuts = None
    compiling = None

    def __init__(self, communicator, peers, links, stages):
        self.collectives, self.peers = communicator, peers
        self.links, self.stages = links, _checked_stages(stages)
        super().__init__(_Extended(self, peers))

    def connect(self, peers, links):
        """Replaces `peers` and `links`, before a model is cut."""
        self.peers, self.links = peers, links
        self.extended.share_with(peers)

    def gradients_summed(self):
        """Context of an update; the optimizer sums no gradients of its own."""
        return contexts.attribute(self.extended, "are_summed", True)

    @property
    @abc.abstractmethod
    def is_flushed(self):
        """Whether weights are updated when no mini-batch is under way."""

    @property
    @abc.abstractmethod
    def stages_of_ranks(self):
        """Tuple of the number of each rank's stage."""

    def ranks_of(self, stage):
        """Tuple of the ranks of a stage, by its number."""
        return tuple(
            rank
            for rank, number in enumerate(self.stages_of_ranks)
            if number == stage
        )

    def profile(self, cutter, optimizer):
        """Measurements of a whole model, before its weights are freed."""

    @property
    def num_stages(self):
        return max(self.stages_of_ranks) + 1

    def divide_ranks(self, places, profile):
        """Decides the ranks of each stage, where only a model tells."""

    @abc.abstractmethod
    def found_places(self, cutter, profile):
        """The places of the cuts where `stages` does not say it."""

    @abc.abstractmethod
    def plan_function(self, model, stage, passes, profile):
        """A function of a mini-batch that gives a cut model's plan."""

    def limit(self, model, parts, stage, passes):
        """The `Limit` of a cut model's memory, or None."""

    def check_columns(self, parts, optimizer):
        """Raises ValueError, on all ranks, if no columns can be divided."""

    def divide_columns(self, stage, parts, profile, optimizer):
        """Gives the `Stage` `Columns`, if its ranks divide wide layers."""

    def head_sums(self, parts):
        """The `HeadSums` of the first stage's gradients, or None."""

    def computes_whole(self, stage):
        """Whether each pass of a stage, by its number, is of a whole batch."""
        del stage
        return False

    @abc.abstractmethod
    def passes(self, stage, optimizer, is_whole):
        """`(Schedule of a mini-batch's parts, Versions or None)` of a stage.

        Args:
            is_whole: whether the model computes with whole mini-batches only:
                evaluation then divides them no more than training does.
        """

    def num_parts(self, schedule, versions):
        """The number of parts into which passes divide a mini-batch."""
        del versions
        return schedule.num_batches * schedule.num_pieces

    @contextlib.contextmanager
    def scope(self):
        """Context in which `model.compile` cuts a model into stages.

        A model that is made inside of it, too, gets its weights' first values
        when it is cut: each process holds those of its stage alone, at no
        time the whole model.

        Yields:
            The strategy.
        """
        adopting = patches.models_compile_by(self.adopt)
        with super().scope(), adopting, deferring():
            yield self

    def adopt(self, stock, model, args, kwargs):
        """Compiles a model and cuts it; see `adoption.adopt`."""
        adoption.adopt(stock, model, args, kwargs, self)


class _Extended(HybridExtended):
    """One replica, over all processes: each reads whole batches."""

    def __init__(self, strategy, peers):
        super().__init__(strategy, peers)
        self.are_summed = False  # gradients, by the stages themselves

    def share_with(self, peers):
        self._collectives = peers

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        if self.are_summed:
            return value
        return super()._replica_ctx_all_reduce(reduce_op, value, options)

    def _own_draws(self):
        return contextlib.nullcontext()  # stages have their own

    def _experimental_distribute_dataset(self, dataset, options):
        del options
        return distribution.repeat_on_all(dataset, self._strategy.collectives)


def _checked_stages(stages):
    """A list of names, a list of lists of names, or None."""
    if stages is None:
        return None
    is_list = isinstance(stages, (list, tuple))
    names = list(stages) if is_list else []
    if names and all(isinstance(each, (list, tuple)) for each in names):
        stages = [list(each) for each in names]
        names = [name for each in stages for name in each]
    elif is_list:
        stages = names
    checks.check(
        is_list and all(isinstance(name, str) for name in names),
        "stages",
        stages,
        "None, a list of layers' names, or a list of such lists",
    )
    return stages
