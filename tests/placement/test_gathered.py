"""Gathered rows of many variables: messages, and bits against NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.data import empty_parts
from keras_sparsity.exchange.options import Options
from keras_sparsity.health import journal
from keras_sparsity.placement.base import Update
from keras_sparsity.placement.gathered import AllGather
from tests.conftest import engines
from tests.layers.test_sharded_embedding_collection import (
    MANY,
    OwnStep,
    Tables,
    custom_loop,
    fitted,
    messages_of,
)
from tests.training.test_foresight import functional, stock

# Rows, dtype and shape of a row: indices of 16 and 32 bits.
VARIABLES = [
    (30, "float32", (3,)),
    (70_000, "float32", (5,)),
    (9, "bfloat16", (2, 4)),
    (70_000, "float64", ()),
    (500, "float16", (1,)),
]


def own_rows(rank, number):
    """Indices and gradients of one rank for a variable: some, or none."""
    rows, _, shape = VARIABLES[number]
    random = np.random.default_rng([rank, number])
    count = (rank + number) % 3 * 4
    indices = random.integers(rows, size=count)
    return indices, random.normal(size=(count, *shape))


def gather(numbers, is_merged, has_examples=True):
    """Indices, gradients and counts of all ranks, in one step."""
    ranks = ks.collectives.current()
    variables = [
        keras.Variable(np.zeros((rows, *shape)), dtype=dtype, name=f"v{number}")
        for number, (rows, dtype, shape) in enumerate(VARIABLES)
    ]

    @tf.function
    def step():
        updates = []
        for number in numbers:
            indices, values = own_rows(ranks.rank, number)
            variable = variables[number]
            gradient = tf.IndexedSlices(
                tf.cast(values, variable.dtype),
                tf.constant(indices, tf.int64),
                tf.constant(list(variable.shape), tf.int64),
            )
            updates.append(Update(variable, gradient, variable, True))
        AllGather.reduce(updates, ranks, Options(merges=is_merged))
        return [
            (u.gradient.indices, u.gradient.values, u.touched[1]())
            for u in updates
        ]

    count = tf.constant([int(has_examples)], tf.int64)
    with empty_parts.computing_on(empty_parts.Part(count, ranks)):
        found = step()
    # NumPy has no bfloat16 of its own.
    return [
        (i.numpy(), v.numpy().astype("float64"), c.numpy()) for i, v, c in found
    ]


def gather_all():
    """Without duplicates, with them, of one variable, and of a rank's none."""
    rank = ks.collectives.current().rank
    numbers = range(len(VARIABLES))
    return (
        gather(numbers, is_merged=True),
        gather(numbers, is_merged=False),
        gather([1], is_merged=False),
        gather(numbers, is_merged=False, has_examples=rank > 0),
    )


@pytest.mark.parametrize("engine", engines())
def test_rows_of_all_ranks_to_the_bit(engine, cluster):
    size = 2
    for merged, *others in cluster(engine, size).run(gather_all):
        cases = zip(others, ([], [0, 2, 3, 4], []), (0, 0, 1), strict=True)
        for found, left_out, first in cases:
            numbers = [n for n in range(len(VARIABLES)) if n not in left_out]
            for number, (indices, values, counts) in zip(
                numbers, found, strict=True
            ):
                ranks = [own_rows(rank, number) for rank in range(first, size)]
                expected = [
                    np.concatenate(each) for each in zip(*ranks, strict=True)
                ]
                dtype = VARIABLES[number][1]
                np.testing.assert_array_equal(indices, expected[0])
                rounded = tf.cast(tf.cast(expected[1], dtype), "float64")
                np.testing.assert_array_equal(values, rounded)
                assert counts.tolist() == [0] * first + [
                    len(own) for own, _ in ranks
                ]
        for number, (indices, values, counts) in enumerate(merged):
            ranks = [np.unique(own_rows(r, number)[0]) for r in range(size)]
            assert counts.tolist() == [len(own) for own in ranks]
            parts = np.split(indices, np.cumsum(counts)[:-1])
            for part, own in zip(parts, ranks, strict=True):
                np.testing.assert_array_equal(np.sort(part), own)
            assert len(values) == len(indices)


KINDS = {
    "subclassed": (Tables, fitted, False),
    "functional": (functional, fitted, keras.Model),
    "own step": (OwnStep, fitted, False),
    "custom loop": (Tables, custom_loop, False),
}


def messages():
    """Messages of one ordinary embedding and of many, and their roles."""
    found = {
        kind: [
            messages_of(make, runs, n, stock, *args, architecture="hybrid")
            for n in (1, MANY)
        ]
        for kind, (make, runs, *args) in KINDS.items()
    }
    # Its first steps gather tables as small as these.
    make, runs, *args = KINDS["subclassed"]
    found["auto"] = [
        found["subclassed"][0],
        messages_of(make, runs, 5, stock, *args, architecture="auto"),
    ]
    roles = {role for role, _ in journal.current().totals()}
    return found, {role for role in roles if role.startswith(AllGather.role)}


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_many_embeddings_make_as_many_messages_as_one(engine, cluster):
    for found, roles in cluster(engine, 2).run(messages, timeout=400):
        for kind, (one, many) in found.items():
            assert one == many > 2, kind  # of rows, and of dense gradients
        assert roles == {f"{AllGather.role}counts", f"{AllGather.role}values"}
