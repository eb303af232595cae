"""The form of a state on disk."""

import pytest

from keras_sparsity.checkpoint import state


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
