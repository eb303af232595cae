"""Tables whose rows travel together."""

import types

import pytest

from keras_sparsity.exchange.layout import Layout
from keras_sparsity.exchange.together import travel_side_by_side

LAYOUT = Layout(8, 2, (0, 1))


def table(layout, dtype="float32"):
    return types.SimpleNamespace(
        layout=layout,
        variable=types.SimpleNamespace(dtype=dtype),
        is_sharded=layout is not None,
    )


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ([table(LAYOUT)], True),
        ([table(LAYOUT), table(Layout(8, 2, (0, 1)))], True),
        ([table(LAYOUT), table(Layout(8, 2, (1, 0)))], False),
        ([table(LAYOUT), table(LAYOUT, "float16")], False),
        ([table(LAYOUT), table(None)], False),
        ([table(None), table(None)], False),
    ],
)
def test_tables_with_the_same_rows_at_each_owner(tables, expected):
    assert travel_side_by_side(tables) == expected
