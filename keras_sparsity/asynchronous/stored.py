"""Where the variables of a model are stored."""

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity.update.rows import slots_of

# Of a piece; why, is in `benchmarks/tried.md`.
_LEAST_BYTES = 16 * 1024


@dataclasses.dataclass
class Piece:
    """Some rows of a variable and of its slots, at one server.

    Attributes:
        variable: the model's.
        server: the number of the server.
        rows: their index in an array of the variable's shape.
        shape: theirs.
        cells: dict from the `id` of the variable and of its slots to `Cell`s.
    """

    variable: keras.Variable
    server: int
    rows: Any
    shape: tuple
    cells: dict = dataclasses.field(default_factory=dict)

    @property
    def cell(self):
        return self.cells[id(self.variable)]


@dataclasses.dataclass
class Stored:
    """A variable of the model, and where it is stored.

    Attributes:
        variable: the model's.
        is_of_rows: whether rows of it travel, not all of it.
        slots: the optimizer's slots of it.
        pieces: list of `Piece`: row r is in the one of the number r modulo
            their number.
    """

    variable: keras.Variable
    is_of_rows: bool
    slots: list
    pieces: list

    def cut(self, ids):
        """Finds rows in the pieces.

        Args:
            ids: row numbers, a NumPy array.

        Returns:
            For each piece, the numbers that they have there, and the index of
            these rows among all.
        """
        number = len(self.pieces)
        if number == 1:
            return [(ids, ...)]
        of_ids = ids % number
        places = [np.flatnonzero(of_ids == piece) for piece in range(number)]
        return [(ids[place] // number, place) for place in places]


def joined(indices, parts, shape):
    """An array of a shape, of its parts at some indices."""
    if len(parts) == 1:
        return parts[0]
    whole = np.empty(shape, parts[0].dtype)
    for index, part in zip(indices, parts, strict=True):
        whole[index] = part
    return whole


def placed(optimizer, variables, of_rows, owners):
    """`Stored` of all variables.

    Large ones are cut; each piece is at a server with the fewest bytes.
    """
    is_of_rows = {id(v) for v in of_rows}
    slots = list(slots_of(optimizer, variables).values())
    of_owners = dict.fromkeys(owners, 0)
    found = {}
    for variable in sorted(variables, key=_num_bytes, reverse=True):
        pieces = _pieces(variable, sorted(owners, key=of_owners.get))
        for piece in pieces:
            of_owners[piece.server] += _num_bytes(variable) / len(pieces)
        index = next(i for i, v in enumerate(variables) if v is variable)
        found[id(variable)] = Stored(
            variable,
            id(variable) in is_of_rows,
            [of_kind[index] for of_kind in slots],
            pieces,
        )
    return [found[id(v)] for v in variables]


def num_bytes(shape, dtype):
    return math.prod(shape) * tf.as_dtype(dtype).size


def _num_bytes(variable):
    return num_bytes(variable.shape, variable.dtype)


def _pieces(variable, servers):
    """Its pieces, one at each of the first servers."""
    shape = tuple(variable.shape)
    most = min(len(servers), _num_bytes(variable) // _LEAST_BYTES)
    number = min([most, *shape[:1]])
    if number < 2:
        return [Piece(variable, servers[0], ..., shape)]
    return [
        Piece(
            variable,
            server,
            slice(first, None, number),
            (len(range(first, shape[0], number)), *shape[1:]),
        )
        for first, server in enumerate(servers[:number])
    ]
