"""Checks the arguments of `HybridOptimizer`."""

from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._tf import checks, keras_variables

# The values of each option.
CHOICES = {
    "sparse_updates": ("exact", "lazy"),
    "dense_aggregation": ("mean", "sum"),
    "sparse_aggregation": ("mean", "sum"),
}


def checked_options(**options):
    """The options of a `HybridOptimizer`, if they are valid."""
    for name, choices in CHOICES.items():
        checks.one_of(name, options[name], choices)
    checks.function(
        "transform_gradients",
        options["transform_gradients"],
        "None or a function of a list of gradients and a list of variables "
        "that returns the gradients",
    )
    return options


def get(optimizer, name="optimizer"):
    """The Keras optimizer of a name, a configuration or itself."""
    expected = "a Keras optimizer, its name ('adam') or its configuration"
    found = checks.keras_object(name, optimizer, keras.optimizers.get, expected)
    checks.check(
        isinstance(found, keras.optimizers.Optimizer), name, optimizer, expected
    )
    return found


def checked_variables(variables, name="variables"):
    is_list = isinstance(variables, Iterable)
    checks.check(
        is_list and not isinstance(variables, tf.Tensor | tf.Variable),
        name,
        variables,
        "a list of variables, such as `model.trainable_variables`",
    )
    variables = list(variables)
    for variable in variables:
        checks.check(
            keras_variables.is_variable(variable)
            or isinstance(variable, tf.Variable),
            name,
            variable,
            "a list of variables, such as `model.trainable_variables`",
        )
    return variables


def checked_list(grads):
    checks.check(
        isinstance(grads, Iterable) and not isinstance(grads, tf.Tensor),
        "grads",
        grads,
        "a list of gradients, one for each variable",
    )
    return list(grads)


def check_gradients(grads, variables):
    if len(grads) != len(variables):
        raise ValueError(
            "There must be one gradient for each variable, None where there "
            f"is none. Received: {len(grads)} gradients and {len(variables)} "
            "variables. (Before an optimizer is built, it must be given the "
            "variables too.)"
        )
    for gradient, variable in zip(grads, variables, strict=True):
        if gradient is None:
            continue
        checks.check(
            isinstance(gradient, tf.Tensor | tf.IndexedSlices | np.ndarray)
            and tf.as_dtype(gradient.dtype).is_floating,
            "grads",
            gradient,
            "a list of floating-point tensors or tf.IndexedSlices, as "
            "`tape.gradient` gives them",
        )
        is_slices = isinstance(gradient, tf.IndexedSlices)
        received = gradient.values.shape[1:] if is_slices else gradient.shape
        expected = variable.shape[1:] if is_slices else variable.shape
        if not tf.TensorShape(received).is_compatible_with(expected):
            raise ValueError(
                "A gradient must have its variable's shape. Received: "
                f"{'rows of ' * is_slices}shape {tuple(received)} for "
                f"{variable.name}. Expected: {tuple(expected)}. Are gradients "
                "and variables in the same order?"
            )


def rule_of(optimizer):
    """An optimizer without loss scaling."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def is_rule(optimizer):
    """Whether an optimizer, but for loss scaling, has Keras's `apply`."""
    stock = keras.optimizers.Optimizer.apply
    return type(rule_of(optimizer)).apply is stock


def check_is_rule(optimizer):
    """Raises for an optimizer that bypasses the aggregation."""
    if not is_rule(optimizer):
        raise ValueError(
            f"{type(rule_of(optimizer)).__name__} has an `apply` of its own, "
            "so its gradients cannot be aggregated before. Use one optimizer "
            "that updates each variable by `update_step`, as Adam does."
        )
