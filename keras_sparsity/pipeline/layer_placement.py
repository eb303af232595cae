"""`LayerPlacementStrategy`: heads on all workers, the tail on one."""

from keras_sparsity import collectives
from keras_sparsity._tf import checks
from keras_sparsity.collectives.base import divided
from keras_sparsity.exchange.options import check_wire_dtype
from keras_sparsity.pipeline.fan import fan
from keras_sparsity.pipeline.staged import StagedStrategy
from keras_sparsity.stages import layer_placement
from keras_sparsity.stages.schedule import Kind, Schedule, Task

# A worker's part of a batch, by which the model is divided.
_NUM_EXAMPLES = 32


class LayerPlacementStrategy(StagedStrategy):
    """Layer placement: many parameters stay on one worker, activations travel.

    The workers run the model's head on their parts of each mini-batch; the last
    rank runs the tail on all of it. Gradients of the head are summed over the
    workers, those of the tail travel nowhere. The result is that of one
    process.

    Args:
        stages: where the model is divided, as for `ks.PipelineStrategy`. None:
            by the paper's rule, for parts of 32 examples.
        threshold: K; a model whose skewness is not below it gains nothing.
        wire_dtype: as for `ks.PipelineStrategy`.
        engine, timeout: see `ks.HybridStrategy`.

    Raises:
        ValueError: if an argument is not valid. By `compile`: as under
            `ks.PipelineStrategy`, and if the rule finds no gain.

    References:
        RALP (Park et al.).
    """

    def __init__(
        self,
        stages=None,
        threshold=-0.5,
        wire_dtype=None,
        engine=None,
        timeout=None,
    ):
        checks.check(
            isinstance(threshold, (int, float))
            and not isinstance(threshold, bool),
            "threshold",
            threshold,
            "a number",
        )
        check_wire_dtype(wire_dtype)
        self.threshold = threshold
        communicator = collectives.start(engine, timeout)
        *workers, tail = range(communicator.size)
        # Alone, a process has one stage.
        groups = [workers, [tail]] if workers else [[tail]]
        super().__init__(
            communicator,
            divided(communicator, groups, "pipeline/peers"),
            fan(communicator, tail, wire_dtype) if workers else (None, None),
            stages,
        )

    @property
    def is_flushed(self):
        return True

    @property
    def stages_of_ranks(self):
        return (*([0] * (self.size - 1)), min(1, self.size - 1))

    def found_places(self, cutter):
        if self.size == 1:
            return []
        sizes = layer_placement.layer_sizes(cutter)
        place = layer_placement.published_split(
            sizes, _NUM_EXAMPLES, self.threshold
        )
        if place is None:
            raise ValueError(
                "The model gains nothing by layer placement: its parameters "
                "are not towards its end. Received: a skewness of "
                f"{layer_placement.skewness(sizes):.2f}; expected: below "
                f"threshold={self.threshold}. Use `ks.HybridStrategy`, or say "
                "by `stages` where to divide it."
            )
        return [place]

    def passes(self, stage, optimizer):
        del optimizer
        number = max(1, self.size - 1)
        is_tail = stage.is_last
        batch = 0 if is_tail else self.rank
        tasks = tuple(Task(kind, batch) for kind in Kind)
        # Of the other stage it knows nothing.
        stages = ((), tasks) if stage.number else (tasks, ())
        return Schedule(1 if is_tail else number, stages), None
