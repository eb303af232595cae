"""Two runs of ordinary embeddings, and of tied tables, are equal to the bit.

Under the default strategy. Those of other tables:
`callbacks/test_auto_architecture.py`.
"""

import time
from unittest import mock

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity.callbacks import auto_architecture
from keras_sparsity.placement import choice
from tests import oracles
from tests.conftest import engines
from tests.layers import test_sampled_softmax, test_tied

BATCH, TIME, DIM = 32, 5, 3
STEPS = auto_architecture._FIRST_STEPS + 4  # some of them after the moves
# Where each begins, and where it goes.
ROWS = {"spread": 150_000, "gathered": 50_000, "mirrored": 8}
PLACEMENTS = [
    ("ps", "allgather"),
    ("allgather", "allgather"),
    ("allgather", "allreduce"),
]
# Of those, the first has more bytes.
WHOLE_BYTES = 1_000_000


class Ordinary(keras.Model):
    """A subclassed model of ordinary embeddings and a tied weight."""

    def __init__(self):
        super().__init__()
        self.tables = [
            keras.layers.Embedding(rows, DIM, name=name)
            for name, rows in ROWS.items()
        ]
        self.last = keras.layers.Dense(1)

    def call(self, ids):
        rows = [
            table(ids % table.input_dim) + table(ids[:, ::-1] // 3 % 8)
            for table in self.tables
        ]
        return self.last(keras.ops.mean(keras.ops.stack(rows), axis=(0, 2)))


def ordinary():
    ids = np.random.default_rng(1).zipf(1.2, (STEPS * BATCH, TIME))
    ids = ids.astype("int32") % ROWS["spread"]
    return Ordinary(), "mse", ids, np.sin(ids[:, :1]).astype("float32")


def tied():
    """`SampledSoftmax(table=...)`, whose rows are looked up, too."""
    model, softmax = test_tied.subclassed()
    ids = oracles.zipf_ids(
        np.random.default_rng(1),
        test_sampled_softmax.NUM_CLASSES,
        (STEPS * BATCH, TIME),
    )
    return model, softmax.loss(), ids, ids[:, ::-1]


def train(make, slow_rank):
    """Weights, losses and placements of a run with a rank that waits."""
    keras.utils.set_random_seed(5)
    model, loss, x, y = make()
    strategy = ks.HybridStrategy()
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.01), loss)

    told = []

    def end_of_step(batch, logs):
        told.append(
            [
                strategy.placements.of(variable).name
                for variable in model.trainable_variables[: len(ROWS)]
            ]
        )
        time.sleep(0.02 * (slow_rank == strategy.rank and batch % 3 == 0))

    with mock.patch.object(
        auto_architecture.AutoArchitecture, "_pays", lambda *_: True
    ):
        history = model.fit(
            x,
            y,
            batch_size=BATCH,
            verbose=0,
            callbacks=[
                keras.callbacks.LambdaCallback(on_train_batch_end=end_of_step)
            ],
        )
    bits = [weight.tobytes() for weight in model.get_weights()]
    moves = list(zip(told[0], told[-1], strict=True))
    return bits, history.history["loss"], moves


def train_all(slow_rank):
    with mock.patch.object(choice, "_WHOLE_BYTES", WHOLE_BYTES):
        return [train(make, slow_rank) for make in (ordinary, tied)]


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_two_runs_are_equal_to_the_bit(engine, cluster):
    processes = cluster(engine, 2)
    one = processes.run(train_all, 0, timeout=200)
    processes.stop()  # the other run has processes of its own
    other = processes.run(train_all, 1, timeout=200)
    assert one[0] == one[1] == other[0] == other[1]
    (_, losses, moves), (_, of_tied, _) = one[0]
    assert moves == PLACEMENTS
    assert np.isfinite(losses + of_tied).all()
