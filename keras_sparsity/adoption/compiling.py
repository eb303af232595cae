"""What `compile` makes of a model inside of a strategy's scope."""

import contextlib
import functools

import keras

from keras_sparsity import compat, losses, metrics, moves
from keras_sparsity.adoption.binding import (
    bound_arguments,
    check_is_not_jit_compiled,
)
from keras_sparsity.adoption.first_step import FirstStep
from keras_sparsity.adoption.joint_pull import JointPull
from keras_sparsity.adoption.replicas import Replicas
from keras_sparsity.adoption.runs import Runs
from keras_sparsity.adoption.saves import Saves
from keras_sparsity.adoption.steps import Steps
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.optimizer_arguments import get

# Set on an adopted model; holds its bindings.
_ADOPTION = "_keras_sparsity_adoption"


@contextlib.contextmanager
def compile_adopts(strategy):
    """While entered, `Model.compile` adopts the model it compiles."""
    owner = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
    original = owner.compile

    @functools.wraps(original)
    def compile(model, *args, **kwargs):
        arguments = bound_arguments(original, (model, *args), kwargs)
        del arguments["self"]
        optimizer = arguments.get("optimizer", "rmsprop")
        if optimizer is not None:
            arguments["optimizer"] = wrap(optimizer, strategy)
        arguments["loss"] = losses.globalize(
            arguments.get("loss"), strategy.collectives
        )
        adopt(model, strategy)
        original(model, **arguments)
        check_is_not_jit_compiled(model, strategy.size)
        compiled_metrics = compat.compiled_metrics(model)
        if compiled_metrics is not None and strategy.size > 1:
            metrics.ignore_empty_parts(compiled_metrics)
        if getattr(model, "optimizer", None) is not None:
            model.optimizer = wrap(model.optimizer, strategy)

    owner.compile = compile
    try:
        yield
    finally:
        owner.compile = original


def wrap(optimizer, strategy):
    """The optimizer as a `HybridOptimizer`, outermost."""
    options = strategy.optimizer_options
    optimizer = get(optimizer)
    if not isinstance(optimizer, HybridOptimizer):
        inner = getattr(optimizer, "inner_optimizer", None)
        if not isinstance(inner, HybridOptimizer):
            return HybridOptimizer(optimizer, **options)
        optimizer = _nested(optimizer)
    # One that was loaded has none: functions are not saved.
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
    compat.set_distribute_strategy(model, strategy)
    moves.settle(model, strategy)
    if getattr(model, _ADOPTION, None) is None:
        joint_pull = JointPull(model)
        replicas = Replicas(model)
        first_step = FirstStep(model, joint_pull, replicas)
        bindings = (
            first_step,
            Runs(model, first_step, replicas),
            Steps(model, joint_pull),
            Saves(model, replicas),
        )
        object.__setattr__(model, _ADOPTION, bindings)
