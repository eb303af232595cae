"""The variables of a table: the layer's, and the owners'."""

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_variables
from keras_sparsity._tf.current_variable import make_current

# The methods by which a stock optimizer would write a table's anchor.
_ASSIGNMENTS = (
    "assign",
    "assign_add",
    "assign_sub",
    "scatter_add",
    "scatter_sub",
    "scatter_update",
)
# The operators to which a spread table's anchor must not answer for it.
_OPERATORS = (
    "neg abs getitem lt le gt ge add radd sub rsub mul rmul truediv "
    "rtruediv floordiv rfloordiv pow rpow mod rmod matmul rmatmul"
).split()


class TableVariable(keras.Variable):
    """Stands for a whole table among a layer's weights.

    Its shape is the table's. While the table is in one piece it is an
    ordinary variable; once the table is spread it holds only a scalar, the
    anchor that gradients are taken with respect to, and reading or assigning
    it moves the whole table, on every rank together. In a step, the gradient
    of the rows that were read goes to their owners.
    """

    def __init__(self, table, dtype, trainable, name):
        self.table = table
        super().__init__(
            initializer=table.initializer,
            shape=(table.num_rows, table.dim),
            dtype=dtype,
            trainable=trainable,
            autocast=False,
            name=name,
        )

    def _initialize_with_initializer(self, initializer):
        del initializer  # the table draws its own rows
        self._value = self.table.create(self)

    @property
    def is_built(self):
        return self._value is not None

    # Both may be set at any time, as of every Keras variable.

    @property
    def regularizer(self):
        return super().regularizer

    @regularizer.setter
    def regularizer(self, value):
        value = self.table.use_regularizer(value)
        keras.Variable.regularizer.fset(self, value)

    @property
    def constraint(self):
        return super().constraint

    @constraint.setter
    def constraint(self, value):
        self.table.use_constraint(value)
        keras.Variable.constraint.fset(self, value)

    def use(self, value):
        """Takes a new `tf.Variable` as its value.

        Under the identity of the one of before: optimizers that know this
        variable, as one that weight decay leaves out, go on knowing it.
        """
        keras_variables.take_identity(value, self._value)
        self._value = value

    def numpy(self):
        return self.table.read()

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype=dtype)

    def assign(self, value):
        is_value = tf.is_tensor(value) or not tf.executing_eagerly()
        if is_value and not self.table.is_sharded:
            self.assign_whole(value)  # also in a step, as a constraint does
        elif tf.executing_eagerly():
            self.table.assign(value)
        else:
            raise ValueError(
                f"The table '{self.table.owner_name}' is spread over "
                f"{self.table.collectives.size} processes and cannot be "
                "assigned inside of a step or a tf.function. Assign it "
                "outside, on every rank."
            )
        return self

    def assign_whole(self, value):
        super().assign(value)

    def __tf_tensor__(self, dtype=None, name=None):
        is_in_step = not tf.executing_eagerly() or (
            tf.distribute.has_strategy()
            and not tf.distribute.in_cross_replica_context()
        )
        if not self.table.is_sharded:
            return super().__tf_tensor__(dtype, name)
        if is_in_step:  # where a gradient may be asked for
            whole = self.table.gather(tf.range(self.table.num_rows))
        else:
            whole = self.table.read()
        return tf.convert_to_tensor(whole, dtype=dtype)

    def __repr__(self):
        kind = "sharded" if self.table.is_sharded else "whole"
        return (
            f"<TableVariable path={self.path}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, {kind}>"
        )


def take_over(variable, table):
    """Makes a layer's variable the one of a table in one piece; returns it.

    In place: the layer, its model and its optimizer hold the object already.
    """
    keras_variables.change_kind(variable, TableVariable)
    variable.table = table
    make_current(variable.value)
    return variable


def _of_the_table(name):
    """An operator of Keras's variables, which would compute with `value`."""
    stock = getattr(keras.Variable, name)

    def operator(self, *args):
        if not self.table.is_sharded:
            return stock(self, *args)
        return getattr(tf.convert_to_tensor(self), name)(*args)

    return operator


