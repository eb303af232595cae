"""The facts of a model that its costs depend on, measured in one process."""

import collections

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.planning import VariableSpec
from keras_sparsity.stages import timing
from keras_sparsity.stages.column_split import column_sizes
from keras_sparsity.stages.costs import ModelFacts
from keras_sparsity.stages.layer_placement import layer_sizes
from keras_sparsity.stages.prediction import predictor_of
from keras_sparsity.stages.profile import (
    Profile,
    gradient_sizes,
    num_bytes,
    places_of_heads,
)
from keras_sparsity.tables.table_variable import TableVariable, partitions_of
from keras_sparsity.update import optimizer_arguments

# Passes of more examples are taken to be slower in proportion.
_MOST_EXAMPLES = 32
# Updates of more elements, too.
_MOST_ELEMENTS = 2**20


def measured(cutter, num_examples, optimizer, specs=None, wire_dtype=None):
    """The facts of a model; no variable changes.

    Passes are measured for two numbers of examples: a call with many weights
    and few activations takes nearly as long for few examples. Times of single
    calls are scaled so that together they take as long as the whole model.

    Args:
        num_examples: the number of examples of a mini-batch.
        optimizer: the model's Keras optimizer, or None: updates count no time
            and no slots.
        specs: list of the `planning.VariableSpec`s of the model's trained
            variables as they travel. By default dense, and of tables the rows
            that an example looks up.
        wire_dtype: name of a narrower dtype in which activations, and rows of
            sharded tables, travel.

    Returns:
        `ModelFacts`.

    Example:

    >>> from keras_sparsity.stages.cutting import Cutter
    >>> layers = [keras.Input((8,)), keras.layers.Dense(4),
    ...           keras.layers.Dense(2)]
    >>> cutter = Cutter(keras.Sequential(layers))
    >>> facts = measured(cutter, 16, keras.optimizers.Adam())
    >>> facts.num_slots, facts.weight_bytes, facts.output_bytes
    (2.0, (144, 40), (16, 8))

    References:
        PipeDream (arXiv:1806.03377), 3.1 (the profile).
    """
    number = min(_MOST_EXAMPLES, num_examples)
    crossing = timing.crossing_bytes(cutter, 1, wire_dtype)
    gradients = gradient_sizes(cutter, wire_dtype)
    seconds, fixed_seconds = _pass_seconds(cutter, number)
    forward = timing.whole_seconds(cutter, number, has_backward=False)
    num_slots, update_seconds, sum_seconds = _of_updates(optimizer, gradients)
    profile = Profile(
        names=tuple(call.name for call in cutter.calls),
        sizes=tuple(layer_sizes(cutter)),
        seconds=tuple(seconds),
        num_examples=number,
        crossing_bytes={
            place: crossing[place] for place in named_places(cutter, gradients)
        },
        gradients=tuple(gradients),
        update_seconds=tuple(
            update_seconds * (each.dense_bytes + each.row_bytes(num_examples))
            for each in gradients
        ),
        fixed_seconds=tuple(fixed_seconds),
        sum_seconds=tuple(sum_seconds * each.dense_bytes for each in gradients),
        columns=column_sizes(
            cutter.calls, optimizer, shape_of=cutter.example_shape
        ),
    )
    return ModelFacts(
        profile=profile,
        # A pass with its gradients takes no less.
        forward_share=min(1.0, forward / sum(seconds)),
        returned_bytes=timing.crossing_bytes(cutter, 1, wire_dtype, True),
        weight_bytes=tuple(map(num_bytes, cutter.new_variables("weights"))),
        output_bytes=tuple(timing.output_bytes(cutter)),
        num_slots=num_slots,
        num_averages=predictor_of(optimizer).num_averages if optimizer else 0,
        specs=tuple(specs or variable_specs(cutter)),
        pairs=tuple(
            place
            for place, call in enumerate(cutter.calls)
            if call.name in cutter.pairs
        ),
    )


