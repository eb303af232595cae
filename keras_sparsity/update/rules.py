"""Which optimizers' rules can be applied to the rows of a variable."""

import math

import keras

from keras_sparsity.tables.row_wise import acts_on_rows
from keras_sparsity.tables.table_variable import TableVariable
from keras_sparsity.update import lookups

# In one process, finding duplicate rows costs more than updating all of a table
# of so many elements: a step of a small model on 1,000 x 16 takes 0.68 ms
# instead of 0.98, on 1,000 x 64 the same (the model and batch of
# benchmarks/single_process.py; stock Keras 0.67 and 1.33).
_SMALL_ELEMENTS = 1 << 15

_BY_ROWS = {
    "SGD",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adam",
    "AdamW",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
    "ScheduleFreeAdamW",
}

_INSTEAD = (
    "Use one that treats each row by itself: SGD, RMSprop, Adagrad, Adadelta, "
    "Adam, AdamW, Adamax, Nadam, Ftrl, Lion or ScheduleFreeAdamW."
)


def check_applies_by_rows(optimizer):
    """Raises if the optimizer's rule needs the whole variable.

    Lamb divides by its norm, Adafactor takes means over it, Muon
    orthogonalizes it. A user's own subclass is assumed to treat rows alone.
    """
    if not is_by_rows(optimizer):
        raise ValueError(
            f"The optimizer {type(optimizer).__name__} cannot be applied to "
            "the rows of a sharded table: its rule needs the whole variable. "
            f"{_INSTEAD}"
        )


def is_by_rows(optimizer):
    """Whether the rule treats each row of a variable by itself."""
    name = type(optimizer).__name__
    is_built_in = type(optimizer) is getattr(keras.optimizers, name, None)
    return not is_built_in or name in _BY_ROWS


def leaves_untouched_rows(optimizer):
    """Whether a zero gradient changes neither a row nor its slots.

    Then an update of the touched rows alone equals the stock optimizer's update
    by the dense gradient.
    """
    if (
        optimizer.weight_decay
        or optimizer.use_ema
        or optimizer.gradient_accumulation_steps
    ):
        return False
    if type(optimizer) is keras.optimizers.SGD:
        return not optimizer.momentum
    return type(optimizer) is keras.optimizers.Adagrad


def needs_whole_part(optimizer):
    """Whether the optimizer keeps state that must see every row each step."""
    return bool(optimizer.use_ema or optimizer.gradient_accumulation_steps)


def may_keep_rows(variable):
    """Whether `KeptRows` may keep the rows of one of the model's variables.

    Those of a table or an `Embedding` that is not small.
    """
    return lookups.owner_of(variable) is not None and not _is_small(variable)


def updates_rows_of(variable, optimizer, sparse_updates):
    """Whether only the touched rows of a variable are updated.

    Args:
        variable: a variable that the rule updates.
        optimizer: the Keras optimizer.
        sparse_updates: `"exact"` or `"lazy"`, see `ks.HybridOptimizer`.
    """
    if sparse_updates == "exact":
        # In one piece: else a rule gets something else in its place.
        is_table = isinstance(variable, TableVariable)
        return (
            # A constraint may change untouched rows.
            variable.constraint is None
            and leaves_untouched_rows(optimizer)
            and not (is_table and _is_small(variable))
        )
    return why_not_lazy(variable, optimizer) is None


def why_not_lazy(variable, optimizer):
    """Why lazy updates change all rows of a variable; None if they do not.

    Args:
        variable, optimizer: as for `updates_rows_of`.
    """
    if not acts_on_rows(variable.constraint):
        return "its constraint needs the whole of it"
    if not is_by_rows(optimizer):
        return f"the rule of {type(optimizer).__name__} needs the whole of it"
    if needs_whole_part(optimizer):
        return (
            "lazy updates with `use_ema` or `gradient_accumulation_steps` "
            "change all of them; exact ones may change the touched rows alone"
        )
    return None


def _is_small(variable):
    """Whether a variable in one piece is quickly updated."""
    return math.prod(variable.shape) <= _SMALL_ELEMENTS