def _not_of_rows_elsewhere(name):
    """A method of Keras's variables that saves or restores the value."""
    stock = getattr(keras.Variable, name)

    def method(self, *args, **kwargs):
        if self.table.is_sharded:
            raise ValueError(
                f"The table '{self.table.owner_name}' is spread over "
                f"{self.table.collectives.size} processes, so "
                "TensorFlow's checkpoints and SavedModels would hold no row "
                "of it. Use `ks.callbacks.ShardedCheckpoint`, `model.save`, "
                "or save `ks.export(model)`, which has the whole table."
            )
        return stock(self, *args, **kwargs)

    return method


for _name in keras_variables.SAVING_METHODS:
    setattr(TableVariable, _name, _not_of_rows_elsewhere(_name))
for _name in _OPERATORS:
    setattr(TableVariable, f"__{_name}__", _of_the_table(f"__{_name}__"))


class Partition(keras.Variable):
    """The rows of one partition, at its owner.

    One without rows holds a row of zeros that nobody reads: Keras's own
    arithmetic trips over variables without rows.
    """

    def __init__(self, whole, values, index):
        self.num_rows = int(values.shape[0])
        super().__init__(
            _with_a_row(values),
            dtype=whole.dtype,
            # The tape watches the table's anchor, not its rows.
            trainable=False,
            autocast=False,
            name=whole.name,
        )
        make_current(self.value)
        # A name that an optimizer excludes is excluded in every partition.
        self._path = whole.path if index == 0 else f"{whole.path}_{index}"
        self.whole = whole
        self.constraint = whole.table.constraint

    def _initialize(self, value):
        if isinstance(value, tf.Variable):  # Keras 3.5 would copy it
            self._value = value
        else:
            super()._initialize(value)


def slot_like(slot, values, index):
    """A slot of a partition, with other rows, in place of those of `slot`.

    Args:
        slot: the slot of the first of a rank's partitions.
        values: its rows.
        index: which of the partitions it is of.
    """
    made = keras.Variable(
        _with_a_row(values), dtype=slot.dtype, trainable=False, name=slot.name
    )
    made._path = slot.path if index == 0 else f"{slot.path}_{index}"
    return made


def _with_a_row(values):
    return values if values.shape[0] else np.zeros((1, *values.shape[1:]))


def empty(variable):
    """Frees the memory of a variable, of which no row is used any more."""
    tf.raw_ops.AssignVariableOp(
        resource=variable.value.handle,
        value=tf.zeros([0, *variable.shape[1:]], variable.value.dtype),
    )


def storage(value, like):
    """A `tf.Variable` for the value of a Keras variable."""
    if isinstance(value, tf.Variable):
        return value
    # Tapes watch it also while the Keras variable is frozen: it may train
    # later.
    return tf.Variable(value, dtype=like.dtype, name=like.name)


def anchor(table_variable):
    """A scalar that the tape watches in place of rows that are elsewhere."""

    def refuse(*args, **kwargs):
        raise ValueError(
            f"The sharded table '{table_variable.table.owner_name}' was given "
            "to an optimizer that cannot update it. Wrap it: "
            "`ks.HybridOptimizer(optimizer)`; "
            "`with strategy.scope(): model.compile(...)` does so itself."
        )

    scalar = storage(np.zeros(()), table_variable)
    for method in _ASSIGNMENTS:
        setattr(scalar, method, refuse)
    return scalar


def pieces_of(variable):
    """The variables that hold this rank's part of a model's variable."""
    if isinstance(variable, TableVariable):
        return list(variable.table.pieces)
    return [variable]


def partitions_of(variable):
    """The number of a variable's partitions.

    Of a table in one process, as many as it is to have; None if that is the
    number of processes, and of a variable that is no table.
    """
    if not isinstance(variable, TableVariable):
        return None
    table = variable.table
    if table.is_sharded:
        return table.layout.num_partitions
    return table.requested_partitions


def to_numpy(value):
    """The array of a variable, tensor or array."""
    # NumPy warns when it is handed a variable itself.
    value = getattr(value, "value", value)
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)
