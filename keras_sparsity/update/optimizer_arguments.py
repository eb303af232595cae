"""Checks the arguments of `HybridOptimizer`, and where it is applied."""

from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._tf import checks, keras_variables
from keras_sparsity.tables.table_variable import TableVariable

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


def checked_gradients(grads, variables):
    """The list of gradients, which is empty or has one for each variable."""
    is_list = isinstance(grads, Iterable) and not isinstance(grads, tf.Tensor)
    expected = "a list of gradients, one for each variable"
    checks.check(is_list, "grads", grads, expected)
    grads = list(grads)
    if grads and len(grads) != len(variables):
        raise ValueError(
            "There must be one gradient for each variable, None where there "
            f"is none. Received: {len(grads)} gradients and {len(variables)} "
            "variables. (Before an optimizer is built, it must be given the "
            "variables too.)"
        )
    for gradient, variable in zip(grads, variables, strict=False):
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
    return grads


def check_known(variable, pieces):
    """Raises unless `pieces`, the optimizer's, are those of the variable."""
    if pieces is None:
        raise ValueError(
            f"Unknown variable: {variable}. This optimizer was built with "
            "other variables; make a new one for this model."
        )
    is_table = isinstance(variable, TableVariable)
    if is_table and pieces[0] is not variable.table.pieces[0]:
        raise ValueError(
            f"The table of {variable} was spread or moved after the "
            "optimizer was built. Compile the model again, with a new "
            "optimizer, or assign it to `model.optimizer` before "
            "`ks.moves` moves the model's tables, so that it follows them."
        )


def check_strategy(placements, is_delayed):
    """Raises where a step would not train as its strategy asks."""
    size, strategy = placements.communicator.size, placements.strategy
    # Each rank would be taken to hold a part of the variables, but has all.
    if size > 1 and not placements.is_of_strategy:
        raise ValueError(
            f"A HybridOptimizer was applied on one of {size} processes outside "
            "of a strategy. Write `with strategy.scope(): model.compile(...)`, "
            "or, in a custom training loop, "
            "`strategy.run(train_step, args=(batch,))`, with a "
            "`ks.HybridStrategy()`."
        )
    is_asynchronous = not getattr(strategy, "synchronous", True)
    if is_asynchronous and not is_delayed and strategy.max_staleness != 0:
        raise ValueError(
            "Only `fit` trains with old weights. Received: a HybridOptimizer "
            "that `compile` has not made, under a HybridStrategy with "
            f"synchronous=False, max_staleness={strategy.max_staleness}. "
            "Compile the model inside of `strategy.scope()` and call `fit`, or "
            "use a synchronous strategy."
        )


def rule_of(optimizer):
    """An optimizer without loss scaling."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def is_rule(optimizer):
    """Whether an optimizer, but for loss scaling, is applied as Keras's are."""
    return _own_name(optimizer) is None


def _own_name(optimizer):
    """The method of an optimizer's own that nobody would call; or None."""
    kind, stock = type(rule_of(optimizer)), keras.optimizers.Optimizer
    for name in ("apply", "apply_gradients"):
        if getattr(kind, name) is not getattr(stock, name):
            return name
    return None


def check_is_rule(optimizer):
    """Raises for an optimizer that bypasses the aggregation."""
    name = _own_name(optimizer)
    if name is not None:
        raise ValueError(
            f"{type(rule_of(optimizer)).__name__} has an `{name}` of its own, "
            "so its gradients cannot be aggregated before. Use one optimizer "
            "that updates each variable by `update_step`, as Adam does; "
            "`transform_gradients` changes all gradients before. For different "
            "rules of different variables write a `train_step` that applies "
            "several `ks.HybridOptimizer`s, each to its variables."
        )
