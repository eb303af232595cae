"""Training with gradients of weights that are exactly some steps old."""

import keras
import tensorflow as tf

from keras_sparsity._tf import contexts, keras_models
from keras_sparsity.callbacks.partition_search import PartitionSearch
from keras_sparsity.callbacks.sharded_checkpoint import ShardedCheckpoint
from keras_sparsity.conversion import saving
from keras_sparsity.training.binding import Binding, bound_arguments
from keras_sparsity.training.compiling import compile_adopted
from keras_sparsity.update.delay import Delay

# Set on an adopted model; holds its binding.
_DELAYED = "_keras_sparsity_delayed"


def compile_delayed(stock, model, args, kwargs, strategy):
    """Compiles a model whose gradients are applied some steps later.

    Raises:
        ValueError: if the optimizer scales losses, or has
            `transform_gradients` beside `delay_compensation`.
    """
    compile_adopted(stock, model, args, kwargs, strategy)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        check_scales_no_loss(optimizer.inner_optimizer)
        compensation = strategy.delay_compensation
        if compensation is not None:
            _check_transforms_nothing(optimizer)
        optimizer.delay = Delay(strategy.max_staleness, compensation)
    if getattr(model, _DELAYED, None) is None:
        object.__setattr__(model, _DELAYED, DelayedRuns(model))


def check_scales_no_loss(optimizer):
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "Under `synchronous=False` a gradient is applied when the scale "
            "of the loss may be another one. Received: a LossScaleOptimizer, "
            'which Keras also adds under the policy "mixed_float16". Use '
            '"mixed_bfloat16" or "float32".'
        )


def _check_transforms_nothing(optimizer):
    if optimizer.transform_gradients is not None:
        raise ValueError(
            "`delay_compensation` corrects gradients by the rows that each "
            "process owns, and `transform_gradients` is to see those of whole "
            "variables. Received: both. Leave one of them out."
        )


class DelayedRuns(Binding):
    """`fit` that applies all gradients by the end of each epoch."""

    def __init__(self, model):
        self._is_in_fit = self._is_in_evaluate = False
        super().__init__(
            model,
            ["fit", "evaluate", "train_on_batch"],
            {keras_models.RESULTS_OR_LOGS: "results_or_logs"},
        )

    @property
    def _delay(self):
        delay = self._model.optimizer.delay
        if delay is None:
            raise ValueError(
                f"The model '{self._model.name}' got another optimizer since "
                "it was compiled. Received: a HybridOptimizer under "
                "`synchronous=False`. Give the Keras optimizer to "
                "`model.compile` inside of `strategy.scope()`."
            )
        return delay

    def fit(self, *args, **kwargs):
        arguments = bound_arguments(self._stock["fit"], args, kwargs)
        _check_callbacks(arguments.get("callbacks"))
        self._check_optimizer()
        _check_is_alone(self._model)
        self._delay.clear()  # what a `fit` that failed has left
        with contexts.attribute(self, "_is_in_fit", True):
            return self._stock["fit"](*args, **kwargs)

    def train_on_batch(self, *args, **kwargs):
        raise ValueError(
            "`train_on_batch` has no epoch, at whose end the gradients that "
            "wait are applied. Received: `train_on_batch` under a strategy "
            f"with max_staleness={self._delay.num_steps}. Use `fit`, or "
            "`max_staleness=0`."
        )

    def evaluate(self, *args, **kwargs):
        with contexts.attribute(self, "_is_in_evaluate", True):
            return self._stock["evaluate"](*args, **kwargs)

    def results_or_logs(self, logs):
        """`fit` calls this behind an epoch's last step, before validation.

        `evaluate` calls it, too: a callback's, within an epoch.
        """
        if self._is_in_fit and not self._is_in_evaluate:
            self._apply_all()
        return self._stock[keras_models.RESULTS_OR_LOGS](logs)

    def _apply_all(self):
        if not self._delay.is_waiting():
            return
        strategy = self._model.distribute_strategy
        optimizer = self._model.optimizer

        def apply_next():
            strategy.run(optimizer.apply_next)

        if not self._model.run_eagerly:
            # Of this epoch: TensorFlow would warn of the fifth one's call.
            traced = tf.function(apply_next, autograph=False)
            apply_next = traced.get_concrete_function()
        for _ in range(self._delay.num_steps):
            apply_next()


def _check_is_alone(model):
    """Raises ValueError of a second optimizer, which nothing delays."""
    own = model.optimizer, model.optimizer.inner_optimizer
    for name, optimizer in saving.named_optimizers(model):
        if not any(optimizer is each for each in own):
            raise ValueError(
                "Under `synchronous=False` the gradients that `model.optimizer`"
                " applies wait, and another optimizer's would be applied at "
                f"once. Received: the optimizer `model.{name}`, a "
                f"{type(optimizer).__name__}. Train by one optimizer, or under "
                "a synchronous strategy."
            )


def _check_callbacks(callbacks):
    for callback in getattr(callbacks, "callbacks", None) or keras.tree.flatten(
        callbacks or []
    ):
        if isinstance(callback, PartitionSearch):
            raise ValueError(
                "A search moves tables while gradients of their rows wait to "
                f"be applied. Received: a {type(callback).__name__} under "
                "`synchronous=False`. Leave it out, or search in a "
                "synchronous `fit` before."
            )
        if not isinstance(callback, ShardedCheckpoint):
            continue
        for name in ("every_steps", "every_seconds"):
            value = getattr(callback, name)
            if value is not None:
                raise ValueError(
                    "A checkpoint within an epoch would lose the gradients "
                    "that wait to be applied. Received: "
                    f"ShardedCheckpoint({name}={value}) under "
                    "`synchronous=False`. Leave it out: epochs end with all "
                    "gradients applied."
                )
