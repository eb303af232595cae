"""Wide layers whose columns are divided among the ranks of a stage."""

import dataclasses

import keras

from keras_sparsity.stages.example_shapes import example_bytes, example_shape
from keras_sparsity.stages.profile import num_bytes
from keras_sparsity.update import optimizer_arguments, rules


@dataclasses.dataclass(frozen=True)
class ColumnSize:
    """A layer whose kernel can be divided by its columns.

    Attributes:
        kernel_bytes: bytes of its kernel.
        input_bytes: bytes of what an example brings; gradients of it are
            summed over the ranks.
        output_bytes: bytes of what it makes of an example; they are gathered.
    """

    kernel_bytes: int
    input_bytes: int
    output_bytes: int

    def traveling_bytes(self, num_examples):
        """Bytes of a whole batch of which each rank sends all but its part."""
        return num_examples * (2 * self.input_bytes + self.output_bytes)

    def gains(self, num_examples):
        """Whether the gradients of its kernel are more bytes, summed."""
        return 2 * self.kernel_bytes > self.traveling_bytes(num_examples)


def column_sizes(calls, optimizer=None, is_asked=False, shape_of=example_shape):
    """The `ColumnSize` of each call of a model; None where there is none.

    Args:
        calls: list of the model's or a stage's `Call`s.
        optimizer, is_asked: as for `why_not`.
        shape_of: as for `example_bytes`.

    Returns:
        Tuple; empty if the optimizer cannot update columns apart.
    """
    if why_not(optimizer, is_asked):
        return ()
    layers = [call.operation for call in calls]
    return tuple(
        _size(call, shape_of) if _has_columns(call.operation, layers) else None
        for call in calls
    )


def _has_columns(layer, layers):
    """Whether the columns of a layer's kernel can be computed apart."""
    return (
        type(layer) is keras.layers.Dense
        and layer.kernel.trainable
        and layer.kernel_regularizer is None
        and layer.kernel_constraint is None
        and not layer.lora_enabled
        and layer.quantization_mode is None
        and sum(_holds(each, layer.kernel) for each in layers) == 1
    )


def _holds(layer, variable):
    return any(v is variable for v in getattr(layer, "variables", []))


def why_not(optimizer, is_asked=False):
    """Why an optimizer cannot update columns apart; None if it can.

    Args:
        optimizer: Keras's, or None.
        is_asked: whether the user wants it, and knows rules of their own.
    """
    if optimizer is None:
        return None
    rule = optimizer_arguments.rule_of(optimizer)
    name = type(rule).__name__
    if not optimizer_arguments.is_rule(optimizer):
        return f"{name} has an `apply` of its own"
    if not rules.is_by_rows(rule):
        return f"the rule of {name} needs whole kernels"
    if getattr(rule, "clipnorm", None):
        return f"clipnorm={rule.clipnorm} needs the norms of whole kernels"
    if not is_asked and type(rule) is not getattr(keras.optimizers, name, None):
        return f"the rule of {name} may need whole kernels"
    return None


def chosen_calls(sizes, num_examples):
    """The calls of a stage whose columns are divided; the widest, if none.

    Args:
        sizes: list of the calls' `ColumnSize`s, or None.
        num_examples: the number of examples of the whole batch.

    Returns:
        Set of the places in the list where that saves bytes; if it does
        nowhere, of that of the largest kernel; empty if no call has columns.
    """
    possible = {place: size for place, size in enumerate(sizes) if size}
    gaining = {i for i, size in possible.items() if size.gains(num_examples)}
    if gaining or not possible:
        return gaining
    return {max(possible, key=lambda place: possible[place].kernel_bytes)}


def _size(call, shape_of):
    (inputs,), (outputs,) = call.inputs, call.outputs
    return ColumnSize(
        num_bytes([call.operation.kernel]),
        example_bytes(inputs, shape_of),
        example_bytes(outputs, shape_of),
    )