def named_places(cutter, gradients=None):
    """The places where a head may end: with a name, and all tables it needs.

    Args:
        gradients: list of the calls' `GradientSize`s, if it is known.

    Example:

    >>> from keras_sparsity.stages.cutting import Cutter
    >>> layers = [keras.Input((8,)), keras.layers.Dense(4),
    ...           keras.layers.Dense(2)]
    >>> named_places(Cutter(keras.Sequential(layers)))
    [0]
    """
    last = {call.name: i for i, call in enumerate(cutter.calls)}
    named = [place for place in cutter.places if place in last.values()]
    return places_of_heads(named, gradients or gradient_sizes(cutter))


def variable_specs(cutter, alpha=None, num_examples=1):
    """The `planning.VariableSpec` of each trained variable.

    Args:
        alpha: of tables; by default that of `num_examples`, and of a softmax's
            samples, without duplicates.
        num_examples: the number of examples of a worker.

    Raises:
        ValueError: if alpha is no fraction.

    Example:

    >>> from keras_sparsity.stages.cutting import Cutter
    >>> layers = [keras.Input((2,), dtype="int32"),
    ...           keras.layers.Embedding(100, 4), keras.layers.Dense(1)]
    >>> cutter = Cutter(keras.Sequential(layers))
    >>> [spec.alpha for spec in variable_specs(cutter, num_examples=3)]
    [0.06, None, None]

    References:
        EuroSys 3.1 (alpha).
    """
    found, sizes = [], gradient_sizes(cutter)
    of_tables, sampled = collections.Counter(), collections.Counter()
    for rows in (each for size in sizes for each in size.owned):
        of_tables[rows.table] += rows.num_lookups
        sampled[rows.table] += rows.num_sampled
    for size, new in zip(sizes, cutter.new_variables(), strict=True):
        for variable in new:
            rows, num_lookups = None, size.num_lookups
            if isinstance(variable, TableVariable):
                num_lookups = num_lookups or of_tables[variable.path]
            if num_lookups:
                rows = alpha
                if alpha is None:
                    touched = num_examples * num_lookups
                    touched += sampled[variable.path]
                    rows = min(1.0, touched / variable.shape[0])
            found.append(
                VariableSpec(
                    variable.path,
                    tuple(variable.shape),
                    rows,
                    keras.backend.standardize_dtype(variable.dtype),
                    num_partitions=partitions_of(variable),
                )
            )
    return found


def _pass_seconds(cutter, num_examples):
    """Times of the calls' passes, and their parts of any number of examples."""

    def measured(number):
        seconds = timing.call_seconds(cutter, number)
        share = timing.whole_seconds(cutter, number) / sum(seconds)
        return [share * each for each in seconds]

    few, many = max(1, num_examples // 8), measured(num_examples)
    if few == num_examples:
        return many, []
    fixed = []
    for least, most in zip(measured(few), many, strict=True):
        of_example = (most - least) / (num_examples - few)
        fixed.append(min(most, max(0.0, most - of_example * num_examples)))
    return many, fixed


def _of_updates(optimizer, gradients):
    """`(slots of each weight, seconds of the update of a byte, of a sum)`."""
    trained = sum(each.parameter_bytes for each in gradients)
    # Of a variable of its own, which goes when it is measured.
    elements = int(min(_MOST_ELEMENTS, max(1, trained // 4)))
    weights = keras.Variable(tf.zeros([elements, 1]))
    gradient = tf.zeros([elements, 1])
    add = timing.median_seconds(lambda x: [x[0] + x[1]], [gradient, gradient])
    sum_seconds = add / num_bytes([gradient])
    alike = _made_anew(optimizer)
    if alike is None:
        return 0.0, 0.0, sum_seconds
    alike.build([weights])
    slots = [v for v in alike.variables if v.shape == weights.shape]

    def update(gradients):
        alike.apply(gradients, [weights])
        return []

    took = timing.median_seconds(update, [gradient])
    return (
        num_bytes(slots) / num_bytes([weights]),
        took / num_bytes([gradient]),
        sum_seconds,
    )


def _made_anew(optimizer):
    """An optimizer of the same rule without slots; None if there is none."""
    if optimizer is None:
        return None
    # Loss scaling needs a step of all processes.
    rule = optimizer_arguments.rule_of(optimizer)
    return keras_optimizers.unbuilt(rule)
