"""Rows in 8 bits: errors against NumPy, bytes, and training on processes."""

import collections
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.board import model_plan
from keras_sparsity.exchange import row_wire
from keras_sparsity.exchange.options import Options
from keras_sparsity.exchange.row_wire import RowWire
from tests.conftest import covering, engines
from tests.exchange.test_pull import measured

FLOAT32 = tf.float32


def carried(rows, **options):
    """What arrives of rows, and the int32 columns that travel."""
    sent = []

    def send(encoded):
        sent.append(encoded)
        return encoded

    wire = RowWire(tf.as_dtype(rows.dtype), **options)
    return wire.carry(rows, send), sent[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("width", [1, 6, 64])
def test_rows_are_rounded_to_the_nearest_level(width, dtype):
    rows = np.random.default_rng(0).normal(size=(20, width)) * 3
    rows[3] = 0
    rows = tf.cast(rows, dtype)
    arrived, sent = carried(rows)
    assert arrived.dtype == rows.dtype and arrived.shape == rows.shape
    assert sent.dtype == tf.int32
    assert sent.shape[1] * 4 == RowWire(rows.dtype).num_bytes(width)
    wide = tf.cast(rows, tf.float64).numpy()
    level = np.abs(wide).max(axis=1, keepdims=True) / 127
    error = np.abs(tf.cast(arrived, tf.float64).numpy() - wide)
    own = {"float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 1e-6)
    assert (error <= level * 0.5001 + own * np.abs(wide)).all()
    np.testing.assert_array_equal(arrived[3], 0)


def test_rows_of_several_axes_and_none():
    rows = tf.reshape(tf.range(24.0), [2, 3, 4])
    np.testing.assert_allclose(carried(rows)[0], rows, atol=23 / 254)
    assert carried(tf.zeros([0, 8]))[0].shape == (0, 8)


def test_a_row_that_is_not_finite_arrives_as_nan():
    rows = tf.constant([[1.0, np.inf], [np.nan, 2.0], [3.0, 1.5]])
    arrived = carried(rows)[0].numpy()
    assert np.isnan(arrived[:2]).all()
    np.testing.assert_allclose(arrived[2], [3.0, 1.5], atol=0.02)


def test_drawn_gradients_have_the_values_as_their_mean():
    gradients = tf.constant([[1.0, 0.3021, -0.0017, 0.2555]] * 4)
    mean, count = 0.0, 400
    first, again = [], []
    for number in range(count):
        with row_wire.in_step(tf.constant(number)):
            arrived = carried(gradients, is_drawn=True, role="a", rank=1)[0]
            first.append(arrived.numpy())
            if number < 3:
                again.append(
                    carried(gradients, is_drawn=True, role="a", rank=1)[0]
                )
        mean = mean + arrived.numpy() / count
    assert not row_wire._steps
    np.testing.assert_array_equal(first[:3], again)  # repeatable
    # The deviation of a mean of 1,600 draws is a level / (2 * 40).
    expected = gradients.numpy().mean(axis=0)
    level = 1 / 127
    np.testing.assert_allclose(mean.mean(axis=0), expected, atol=level / 16)
    nearest = np.round(expected[1] * 127) / 127
    assert abs(nearest - expected[1]) > level / 8  # what rounding would give
    other = [
        carried(gradients, is_drawn=True, role="a", rank=rank)[0].numpy()
        for rank in (0, 1)
    ]
    assert np.any(other[0] != other[1])


def test_which_wire():
    options = Options(wire_dtype="int8")
    assert isinstance(options.row_wire(FLOAT32, 64), RowWire)
    assert options.gradient_wire(FLOAT32, 64, "a", 3) == RowWire(
        FLOAT32, is_drawn=True, role="a", rank=3
    )
    # Shorter rows, and all else, travel in 16 bits.
    assert options.row_wire(FLOAT32, 4).dtype == tf.bfloat16
    assert options.wire(FLOAT32).dtype == tf.bfloat16


DIM, ROWS = 64, 40


def train(wire_dtype, architecture, prefetch=False, dims=(DIM, DIM)):
    """The sparse bytes, the losses and the tables of a short training."""
    strategy = ks.HybridStrategy(
        architecture=architecture, wire_dtype=wire_dtype, prefetch=prefetch
    )
    keras.utils.set_random_seed(1)
    inputs = [keras.Input((4,), dtype="int32") for _ in dims]
    layers = [
        ks.layers.ShardedEmbedding(ROWS, dim, name=f"table_{i}")
        for i, dim in enumerate(dims)
    ]
    rows = [
        keras.layers.GlobalAveragePooling1D()(layer(ids))
        for layer, ids in zip(layers, inputs, strict=True)
    ]
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(rows))
    model = keras.Model(inputs, outputs)
    with strategy.scope():
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
    random = np.random.default_rng(0)
    x = [random.integers(0, ROWS, (64, 4)) for _ in dims]
    y = np.sin(x[0][:, :1]).astype("float32")
    with measured() as sent:
        history = model.fit(
            x, y, batch_size=16, epochs=4, shuffle=False, verbose=0
        )
    of_rows = collections.Counter(
        {
            role: count
            for role, count in sent.items()
            if "/pull/" in role or "/push/" in role or "optimizer/rows" in role
        }
    )
    tables = [layer.table.read() for layer in layers]
    return of_rows.total(), history.history["loss"], tables


def check_near(ranks, wide, atol):
    for (_, losses, tables), (_, of_wide, wide_tables) in zip(
        ranks, wide, strict=True
    ):
        np.testing.assert_allclose(losses, of_wide, rtol=0.02)
        assert losses[-1] < 0.9 * losses[0]
        for found, expected in zip(tables, wide_tables, strict=True):
            np.testing.assert_allclose(found, expected, atol=atol)
            assert np.abs(found - expected).max() > 0  # it did travel so


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_training_with_rows_in_8_bits(cluster, engine):
    processes = cluster(engine, 2)
    wide = processes.run(train, None, "hybrid")
    ranks = processes.run(train, "int8", "hybrid")
    check_near(ranks, wide, 0.05)
    narrow, float32 = (sum(r[0] for r in found) for found in (ranks, wide))
    assert 0 < narrow <= 0.30 * float32
    again = processes.run(train, "int8", "hybrid")
    prefetched = processes.run(train, "int8", "hybrid", True)
    for one, other, ahead in zip(ranks, again, prefetched, strict=True):
        assert one[1] == other[1] == ahead[1]
        np.testing.assert_array_equal(one[2], other[2])
        np.testing.assert_array_equal(one[2], ahead[2])


@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize(
    ("architecture", "dims"),
    [
        ("allgather", (DIM, DIM)),
        ("hybrid", (64, 16)),
        ("naive_ps", (DIM, DIM)),
    ],
)
def test_other_routes(cluster, engine, architecture, dims):
    processes = cluster(engine, 2)
    wide = processes.run(train, None, architecture, False, dims)
    ranks = processes.run(train, "int8", architecture, False, dims)
    check_near(ranks, wide, 0.05)
    np.testing.assert_array_equal(ranks[0][2][0], ranks[1][2][0])


def test_through_machines(cluster):
    """Also of rows that are too short, which travel in 16 bits."""
    processes = cluster("native", 4, machines=2)
    wide, ranks = (
        processes.run(train, wire_dtype, "hybrid", False, (64, 16))
        for wire_dtype in (None, "int8")
    )
    check_near(ranks, wide, 0.05)


def planned_and_sent(architecture):
    """Bytes that a rank sends in a step of rows: planned, and counted."""
    strategy = ks.HybridStrategy(architecture=architecture, wire_dtype="int8")
    ids = keras.Input((4,), dtype="int32")
    table = ks.layers.ShardedEmbedding(ROWS, DIM)
    model = keras.Model(ids, table(ids))
    with strategy.scope():
        model.compile("adagrad", "mse")
    # Each rank touches all rows in each step, so that nothing is estimated.
    x = np.tile(np.arange(ROWS).reshape(-1, 4), (4, 1))
    y = np.zeros((len(x), 4, DIM))
    with measured() as sent:
        model.fit(x, y, batch_size=len(x) // 2, verbose=0, shuffle=False)
    (of_table,) = model_plan.of_running(model).variables
    of_path = of_table.costs[of_table.architecture]
    return of_path.sent_bytes[0], sum(sent.values()) / 2


@pytest.mark.parametrize(
    ("engine", "architecture"),
    covering(
        itertools.product(("native", "horovod"), ("hybrid", "allgather")),
        [("native", "hybrid"), ("horovod", "allgather")],
    ),
)
def test_plans_count_8_bits(cluster, engine, architecture):
    for planned, counted in cluster(engine, 2).run(
        planned_and_sent, architecture
    ):
        assert planned == pytest.approx(counted, rel=0.02)
