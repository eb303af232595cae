"""New placements: two that are defined here, and train."""

import contextlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.board import model_plan
from keras_sparsity.data import empty_parts
from keras_sparsity.exchange.layout import Layout
from keras_sparsity.placement import choice, slices
from keras_sparsity.placement.base import Placement, Reducer
from keras_sparsity.placement.owned import Owners
from keras_sparsity.planning import TransferBytes
from tests import oracles
from tests.conftest import engines

ROWS, DIM, IDS, BATCH, STEPS = 30, 4, 3, 8, 6


class OnLastRank(Placement):
    """The last rank owns all rows of a table."""

    name = "on last rank"
    reducers = Owners, Owners

    def __init__(self, layout):
        ranks = range(layout.num_owners)
        self.layout = Layout(layout.num_rows, 1, tuple(reversed(ranks)))


class Shouts(Reducer):
    path = "shouts"
    role = "shouts/"

    @classmethod
    def reduce(cls, updates, communicator, options):
        for update in updates:
            gradient = update.gradient
            if update.is_of_rows:
                rows = empty_parts.cut_slices(gradient)
                update.touched = rows.indices, None
                gradient = slices.dense(rows, update.variable.shape[0])
            gathered = communicator.all_gather(
                gradient[tf.newaxis], name=f"shouts/{update.variable.path}"
            )
            update.gradient = tf.reduce_sum(gathered, axis=0)

    @classmethod
    def transfer_bytes(cls, spec, traffic):
        others = traffic.cluster.size - 1
        of_each = (others * spec.num_bytes(),) * traffic.cluster.num_machines
        return TransferBytes(of_each, of_each, (0,) * len(of_each))


class Shouted(Placement):
    """Every rank sends its gradients to all, and sums them by itself."""

    name = "shouted"
    reducers = Shouts, Shouts


@contextlib.contextmanager
def new_ones():
    """Has `choice` know the new placements, and an architecture of them."""
    architecture = choice.Architecture("on last rank", "shouted")
    of_tables = {"on last rank": lambda layout: OnLastRank(layout())}
    with (
        mock.patch.dict(choice.ARCHITECTURES, new=architecture),
        mock.patch.dict(choice.OF_TABLES, of_tables),
        mock.patch.dict(choice.OF_OTHERS, shouted=Shouted),
    ):
        yield


def network(sharded):
    words = keras.Input((IDS,), dtype="int32")
    tables = [
        sharded(ROWS, DIM, name="table"),
        keras.layers.Embedding(ROWS, DIM, name="ordinary"),
    ]
    hidden = keras.layers.Concatenate()([table(words) for table in tables])
    out = keras.layers.Dense(1, name="kernel")(keras.layers.Flatten()(hidden))
    model = keras.Model(words, out)
    random = np.random.default_rng(4)
    model.set_weights([random.normal(size=v.shape) for v in model.weights])
    return model


def data():
    random = np.random.default_rng(3)
    ids = random.zipf(1.5, size=(BATCH * STEPS, IDS)) % ROWS
    return ids, random.normal(size=(BATCH * STEPS, 1)).astype("float32")


def fit(model):
    model.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0)


def train(by_way_of):
    """Weights, number of rows on this rank, bytes in the running plan."""
    with new_ones():
        strategy = ks.HybridStrategy(architecture="new")
        model = network(ks.layers.ShardedEmbedding)
        with strategy.scope():
            model.compile(keras.optimizers.Adagrad(0.1), "mse")
        fit(model)
        table = model.get_layer("table").table
        if by_way_of:
            ks.moves.move(model, {table: by_way_of})
            assert table.architecture == by_way_of
        fit(model)
        if by_way_of:
            ks.moves.move(model, {table: "on last rank"})
        fit(model)
        planned = [
            v.costs["shouts"].busiest_bytes
            for v in model_plan.of_running(model).variables
            if v.architecture == "shouts"
        ]
        stored = sum(piece.num_rows for piece in table.partitions)
        return model.get_weights(), stored, planned


@pytest.mark.parametrize("engine", engines(usually="native"))
@pytest.mark.parametrize(
    "by_way_of",
    [
        pytest.param(None, marks=pytest.mark.all_cells),
        "ps",
        pytest.param("allreduce", marks=pytest.mark.all_cells),
    ],
)
def test_new_placements_train_as_stock_keras_does(engine, by_way_of, cluster):
    stock = network(keras.layers.Embedding)
    oracles.dense_reference(stock, keras.optimizers.Adagrad(0.1), loss="mse")
    for _ in range(3):
        fit(stock)
    results = cluster(engine, 2).run(train, by_way_of)
    assert [stored for _, stored, _ in results] == [0, ROWS]
    sizes = [ROWS * DIM, 2 * IDS * DIM, 1]
    for weights, _, planned in results:
        for ours, theirs in zip(weights, stock.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
        # Bytes of float32 that a rank sends the other, and receives.
        assert planned == [2 * 4 * size for size in sizes]
