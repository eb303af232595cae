"""Interfaces of placements and reducers."""

import abc
import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

from keras_sparsity.planning.engine_cost import engine_bytes


@dataclasses.dataclass
class Update:
    """The gradient of one variable, on its way to the variable's rule.

    Attributes:
        variable: the variable that the rule updates: the model's, or one
            partition of it.
        gradient: a tensor, or `tf.IndexedSlices` by the rows of `variable`.
        whole: the model's variable.
        is_of_rows: whether the gradient was `tf.IndexedSlices` at first.
        keeps_rows: whether the rule is to update touched rows only, so that
            the reduced gradient has to say which these are.
        touched: `(row ids, counts)` for `touches.end_step`.
    """

    variable: keras.Variable
    gradient: tf.Tensor | tf.IndexedSlices
    whole: keras.Variable
    is_of_rows: bool = False
    keeps_rows: bool = False
    touched: tuple[tf.Tensor | None, Callable | None] = (None, None)

    @property
    def values(self):
        if isinstance(self.gradient, tf.IndexedSlices):
            return self.gradient.values
        return self.gradient

    def replaced(self, gradient):
        """The same update, of another gradient."""
        return dataclasses.replace(self, gradient=gradient)


class Reducer(abc.ABC):
    """Makes the gradients of all ranks one, in one step.

    It has no instances: all that it needs are its arguments.

    Attributes:
        path: name of its way, in plans and in logs.
        role: beginning of the names of its messages.
        makes_dense: whether it sends gradients of rows as dense ones.
    """

    path: str
    role: str
    makes_dense = False

    @classmethod
    @abc.abstractmethod
    def reduce(cls, updates, communicator, options):
        """Sends gradients; each update then has that of all ranks.

        The gradients of many variables travel in few messages, so it is called
        once in a step, for all variables that are reduced in this way: on
        every rank with the same ones, in the same order.

        Args:
            updates: list of `Update`.
            communicator: `Collectives` of all ranks.
            options: `exchange.options.Options`.
        """

    # The cost of one step, for plans and for `architecture="auto"`.

    @classmethod
    def transfer_bytes(cls, spec, traffic):
        """Bytes of a variable's messages, by machine.

        Args:
            spec: `planning.VariableSpec` of the variable.
            traffic: `placement.traffic.Traffic`.

        Returns:
            `planning.TransferBytes`.
        """
        return engine_bytes(spec, cls.path, *traffic.facts())

    @classmethod
    def updated_bytes(cls, own, whole, size, num_slots):
        """Bytes that each process reads or writes to update rows.

        Args:
            own: bytes of the rows that the gradients of one process touch, or
                of its share where all rows are updated.
            whole: bytes of the variable.
            size: number of processes.
            num_slots: number of the optimizer's slots of the variable.
        """
        return min(whole, own * size) * (1 + num_slots)

    @classmethod
    def role_of(cls, variable):
        """Beginning of the names of the messages with a variable's rows."""
        return cls.role

    @classmethod
    def shares_message(cls, variable):
        """Whether a variable's rows travel in messages of other variables."""
        return False

    @classmethod
    def num_parts(cls, size):
        """Number of parts in which `size` processes sum a gradient."""
        return 1


class Placement:
    """Where one variable lives, and how its gradients become one.

    `placement.choice` alone decides which class it is.

    Attributes:
        name: its name for `ks.moves.move`, in plans and in logs.
        reducers: `(of dense gradients, of rows)`: the class of the `Reducer`
            by whether a gradient is `tf.IndexedSlices`.
        layout: `Layout` of the rows that each rank stores and saves; None if
            each rank has all of them, of which rank 0 saves its own.
    """

    name: str
    reducers: tuple[type[Reducer], type[Reducer]]
    layout = None

    def num_partitions(self, size, is_of_rows):
        """Number of parts into which `size` processes divide the variable."""
        if self.layout is not None:
            return self.layout.num_partitions
        return self.reducers[is_of_rows].num_parts(size)
