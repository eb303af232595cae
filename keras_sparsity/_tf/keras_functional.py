"""Calls of functional models. Checked on Keras 3.5 to 3.15."""

import contextlib
import functools
import itertools
import math
import typing

import keras

from keras_sparsity._tf import keras_call_order, keras_losses


class Call(typing.NamedTuple):
    """A call that a functional model makes, of symbolic tensors.

    Attributes:
        operation: the layer or operation that is called.
        inputs: list of the tensors among its arguments.
        outputs: list of the tensors that it returns.
        arguments: list of its arguments, of any structure, in their order.
        name: the operation's name; of one in a nested model, behind that
            model's, as in `"inner/dense"`.
    """

    operation: typing.Any
    inputs: list
    outputs: list
    arguments: list
    name: str


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
    """The `Call`s of a `Functional`, in their order."""
    return [
        Call(
            node.operation,
            list(node.input_tensors),
            list(node.outputs),
            _in_order(node.arguments),
            node.operation.name,
        )
        for node in keras_call_order.nodes(functional)
    ]


def _in_order(arguments):
    """List of a call's arguments; `inputs` is a layer's first."""
    names = sorted(arguments.kwargs, key=lambda name: name != "inputs")
    return [*arguments.args, *(arguments.kwargs[name] for name in names)]


def flat_calls(functional):
    """The `Call`s of a `Functional` and of the models that it calls.

    A functional or sequential model in it stands for its own calls. They are
    made once more, so that all start at the outer model's inputs. Calls with
    one state stand in the order in which the outer model makes them.

    Returns:
        `(calls, outputs)`: list of `Call`s in their order, and list of the
        tensors that they make in place of `functional.outputs`.
    """
    calls = functional_calls(functional)
    if not any(functional_of(call.operation) for call in calls):
        return calls, list(functional.outputs)
    names, made = {}, []
    outputs = _without_nested(functional, functional.inputs, "", names, made)
    with named(names):
        flat = functional_calls(keras.Model(functional.inputs, outputs))
    # Masks are made by operations that are new.
    return [
        call._replace(name=names.get(call.operation, call.name))
        for call in keras_call_order.as_made(flat, made)
    ], outputs


@contextlib.contextmanager
def named(names):
    """Context in which operations have other names.

    Those of a model must differ, and those of nested models may not.
    """
    before = {operation: operation.name for operation in names}
    _set_names(names)
    try:
        yield
    finally:
        _set_names(before)


def _set_names(names):
    for operation, name in names.items():
        # Not through Keras's attribute tracking: this is not state.
        object.__setattr__(operation, "name", name)


def _without_nested(functional, tensors, prefix, names, calls_made):
    """Makes a model's calls, and in place of nested models their calls.

    Args:
        tensors: list of those in place of the model's inputs.
        prefix: that of its calls' names.
        names: dict from the operations that are called to their names.
        calls_made: list of the tensors that calls have made, in order.

    Returns:
        List of tensors in place of its outputs.
    """
    values = {
        id(x): value
        for x, value in zip(functional.inputs, tensors, strict=True)
    }
    for node in keras_call_order.nodes(functional):
        args, kwargs = node.arguments.fill_in(values)
        name = prefix + node.operation.name
        nested = functional_of(node.operation)
        if nested is not None and _is_plain(nested, node.arguments):
            given = keras.tree.flatten(args)
            made = _without_nested(nested, given, f"{name}/", names, calls_made)
        else:
            made = keras.tree.flatten(node.operation(*args, **kwargs))
            names[node.operation] = name
            calls_made += made
        values.update(zip(map(id, node.outputs), made, strict=True))
    return [values[id(x)] for x in functional.outputs]


def _is_plain(nested, arguments):
    """Whether a nested model takes its arguments as they are.

    It may find inputs by their names, cast or reshape them, or be given masks
    other than those of its inputs.
    """
    if len(arguments.args) != 1 or set(arguments.kwargs) - {"mask", "training"}:
        return False
    (given,), expected = arguments.args, nested.input
    masks = keras.tree.flatten(arguments.kwargs.get("mask"))
    tensors = keras.tree.flatten(given)
    if any(
        mask is not None and mask is not keras_losses.keras_mask(x)
        for x, mask in zip(tensors, masks, strict=False)
    ):
        return False
    if len(tensors) != 1 or len(nested.inputs) != 1:
        try:
            keras.tree.assert_same_structure(given, expected)
        except (TypeError, ValueError):
            return False
    return all(
        x.dtype == y.dtype and len(x.shape) == len(y.shape)
        for x, y in zip(tensors, nested.inputs, strict=True)
    )


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


def part_of(functional, calls, inputs, outputs):
    """A model of some of a `Functional`'s calls, which makes them in order.

    Args:
        calls: list of its `Call`s.
        inputs, outputs: lists of the tensors that these take, and make.

    Returns:
        `keras.Model` from a list to a list.
    """
    names = {call.operation: call.name for call in calls}
    with inputs_stay(functional), named(names):
        model = keras.Model(inputs, outputs)
    keras_call_order.set_order(model, calls, outputs)
    return model


# Of traces: numbers that are no other sizes, and one that many divide.
_NUM_EXAMPLES, _MORE_EXAMPLES, _UNKNOWN_SIZE = 97, 101, 480


