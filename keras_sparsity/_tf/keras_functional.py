"""Calls of functional models. Checked on Keras 3.5 to 3.15."""

import contextlib
import functools
import itertools
import typing

import keras


class Call(typing.NamedTuple):
    """A call that a functional model makes, of symbolic tensors.

    Attributes:
        operation: the layer or operation that is called.
        inputs: list of the tensors among its arguments.
        outputs: list of the tensors that it returns.
        arguments: list of its arguments, of any structure, in their order.
    """

    operation: typing.Any
    inputs: list
    outputs: list
    arguments: list


def functional_of(model):
    """The `Functional` that runs a functional or sequential model's calls.

    None of a subclass, which may run other calls, and of a model that is not
    built. `Functional`, `Sequential._functional`.
    """
    from keras.src.models import functional, sequential

    if type(model) is sequential.Sequential:
        model = model._functional
    return model if type(model) is functional.Functional else None


def functional_calls(functional):
    """The `Call`s of a `Functional`, in their order (`_nodes_by_depth`)."""
    nodes = functional._nodes_by_depth
    return [
        Call(
            node.operation,
            list(node.input_tensors),
            list(node.outputs),
            [*node.arguments.args, *node.arguments.kwargs.values()],
        )
        for depth in sorted(nodes, reverse=True)
        for node in nodes[depth]
        if node.operation is not None and not node.is_input
    ]


def flat_inputs(functional, inputs):
    """A `Functional`'s inputs as it takes them, a flat list.

    In the model's order, dtypes and numbers of dimensions
    (`_standardize_inputs`).
    """
    return list(functional._standardize_inputs(inputs))


@contextlib.contextmanager
def inputs_stay(functional):
    """Context in which models are made of parts of a `Functional`.

    Keras takes over the model's own inputs into a part that takes other tensors
    too, and then no longer finds them in the model when it is saved
    (`_keras_history`).
    """
    before = [tensor._keras_history for tensor in functional.inputs]
    try:
        yield
    finally:
        for tensor, history in zip(functional.inputs, before, strict=True):
            tensor._keras_history = history


@contextlib.contextmanager
def next_run_calls(functional, begin):
    """Has a `Functional` make the calls of its next run through a function.

    While entered, of that run alone, whichever functions its layers and
    the models around it call besides. `_run_through_graph`.

    Args:
        functional: the `Functional`.
        begin: function of the run's inputs, in their structure, called when
            it begins. It returns `call(number, operation, *args, **kwargs)`,
            where number is the call's place in `functional_calls`.
    """
    name = "_run_through_graph"

    def run(inputs, operation_fn=lambda operation: operation, **options):
        object.__delattr__(functional, name)
        flat = keras.tree.flatten(inputs)
        call = begin(keras.tree.pack_sequence_as(functional.input, flat))
        numbers = itertools.count()

        def numbered(operation):
            called = operation_fn(operation)
            return functools.partial(call, next(numbers), called)

        return getattr(functional, name)(inputs, numbered, **options)

    # Not through Keras's attribute tracking: this is not state.
    object.__setattr__(functional, name, run)
    try:
        yield
    finally:
        vars(functional).pop(name, None)


def is_stateless(call):
    """Whether a `Call` always gives the same output for the same tensors.

    So do the operations of `keras.src.ops`, except those that call functions
    of the user's.
    """
    operation = call.operation
    given = keras.tree.flatten([list(vars(operation).values()), call.arguments])
    return type(operation).__module__.startswith("keras.src.ops.") and not any(
        callable(value) for value in given
    )
