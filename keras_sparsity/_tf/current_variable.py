"""Variables whose readers see every row as it is by now.

Checked on TensorFlow 2.16 to 2.21.
"""

import contextlib

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from keras_sparsity._tf import contexts, keras_scopes, tf_graphs

_ASSIGNMENTS = (
    *("assign", "assign_add", "assign_sub", "_restore_from_tensors"),
    *("scatter_add", "scatter_div", "scatter_max", "scatter_min"),
    *("scatter_mul", "scatter_sub", "scatter_update", "batch_scatter_update"),
    *("scatter_nd_add", "scatter_nd_max", "scatter_nd_min"),
    *("scatter_nd_sub", "scatter_nd_update", "_strided_slice_assign"),
)


# While it is not empty, rows are read as they are stored.
_as_stored = []
# Readers of some variables, by `id`; the last ones count.
_readers = []


def read_as_stored(keepers):
    """While entered, functions are traced that read rows as they are stored.

    For functions that are saved, with all rows up to date.

    Args:
        keepers: of all variables that these functions read.
    """
    for keeper in keepers:
        keeper.settle()
    return contexts.on_top(_as_stored, True)


def read_by(readers):
    """While entered, functions are traced that read other values of variables.

    Args:
        readers: dict from the `id`s of `CurrentVariable`s to objects with
            `rows(ids)`, of ids without duplicates, and `whole()`. These give
            the values in place of the variable's, which they may read; the
            gradients are the variable's.
    """
    return contexts.on_top(_readers, readers)


class CurrentVariable(ResourceVariable):
    """A variable of which some rows may be behind, but for its readers.

    An optimizer may leave rows behind that a step moves without a gradient. It
    then sets `keeper`, which knows how far each row is behind:

    - rows that are read arrive as they would be by now (`rows_now`),
    - before all of it is read, or anything is written from outside, the keeper
      brings all rows up to date (`settle`); all of a replica arrives as it
      would be by now (`whole_now`).

    TensorFlow's own reads and writes all pass through what is overridden here.

    Attributes:
        keeper: object with `settle`, `rows_now`, `rows_after_step`,
            `whole_now`, `note_write`, `is_writing` and `is_replica`; None: an
            ordinary variable.
        is_traced: whether a traced function reads or writes it as an ordinary
            variable: then it has to remain one.
        is_looked_up: whether a look-up is to read its rows alone, also without
            a keeper.
    """

    keeper = None
    is_traced = False
    is_looked_up = False

    def _settle(self):
        if _as_stored:
            return
        if self.keeper is not None:
            self._check_is_not_compiled()
            if not self.keeper.is_writing:
                self.keeper.settle()
        elif not (tf.executing_eagerly() or keras_scopes.in_symbolic_scope()):
            self.is_traced = True

    def _check_is_not_compiled(self):
        # XLA pads tensors of unknown length, of which it gave wrong rows.
        if tf_graphs.is_compiled_by_xla():
            raise ValueError(
                f"XLA cannot compile a function that reads {self.name}, whose "
                "rows an optimizer brings up to date when they are read. "
                "Received: jit_compile=True. Trace with jit_compile=False, or "
                "compile the model with jit_compile=True inside of "
                "`strategy.scope()` before its optimizer is built."
            )

    @property
    def _handle(self):
        # Operations outside of functions read variables by it, in C++.
        self._settle()
        return self.__dict__["_handle"]

    @_handle.setter
    def _handle(self, handle):
        self.__dict__["_handle"] = handle

    @property
    def handle(self):
        return self.__dict__["_handle"]

    @property
    def _is_copied(self):
        """Whether reading all of it stores nothing."""
        keeper = self.keeper
        is_replica = keeper is not None and keeper.is_replica
        return is_replica and not keeper.is_writing and not _as_stored

    @property
    def _reader(self):
        return _readers[-1].get(id(self)) if _readers else None

    def _read_variable_op(self, *args, **kwargs):
        reader = self._reader
        if reader is not None:
            stored = super()._read_variable_op(*args, **kwargs)
            with _by_itself():
                return with_gradient_of(stored, reader.whole())
        if not self._is_copied:
            self._settle()
            return super()._read_variable_op(*args, **kwargs)
        self._check_is_not_compiled()
        stored = super()._read_variable_op(*args, **kwargs)
        return self.keeper.whole_now(self, stored)

    def gather_nd(self, indices, name=None):
        if self._is_copied:
            return tf.gather_nd(self.read_value(), indices, name=name)
        self._settle()
        return super().gather_nd(indices, name=name)

    def sparse_read(self, indices, name=None):
        rows = super().sparse_read(indices, name=name)
        reader = self._reader
        if reader is not None:
            unique, index = tf.unique(tf.reshape(indices, [-1]))
            with _by_itself():
                found = reader.rows(unique)
            index = tf.reshape(index, tf.shape(indices))
            return with_gradient_of(rows, tf.gather(found, index))
        if self.keeper is None or _as_stored:
            self._settle()
            return rows
        self._check_is_not_compiled()
        return self.keeper.rows_now(self, indices, rows)

    def _export_to_saved_model_graph(self, *args, **kwargs):
        if self.keeper is not None and not _as_stored:
            raise ValueError(
                f"The variable {self.name} is the table of a model in training "
                "or one of its slots: functions that read it also read the "
                "state of its optimizer, so a SavedModel cannot hold them. "
                "Export the model by `model.export`, or save "
                "`ks.export(model)`, which is a stock Keras model."
            )
        return super()._export_to_saved_model_graph(*args, **kwargs)


def _settled_before(name):
    stock = getattr(ResourceVariable, name)

    def method(self, *args, **kwargs):
        self._settle()
        result = stock(self, *args, **kwargs)
        if self.keeper is not None and not self.keeper.is_writing:
            self.keeper.note_write(self)
        return result

    return method


for _name in _ASSIGNMENTS:
    setattr(CurrentVariable, _name, _settled_before(_name))


@contextlib.contextmanager
def _by_itself():
    """Context of a reader, which reads variables in their own dtypes."""
    with read_by({}), keras_scopes.without_autocast():
        yield


def with_gradient_of(rows, result):
    """A result, of the shape of the rows, whose gradient is theirs."""

    @tf.custom_gradient
    def replaced(rows, result):
        return tf.identity(result), lambda upstream: (upstream, None)

    result.set_shape(rows.shape)
    return replaced(rows, result)


def make_current(variable):
    """Makes a `tf.Variable` a `CurrentVariable`; returns it.

    In place: optimizers and traced functions hold the object already.
    """
    if type(variable) is ResourceVariable:
        variable.__class__ = CurrentVariable
    return variable


def keeper_of(variable):
    """The keeper of a `tf.Variable`, or None."""
    return getattr(variable, "keeper", None)


def stored_rows(variable, indices):
    """Rows as they are stored, behind or not."""
    return tf.raw_ops.ResourceGather(
        resource=variable.handle, indices=indices, dtype=variable.dtype
    )


def rows_after_step(variable, indices):
    """Rows as they will be after the step under way, if it updates none."""
    keeper = keeper_of(variable)
    if keeper is None:
        return tf.gather(variable, indices)
    return keeper.rows_after_step(variable, indices)


def store_rows(variable, indices, rows):
    """Stores rows, without any regard to others."""
    tf.raw_ops.ResourceScatterUpdate(
        resource=variable.handle, indices=indices, updates=rows
    )
