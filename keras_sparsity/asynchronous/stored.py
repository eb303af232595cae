"""Where the variables of a model are stored."""

import dataclasses
import math

import keras
import tensorflow as tf

from keras_sparsity.update.rows import slots_of


@dataclasses.dataclass
class Stored:
    """A variable of the model, and where it is stored.

    Attributes:
        variable: the model's.
        is_of_rows: whether rows of it travel, not all of it.
        server: the number of its server.
        slots: the optimizer's slots of it.
        cells: dict from the `id` of the variable and of its slots to `Cell`s.
    """

    variable: keras.Variable
    is_of_rows: bool
    server: int
    slots: list
    cells: dict = dataclasses.field(default_factory=dict)

    @property
    def cell(self):
        return self.cells[id(self.variable)]

    @property
    def num_bytes(self):
        """Of one element."""
        return tf.as_dtype(self.variable.dtype).size


def placed(optimizer, variables, of_rows, owners):
    """`Stored` of all variables: each at the server with the fewest bytes."""
    is_of_rows = {id(v) for v in of_rows}
    slots = list(slots_of(optimizer, variables).values())
    num_bytes = [0] * len(owners)
    found = {}
    for variable in sorted(variables, key=lambda v: -math.prod(v.shape)):
        server = num_bytes.index(min(num_bytes))
        num_bytes[server] += math.prod(variable.shape)
        index = next(i for i, v in enumerate(variables) if v is variable)
        found[id(variable)] = Stored(
            variable,
            id(variable) in is_of_rows,
            owners[server],
            [of_kind[index] for of_kind in slots],
        )
    return [found[id(v)] for v in variables]