def mixed(functional, calls, traced):
    """The tensors that are not a row for each of a batch's examples.

    Args:
        calls: the model's `Call`s.
        traced: as `specs_in_a_trace` returns it.

    Returns:
        `(without, pairs)`: dicts from tensors' ids to the names of the calls
        that make them; without those of which TensorFlow knows no size. Of
        tensors whose first axis is not that of the examples; and of those
        with numbers for pairs of examples, as (batch, batch).
    """
    fixed = functional.inputs[0].shape[0]
    found = {key: tuple(spec.shape) for key, spec in traced.items()}
    names = {id(x): call.name for call in calls for x in call.outputs}
    expected = None, fixed or _NUM_EXAMPLES
    without = {
        key: names[key]
        for key, shape in found.items()
        if (shape[0] if shape else 0) not in expected
    }
    few = {
        key: math.prod(shape)
        for key, shape in found.items()
        if None not in shape and math.prod(shape) % _NUM_EXAMPLES**2 == 0
    }
    if fixed or not few:
        return without, {}
    # Another size may be the same number by chance.
    traced = specs_in_a_trace(functional, calls, _MORE_EXAMPLES)
    return without, {
        key: names[key]
        for key, number in few.items()
        if key in traced
        and math.prod(traced[key].shape) * _NUM_EXAMPLES
        > number * _MORE_EXAMPLES
    }


def specs_in_a_trace(functional, calls, num_examples=_NUM_EXAMPLES):
    """Tensors like those that calls make of batches of a known size.

    `compute_output_spec`, of the whole model.

    Returns:
        Dict from the ids of the calls' tensors to `keras.KerasTensor`s.
    """
    # Not all layers take any size.
    for size in (_UNKNOWN_SIZE, None):
        shapes = [
            (x.shape[0] or num_examples, *(s or size for s in x.shape[1:]))
            for x in functional.inputs
        ]
        with contextlib.suppress(Exception):  # whatever a layer raises
            return _specs(functional, calls, shapes)
    return {}


def shapes_for(functional, calls, inputs):
    """Symbolic tensors of the shapes that a batch leads to.

    Args:
        calls: the model's `Call`s.
        inputs: those of a batch, in the model's structure.

    Returns:
        Dict from the ids of the model's inputs, and of the tensors that calls
        make, to tensors.
    """
    given = flat_inputs(functional, inputs)
    shapes = [tuple(each.shape) for each in given]
    named_inputs = zip(map(id, functional.inputs), given, strict=True)
    return {**dict(named_inputs), **_specs(functional, calls, shapes)}


def _specs(functional, calls, shapes):
    """Dict from the ids of the tensors that calls make to others like them.

    Args:
        calls: the model's `Call`s.
        shapes: list of the shapes of the model's inputs.
    """
    from keras.src import backend

    made = [tensor for call in calls for tensor in call.outputs]
    model = part_of(functional, calls, functional.inputs, made)
    given = [
        keras.KerasTensor(shape, x.dtype, sparse=x.sparse)
        for x, shape in zip(model.inputs, shapes, strict=True)
    ]
    found = backend.compute_output_spec(lambda *x: model.call(list(x)), *given)
    keras_losses.clear_losses(model)
    flat = keras.tree.flatten(found)
    return dict(zip(map(id, made), flat, strict=True))


@contextlib.contextmanager
def next_run_calls(functional, begin):
    """Has a `Functional` make the calls of its next run through a function.

    While entered, of that run alone, whichever functions its layers and
    the models around it call besides. `_run_through_graph`.

    Args:
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


def logits_function(call):
    """The function by which a `Call` makes its output from logits, or None.

    Of layers and operations (`keras.src.ops.nn`) of Keras whose output carries
    them, see `keras_losses.keras_logits`; also of subclasses that call as
    these do.
    """
    from keras.src.ops import nn

    layers, activations = keras.layers, keras.activations
    layer, masks = call.operation, map(keras_losses.keras_mask, call.inputs)
    if type(layer) is nn.Sigmoid:
        return activations.sigmoid
    if _calls_as(layer, layers.Softmax, nn.Softmax):
        # A mask counts in the layer's own way.
        is_plain = isinstance(layer.axis, int) and set(masks) == {None}
        softmax = functools.partial(activations.softmax, axis=layer.axis)
        return softmax if is_plain else None
    kinds = (
        *(layers.Dense, layers.EinsumDense, layers.Activation),
        # The others inherit their calls.
        *(layers.Conv1D, layers.Conv2D, layers.Conv2DTranspose),
        *(layers.DepthwiseConv2D, layers.SeparableConv2D),
    )
    function = layer.activation if _calls_as(layer, *kinds) else None
    is_known = function in (activations.softmax, activations.sigmoid)
    return function if is_known else None


def _calls_as(operation, *kinds):
    """Whether its call is that of one of some classes."""
    return type(operation).call in [kind.call for kind in kinds]


def is_stateless(call):
    """Whether a `Call` always gives the same output for the same tensors.

    So do the operations of `keras.src.ops`, except those that call functions
    of the user's.
    """
    operation = call.operation
    if not type(operation).__module__.startswith("keras.src.ops."):
        return False  # and its attributes may be no structures, see `flatten`
    given = keras.tree.flatten([list(vars(operation).values()), call.arguments])
    return not any(callable(value) for value in given)
