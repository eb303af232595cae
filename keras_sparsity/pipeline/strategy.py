"""`PipelineStrategy`: `compile` inside its scope cuts a model into stages."""

import contextlib

import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity._tf import checks, patches
from keras_sparsity.collectives.startup import single_process
from keras_sparsity.data import distribution
from keras_sparsity.exchange.options import check_wire_dtype
from keras_sparsity.pipeline import adoption
from keras_sparsity.pipeline.links import links
from keras_sparsity.training.extended import HybridExtended


class PipelineStrategy(tf.distribute.Strategy):
    """Pipelined model parallelism: each process trains one stage of a model.

    `compile` inside of its scope cuts a functional or sequential model into
    as many stages as there are processes. A process holds the weights and
    optimizer slots of its stage alone; activations and their gradients travel
    between neighbours. Every process reads whole batches: inputs are used by
    the stages that take them, labels by the last one. Logs are the same on
    all processes.

    Args:
        schedule: the order of forward and backward passes.
            `"spectrain"`: each pass of a mini-batch with weights that are
            predicted from the optimizer's smoothed gradients.
            `"vanilla"`: each pass with the weights of its moment.
            `"stash"`: the backward pass with the weights of the forward pass,
            of which N - k copies are held at stage k of N.
            In these three, several mini-batches are in flight, and the logs
            of a batch come N - 1 batches late (0 before); those of an epoch
            are exact.
            `"1f1b"`, `"gpipe"`: micro-batches of one mini-batch, and an update
            when all have come back: the result of one process. `"gpipe"` holds
            the activations of all micro-batches, `"1f1b"` at stage k those of
            N - k.
        stages: where the model is cut. None: so that the slowest stage or
            message is as fast as can be, by the layers' times, which rank 0
            measures, and those of the links. Or a
            list of the names of the layers after which the model is cut, or a
            list of the layers' names for each stage.
        num_micro_batches: the number of parts of a mini-batch, for `"1f1b"`
            and `"gpipe"`, and for `evaluate` and `predict`.
        prediction: for `"spectrain"`, the weights that are predicted.
            `"paper"`: those when the mini-batch's round trip ends.
            `"sequential"`: those after the updates of all earlier
            mini-batches, as sequential training would have.
        decay: gamma of equation 1, for optimizers without a first moment.
        wire_dtype: `"bfloat16"` or `"float16"`: activations and their gradients
            travel in 16 bits. None: in their own dtype.
        engine, timeout: see `ks.HybridStrategy`.

    Attributes:
        collectives: `ks.collectives.Collectives` of all processes.
        rank, size: this process's number, and the number of processes.

    Raises:
        ValueError: if an argument is not valid; see also
            `ks.HybridStrategy`. By `compile`: if the model is a subclass, has
            sharded layers or fewer layers than there are processes, if a
            layer's weights are used on both sides of a cut, or if, without
            a flush, the optimizer needs a number of all stages
            (`global_clipnorm`, loss scaling).

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
        num_micro_batches=4,
        prediction="paper",
        decay=0.9,
        wire_dtype=None,
        engine=None,
        timeout=None,
    ):
        checks.one_of("schedule", schedule, adoption.SCHEDULES)
        checks.one_of("prediction", prediction, ("paper", "sequential"))
        checks.positive_integer("num_micro_batches", num_micro_batches)
        checks.check(
            isinstance(decay, (int, float))
            and not isinstance(decay, bool)
            and 0 <= decay < 1,
            "decay",
            decay,
            "a number from 0 to below 1",
        )
        check_wire_dtype(wire_dtype)
        self.stages = _checked_stages(stages)
        self.schedule, self.num_micro_batches = schedule, num_micro_batches
        self.prediction, self.decay = prediction, decay
        self.collectives = collectives.start(engine, timeout)
        self.links = links(self.collectives, wire_dtype)
        super().__init__(_Extended(self, single_process()))

    @property
    def rank(self):
        return self.collectives.rank

    @property
    def size(self):
        return self.collectives.size

    @contextlib.contextmanager
    def scope(self):
        """Context in which `model.compile` cuts a model into stages.

        Yields:
            The strategy.
        """

        def make(stock):
            def compile(model, *args, **kwargs):
                adoption.adopt(stock, model, args, kwargs, self)

            return compile

        with super().scope(), patches.COMPILE.by(make):
            yield self


class _Extended(HybridExtended):
    """One replica, over all processes: each reads whole batches."""

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
