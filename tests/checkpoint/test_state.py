"""The form of a state on disk."""

import types

import keras
import numpy as np
import pytest

from keras_sparsity.checkpoint import state
from keras_sparsity.exchange.layout import Layout


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(None, True), (1.5, True), ("low", True), (float("inf"), False)],
)
def test_a_loss_that_is_no_number_is_not_spoiled(loss, expected):
    assert state.is_finite(loss) is expected


@pytest.mark.parametrize(
    ("row_shape", "dtype", "between", "expected"),
    [
        ((3,), "float32", 1, 8),
        ((3,), "bfloat16", 1, 16),
        ((), "float64", 1, 12),
        ((3,), "float32", 2, 4),
        ((2, 3), "float32", 1, 4),
        ((24,), "float32", 1, 1),
        ((100,), "float32", 1, 1),  # one is more than there is to be
        ((0,), "float32", 1, 99),
    ],
)
def test_rows_in_memory_at_a_time(
    monkeypatch, row_shape, dtype, between, expected
):
    monkeypatch.setattr(state, "_BLOCK_BYTES", 99)
    assert state._rows_of_block(row_shape, dtype, between) == expected


def test_which_variables_are_the_same_on_all_ranks():
    norm = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((3,)), norm])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    entries = state.entries(model)
    own = norm.moving_mean, norm.moving_variance, *model.metrics_variables
    names = {entry.name for entry in entries if not entry.is_replicated}
    assert names == {variable.path for variable in own}
    # The norm's four; step, rate and moments of two; the loss.
    sections = [entry.section for entry in entries]
    assert sections == ["model"] * 4 + ["optimizer"] * 6 + ["metrics"] * 2
    # Owners have the rows of a frozen table, too.
    rows = keras.Variable(np.ones((3, 2)), trainable=False)
    table = types.SimpleNamespace(num_rows=6, layout=Layout(6, 2))
    frozen = state._entry("model", [rows, rows], table, is_replicated=False)
    assert frozen.is_replicated and frozen.shape == (6, 2)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((5, 3), [(0, 2), (2, 4), (4, 5)]), ((3, 3), [(0, 2), (2, 3)])],
)
def test_blocks_of_a_variable(monkeypatch, shape, expected):
    monkeypatch.setattr(state, "_BLOCK_BYTES", 24)
    values = np.arange(15, dtype="float32").reshape(5, 3)
    found = list(state._pieces(keras.Variable(values), shape))
    assert [(place.start, place.stop) for place, _ in found] == expected
    for place, block in found:
        np.testing.assert_array_equal(block, values[place])
