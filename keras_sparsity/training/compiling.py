"""Adoption: `compile` inside of a strategy's scope distributes a model."""

import keras

from keras_sparsity._tf import keras_losses, keras_models
from keras_sparsity.conversion import exporting
from keras_sparsity.global_batch import losses, metrics
from keras_sparsity.moves import moving
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.training import embeddings, jit
from keras_sparsity.training.binding import ADOPTION, bound_arguments
from keras_sparsity.training.first_step import FirstStep
from keras_sparsity.training.joint_pull import JointPull
from keras_sparsity.training.replicas import Replicas
from keras_sparsity.training.runs import Runs
from keras_sparsity.training.saves import Saves
from keras_sparsity.training.step_losses import StepLosses
from keras_sparsity.training.steps import Steps
from keras_sparsity.update import lookups
from keras_sparsity.update.optimizer_arguments import get, rule_of


def compile_adopted(stock, model, args, kwargs, strategy):
    """Compiles a model and distributes it.

    Args:
        stock: Keras's own `compile`.
        model: the model.
        args, kwargs: its arguments.
        strategy: the `HybridStrategy`.
    """
    arguments = bound_arguments(stock, (model, *args), kwargs)
    del arguments["self"]
    if hasattr(model, exporting.WHOLE):
        raise ValueError(
            f"The model '{model.name}' is trained by another strategy already. "
            f"Received: a model of a {type(model.distribute_strategy).__name__}"
            " in the scope of a HybridStrategy. Use `ks.export(model)`, which "
            "makes a copy without a strategy."
        )
    previous = getattr(model, "optimizer", None)
    optimizer = arguments.get("optimizer", "rmsprop")
    if isinstance(previous, HybridOptimizer) and (
        optimizer
        in (previous.inner_optimizer, rule_of(previous.inner_optimizer))
    ):
        optimizer = previous  # its slots are of this rank's rows
    if optimizer is not None:
        arguments["optimizer"] = wrap(optimizer, strategy)
    communicator = strategy.collectives
    arguments["loss"] = losses.globalize(arguments.get("loss"), communicator)
    adopt(model, strategy)
    stock(model, **arguments)
    jit.settle(model, communicator, is_compiled_anew=True)
    compiled_metrics = keras_losses.compiled_metrics(model)
    if compiled_metrics is not None and communicator.size > 1:
        metrics.ignore_empty_parts(compiled_metrics)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = wrap(model.optimizer, strategy)
        is_compiled = model.jit_compile and not model.run_eagerly
        model.optimizer.is_compiled_by_xla = bool(is_compiled)
    _release_rows(previous, model)
    embeddings.settle(model, strategy)


def _release_rows(previous, model):
    """Lets another optimizer than that of before keep the rows of tables."""
    is_same = previous is model.optimizer
    if isinstance(previous, HybridOptimizer) and (
        not is_same or model.optimizer.is_compiled_by_xla
    ):
        previous.release_rows()


def wrap(optimizer, strategy):
    """The optimizer as a `HybridOptimizer`, outermost."""
    options = strategy.optimizer_options
    optimizer = get(optimizer)
    if not isinstance(optimizer, HybridOptimizer):
        inner = getattr(optimizer, "inner_optimizer", None)
        if not isinstance(inner, HybridOptimizer):
            return HybridOptimizer(optimizer, **options)
        optimizer = _nested(optimizer)
    # A loaded optimizer has none: functions are not saved.
    given = options["transform_gradients"]
    if optimizer.transform_gradients is None:
        optimizer.transform_gradients = given
    elif given not in (None, optimizer.transform_gradients):
        raise ValueError(
            "The strategy and the optimizer have different "
            "`transform_gradients`. Give it to one of them. Received: "
            f"{given} and {optimizer.transform_gradients}."
        )
    return optimizer


def _nested(loss_scaling):
    """Moves the loss scaling around a `HybridOptimizer` inside of it.

    Keras's `compile` adds it outermost. There, each rank would look for
    overflow in its own gradients only: one rank would skip the step while the
    others wait for it.
    """
    hybrid = loss_scaling.inner_optimizer
    if isinstance(hybrid.inner_optimizer, keras.optimizers.LossScaleOptimizer):
        return hybrid  # scaled already, by the user or when it was saved
    loss_scaling.inner_optimizer = hybrid.inner_optimizer
    return HybridOptimizer(loss_scaling, **hybrid.options())


def adopt(model, strategy):
    """Binds a model's methods to versions that involve all ranks."""
    keras_models.set_distribute_strategy(model, strategy)
    moving.settle(model, strategy)
    lookups.mark(keras_models.all_layers(model), strategy.collectives.size)
    if getattr(model, ADOPTION, None) is None:
        joint_pull = JointPull(model, strategy.options)
        replicas = Replicas(model)
        first_step = FirstStep(model, joint_pull, replicas)
        bindings = [
            first_step,
            Runs(model, first_step, replicas),
            Steps(model, joint_pull),
            Saves(model, replicas),
        ]
        if strategy.collectives.size > 1:
            bindings.append(StepLosses(model))
        object.__setattr__(model, ADOPTION, bindings)
