"""A Keras rule, as operations on variables at a server."""

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.update import rules
from keras_sparsity.update.rows import changed, stand_in_for

_RULES = (
    *("SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "Adamax", "Ftrl"),
    *("AdamW", "Lion"),
)


def check(optimizer, sparse_updates, of_rows):
    """Raises ValueError if a server cannot apply an optimizer's rule.

    Args:
        of_rows: names of the layers of which rows are updated.
    """
    received = f"Received: a {type(optimizer).__name__}"
    name = type(optimizer).__name__
    if name not in _RULES or type(optimizer) is not getattr(
        keras.optimizers, name
    ):
        raise ValueError(
            "Servers apply rules whose state belongs to one variable each. "
            f"{received}. Expected: one of {', '.join(_RULES)}, of "
            "`keras.optimizers`."
        )
    for option in (
        "use_ema",
        "gradient_accumulation_steps",
        "loss_scale_factor",
    ):
        value = getattr(optimizer, option, None)
        if value:
            raise ValueError(
                f"Servers apply a rule without `{option}`. {received} with "
                f'{option}={value}. Leave it out, or use `delay="fixed"`.'
            )
    is_exact = rules.leaves_untouched_rows(optimizer)
    if of_rows and sparse_updates == "exact" and not is_exact:
        # AdamW decays them, and Adam spends their momentum.
        raise ValueError(
            "Servers update touched rows alone, and this rule moves others "
            f'too. {received}, sparse_updates="exact" and the layers '
            f'{of_rows}. Use `sparse_updates="lazy"`, SGD without momentum or '
            'Adagrad, or `delay="fixed"`.'
        )


def check_constraints(variables):
    """Raises ValueError if a variable has a constraint."""
    for variable in variables:
        if variable.constraint is not None:
            raise ValueError(
                "Servers apply a rule without constraints. Received: the "
                f"variable '{variable.path}' with a "
                f"{type(variable.constraint).__name__}. Leave it out, or use "
                '`delay="fixed"`.'
            )


def updated(optimizer, gradients, rate, iterations):
    """Operations that update variables and their slots.

    Args:
        gradients: list of `(Piece, ids or None, gradient)`.
        rate: the learning rate.
        iterations: the number of earlier updates.
    """
    cell_of, ids_of, row_updates = {}, {}, []
    for piece, ids, _ in gradients:
        cell_of.update(piece.cells)
        ids_of.update(dict.fromkeys(piece.cells, ids))

        def read(variable, ids=ids):
            return cell_of[id(variable)].read(ids)

        row_updates.append((piece.variable, ids, read))
    step, stand_ins = stand_in_for(optimizer, row_updates)
    keras_optimizers.set_iterations(step, iterations)
    for piece, _, gradient in gradients:
        stand_in = stand_ins[id(piece.variable)]
        if optimizer.weight_decay and keras_optimizers.uses_weight_decay(
            optimizer, piece.variable
        ):
            decay = tf.cast(optimizer.weight_decay * rate, stand_in.dtype)
            stand_in.assign(stand_in - stand_in * decay)
        step.update_step(gradient, stand_in, rate)
    return [
        cell_of[id(variable)].assign(value)
        if ids_of[id(variable)] is None
        else cell_of[id(variable)].assign_rows(ids_of[id(variable)], value)
        for variable, value in changed(step)
    ]
