"""Pieces of variables at servers."""

import keras
import numpy as np
import pytest

from keras_sparsity.asynchronous.stored import joined, placed

OWNERS = [4, 5, 6]


def _placed(*shapes):
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    optimizer = keras.optimizers.Adagrad()
    optimizer.build(variables)
    return placed(optimizer, variables, variables[:1], OWNERS)


@pytest.mark.parametrize(
    "shape, number",
    [
        ((10_001, 3), 3),
        ((12_288,), 3),  # 48 kB
        ((12_287,), 2),
        ((8_191,), 1),
        ((2, 10_000, 2), 2),
        ((1, 100_000), 1),
        ((), 1),
    ],
)
def test_large_variables_are_cut(shape, number):
    (stored,) = _placed(shape)
    assert len({piece.server for piece in stored.pieces}) == number
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    parts = [value[piece.rows] for piece in stored.pieces]
    assert [part.shape for part in parts] == [p.shape for p in stored.pieces]
    rows = [piece.rows for piece in stored.pieces]
    np.testing.assert_array_equal(joined(rows, parts, shape), value)


@pytest.mark.parametrize("num_rows", [50, 9_000])
def test_rows_are_found_in_the_pieces(num_rows):
    (stored,) = _placed((num_rows, 2))
    assert len(stored.pieces) == (1 if num_rows == 50 else 3)
    value = np.random.default_rng(1).normal(size=(num_rows, 2))
    for ids in (np.array([49, 0, 7, 3, 49]), np.array([6]), np.array([], int)):
        parts, places = [], []
        for piece, (numbers, place) in zip(
            stored.pieces, stored.cut(ids), strict=True
        ):
            parts.append(value[piece.rows][numbers])
            places.append(place)
        found = joined(places, parts, (len(ids), 2))
        np.testing.assert_array_equal(found, value[ids])


def test_servers_have_equal_shares():
    found = _placed((20_000, 16), *[(5_000,)] * 4, *[(100,)] * 40)
    num_bytes = dict.fromkeys(OWNERS, 0)
    for stored in found:
        for piece in stored.pieces:
            num_bytes[piece.server] += 4 * np.prod(piece.shape)
    assert max(num_bytes.values()) <= 1.05 * min(num_bytes.values())
