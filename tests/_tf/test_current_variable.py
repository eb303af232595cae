"""Every way to read or to write a variable asks its keeper."""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf import current_variable
from keras_sparsity._tf.current_variable import CurrentVariable, make_current

pytestmark = pytest.mark.smoke


class Keeper:
    """Adds 1 to what is read of rows, and counts the rest."""

    def __init__(self, is_replica):
        self.is_writing, self.is_replica = False, is_replica
        self.calls = []

    def settle(self):
        self.calls.append("settle")

    def note_write(self, variable):
        self.calls.append("written")

    def rows_now(self, variable, ids, rows):
        self.calls.append("rows")
        return rows + 1

    def whole_now(self, variable, stored):
        self.calls.append("whole")
        return stored + 1


def made(is_replica=False):
    variable = make_current(tf.Variable(np.zeros((4, 2), "float32")))
    variable.keeper = Keeper(is_replica)
    return variable


ROWS = tf.constant([1])
SLICES = tf.IndexedSlices(tf.ones([1, 2]), ROWS)
READS = {
    "value": lambda v: v.value(),
    "numpy": lambda v: v.numpy(),
    "read_value": lambda v: v.read_value(),
    "convert": tf.convert_to_tensor,
    "array": np.asarray,
    "item": lambda v: v[1:2],
    "sum": lambda v: v + 1,
    "concat": lambda v: tf.concat([v, v], 0),
    "square": tf.square,
    "raw": lambda v: tf.raw_ops.AddV2(x=v, y=1.0),
    "matmul": lambda v: tf.matmul(v, v, transpose_b=True),
    "gather_nd": lambda v: tf.gather_nd(v, [[1]]),
    "columns": lambda v: tf.gather(v, [1], axis=1),
}
ROW_READS = {
    "gather": lambda v: tf.gather(v, ROWS),
    "sparse_read": lambda v: v.sparse_read(ROWS),
    "lookup": lambda v: tf.nn.embedding_lookup(v, ROWS),
}
WRITES = {
    "assign": lambda v: v.assign(tf.ones([4, 2])),
    "assign_add": lambda v: v.assign_add(tf.ones([4, 2])),
    "assign_sub": lambda v: v.assign_sub(tf.ones([4, 2])),
    "item": lambda v: v[1:2].assign(tf.ones([1, 2])),
    "restore": lambda v: v._restore_from_tensors(
        {"VARIABLE_VALUE": tf.ones([4, 2])}
    ),
    **{
        name: lambda v, name=name: getattr(v, name)(SLICES)
        for name in ("add", "div", "max", "min", "mul", "sub", "update")
        for name in [f"scatter_{name}"]
    },
    **{
        name: lambda v, name=name: getattr(v, name)([[1]], tf.ones([1, 2]))
        for name in ("add", "max", "min", "sub", "update")
        for name in [f"scatter_nd_{name}"]
    },
}


def run(function, is_traced):
    return tf.function(function)() if is_traced else function()


@pytest.mark.parametrize(
    ("name", "is_traced"),
    [
        *((name, False) for name in READS),
        *((name, True) for name in READS if name not in ("numpy", "array")),
    ],
)
def test_all_of_it_is_read_once_it_is_settled(name, is_traced):
    variable = made()
    run(lambda: tf.convert_to_tensor(READS[name](variable)), is_traced)
    assert set(variable.keeper.calls) == {"settle"}


# Operations outside of functions read variables in C++.
IN_CPP = ("concat", "square", "raw", "matmul", "columns")


@pytest.mark.parametrize(
    ("name", "is_traced"),
    [
        *((name, False) for name in READS if name not in IN_CPP),
        *((name, True) for name in READS if name not in ("numpy", "array")),
    ],
)
def test_all_of_a_replica_is_read_without_a_change(name, is_traced):
    variable, ordinary = made(is_replica=True), tf.Variable(tf.ones([4, 2]))
    found = run(lambda: tf.convert_to_tensor(READS[name](variable)), is_traced)
    expected = tf.convert_to_tensor(READS[name](ordinary))
    np.testing.assert_array_equal(found, expected)
    assert set(variable.keeper.calls) == {"whole"}


@pytest.mark.parametrize("name", IN_CPP)
def test_a_replica_is_settled_before_it_is_read_in_cpp(name):
    variable = made(is_replica=True)
    READS[name](variable)
    assert "settle" in variable.keeper.calls


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("name", ROW_READS)
def test_rows_are_read_as_they_are_by_now(name, is_traced):
    variable = made()
    rows = run(lambda: ROW_READS[name](variable), is_traced)
    np.testing.assert_array_equal(rows, [[1, 1]])
    assert set(variable.keeper.calls) == {"rows"}


@pytest.mark.parametrize("name", WRITES)
def test_writing_settles_before_and_is_noted_behind(name):
    variable = made()
    WRITES[name](variable)
    calls = variable.keeper.calls
    assert calls[0] == "settle"
    assert "written" in calls
    if name.endswith(("update", "add", "max", "assign", "item", "restore")):
        assert np.any(variable.numpy() == 1)


def test_the_keeper_writes_as_it_likes():
    variable = made()
    variable.keeper.is_writing = True
    variable.scatter_update(SLICES)
    variable.read_value()
    assert variable.keeper.calls == []


def test_every_write_of_tensorflow_is_known():
    writes = {
        name
        for name in dir(CurrentVariable)
        if name.startswith(("assign", "scatter", "batch_scatter"))
    }
    assert writes <= set(current_variable._ASSIGNMENTS)


@pytest.mark.parametrize("uses", ["read", "rows", "write"])
def test_knows_whether_a_function_uses_it_as_it_is(uses):
    variable = make_current(tf.Variable(np.zeros((4, 2), "float32")))
    use = {
        "read": READS["value"],
        "rows": ROW_READS["gather"],
        "write": WRITES["assign"],
    }[uses]
    use(variable)
    assert not variable.is_traced
    tf.function(lambda: tf.constant(use(variable) is None))()
    assert variable.is_traced


def test_gradients_pass():
    variable = made()
    with tf.GradientTape() as tape:
        rows = tf.reduce_sum(tf.gather(variable, ROWS) * 3.0)
    gradient = tape.gradient(rows, variable)
    np.testing.assert_array_equal(gradient.values, [[3, 3]])


def test_other_values_with_the_gradients_of_the_variable():
    variable = make_current(tf.Variable([[1.0], [2.0], [3.0]]))

    class Reader:
        def rows(self, ids):
            return 10 * tf.gather(variable, ids)

        def whole(self):
            return 100 * variable.read_value()

    @tf.function
    def read(ids):
        with (
            tf.GradientTape() as tape,
            current_variable.read_by({id(variable): Reader()}),
        ):
            rows = tf.gather(variable, ids)
            whole = tf.convert_to_tensor(variable)
        return rows, whole, tape.gradient([rows, whole], variable)

    rows, whole, gradient = read([[2, 0], [2, 2]])
    np.testing.assert_array_equal(rows[..., 0], [[30, 10], [30, 30]])
    np.testing.assert_array_equal(whole[:, 0], [100, 200, 300])
    gradient = tf.convert_to_tensor(gradient)
    np.testing.assert_array_equal(gradient[:, 0], [1 + 1, 1, 3 + 1])
    np.testing.assert_array_equal(variable[:, 0], [1, 2, 3])
