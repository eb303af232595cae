"""Gives all ranks the same variables before an optimizer's first step."""

import keras
import tensorflow as tf

from keras_sparsity._tf import contexts, keras_optimizers
from keras_sparsity._tf.filled_variable import filling
from keras_sparsity.health import agreement
from keras_sparsity.tables import initial_values
from keras_sparsity.tables.table_variable import TableVariable

# Set on an optimizer while its model synchronises the variables.
_SYNCHRONISE = "_keras_sparsity_synchronise"


def synchronised_by(optimizer, synchronise):
    """While entered, building an optimizer calls a function of its model.

    That function gives all ranks the same variables, in place of the
    optimizer, which would compare and broadcast its own ones besides.

    Args:
        optimizer: a `HybridOptimizer`.
        synchronise: function without arguments.
    """
    return contexts.own_attributes(optimizer, **{_SYNCHRONISE: synchronise})


def synchronise_model(optimizer):
    """Calls the function of `synchronised_by`; whether there is one."""
    synchronise = optimizer.__dict__.get(_SYNCHRONISE)
    if synchronise is not None:
        synchronise()
    return synchronise is not None


def build(inner, rule, variables, pieces):
    """Builds an inner optimizer on the pieces of variables.

    Args:
        inner: a Keras optimizer.
        rule: the same, or the one inside of a `LossScaleOptimizer`.
        variables: the model's.
        pieces: list of the pieces of each.
    """
    for variable, of_variable in zip(variables, pieces, strict=True):
        keras_optimizers.exclude_from_weight_decay_too(
            rule, variable, of_variable
        )
    with keras.name_scope(inner.name), _slots_stored_once(rule):
        inner.build([v for several in pieces for v in several])


def _slots_stored_once(rule):
    """While entered, a rule's large slots are made without a second copy.

    Of its slots that begin with one number everywhere, as all of Keras do.

    Args:
        rule: a Keras optimizer, to be built.
    """
    stock = rule.add_variable

    def add(shape, initializer="zeros", *args, **kwargs):
        number = initial_values.constant_of(keras.initializers.get(initializer))
        if number is None or not initial_values.is_large(shape):
            return stock(shape, initializer, *args, **kwargs)

        with filling(number, shape) as nothing:
            return stock(shape, nothing, *args, **kwargs)

    return contexts.own_attributes(rule, add_variable=add)


def same_on_all_ranks(communicator, all_variables, variables):
    """Gives every rank rank 0's values, whatever its own seed was.

    Args:
        communicator: `Collectives` of all ranks.
        all_variables: the variables that the optimizer updates.
        variables: those of them that each rank has whole.
    """
    if communicator.size == 1:
        return
    facts = agreement.of_variables(variables)
    for variable in all_variables:
        if isinstance(variable, TableVariable) and variable.table.given:
            facts[f"values given to {variable.path}"] = variable.table.given
    with tf.init_scope():  # now, not in the step that may be traced
        communicator.check_equal(
            facts,
            "The variables that an optimizer updates",
            "Build the same model on every rank, and set its weights there.",
        )
        if not variables:
            return
        values = communicator.broadcast(
            [tf.convert_to_tensor(v.value) for v in variables],
            name="optimizer/variables",
        )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
