"""`PipelineStrategy`: `compile` inside its scope cuts a model into stages."""

import contextlib

import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity._tf import checks, keras_models, patches
from keras_sparsity.collectives.startup import single_process
from keras_sparsity.pipeline import versions
from keras_sparsity.pipeline.links import links
from keras_sparsity.pipeline.runs import Runs
from keras_sparsity.pipeline.stage import Stage
from keras_sparsity.pipeline.steps import Steps
from keras_sparsity.pipeline.weights import Weights
from keras_sparsity.stages import schedule as schedules
from keras_sparsity.stages.cutting import Cutter
from keras_sparsity.training.extended import HybridExtended

_FLUSHED = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_forward_one_backward,
}
_WITHOUT_FLUSH = ("vanilla", "stash", "spectrain")


class PipelineStrategy(tf.distribute.Strategy):
    """Pipelined model parallelism: each rank trains one stage of a model.

    Args:
        stages: list of the names of the layers after which the model is cut,
            one less than there are processes.
        schedule: `"1f1b"` or `"gpipe"`: the same result, in `"gpipe"` with
            the activations of all micro-batches in memory.
        num_micro_batches: the number of parts of a batch.
        engine, timeout: see `ks.HybridStrategy`.

    Raises:
        ValueError: if an argument is not valid.
    """

    def __init__(
        self,
        stages,
        schedule="1f1b",
        num_micro_batches=4,
        prediction="paper",
        decay=0.9,
        engine=None,
        timeout=None,
    ):
        checks.one_of("schedule", schedule, (*_FLUSHED, *_WITHOUT_FLUSH))
        checks.positive_integer("num_micro_batches", num_micro_batches)
        self.stages = list(stages)
        self.schedule = schedule
        self.num_micro_batches = num_micro_batches
        self.prediction, self.decay = prediction, decay
        self.collectives = collectives.start(engine, timeout)
        self._links = links(self.collectives)
        # One replica: a rank reads whole batches.
        super().__init__(HybridExtended(self, single_process()))

    @contextlib.contextmanager
    def scope(self):
        """Context in which `model.compile` makes a model pipelined."""

        def make(stock):
            def compile(model, *args, **kwargs):
                stock(model, *args, **kwargs)
                self._adopt(model)

            return compile

        with super().scope(), patches.COMPILE.by(make):
            yield self

    def _adopt(self, model):
        keras_models.set_distribute_strategy(model, self)
        cutter = Cutter(model)
        size, rank = self.collectives.size, self.collectives.rank
        if len(self.stages) != size - 1:
            raise ValueError(
                f"{size} processes train {size} stages, so the model is cut "
                f"{size - 1} times. Received: stages={self.stages}."
            )
        parts = cutter.parts(cutter.after(self.stages))
        stage = Stage(rank, parts[rank], *self._links)
        make = _FLUSHED.get(self.schedule, schedules.one_forward_one_backward)
        schedule = make(size, self.num_micro_batches)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and stage.variables:
            optimizer.build(stage.variables)
        of_passes = None
        if self.schedule in _WITHOUT_FLUSH and optimizer is not None:
            of_passes = self._versions(stage, optimizer)
        steps = Steps(model, stage, schedule, of_passes)
        object.__setattr__(
            model,
            "_keras_sparsity_pipeline",
            [steps, Runs(model, steps), Weights(model, parts, steps)],
        )

    def _versions(self, stage, optimizer):
        if self.schedule == "vanilla":
            return versions.Vanilla(stage, optimizer)
        if self.schedule == "stash":
            return versions.Stashed(stage, optimizer)
        return versions.Predicted(
            stage, optimizer, self.prediction, self.decay
        )
