"""What the ranks run in tests of moves."""

import keras
import numpy as np

import keras_sparsity as ks
from keras_sparsity import saving

ROWS, STEPS, BATCH = 23, 12, 8


class MoveAt(keras.callbacks.Callback):
    """Moves the model's tables after some executions of a `fit`.

    Args:
        moves: dict from the number of executions to the tables' numbers of
            partitions then.
    """

    def __init__(self, moves):
        super().__init__()
        self._moves = moves
        self._executions = 0

    def on_train_batch_end(self, batch, logs=None):
        self._executions += 1
        if self._executions in self._moves:
            counts = self._moves[self._executions]
            tables = saving.tables_of(self.model)
            ks.moves.repartition(
                self.model, dict(zip(tables, counts, strict=True))
            )


def data():
    rng = np.random.default_rng(3)
    ids = rng.zipf(1.3, (STEPS * BATCH, 4)) % ROWS
    return ids.astype("int32"), rng.integers(0, 3, len(ids))


def build(optimizer, partitions=(3, 2), sparse_updates="exact", **arguments):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,), dtype="int32")
    features = [
        keras.layers.Flatten()(
            ks.layers.ShardedEmbedding(ROWS, 3, num_partitions=count)(inputs)
        )
        for count in partitions
    ]
    hidden = keras.layers.Dense(6, activation="tanh")(
        keras.layers.Concatenate()(features)
    )
    hidden = keras.layers.Dropout(0.3)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    strategy = ks.HybridStrategy(sparse_updates=sparse_updates)
    with strategy.scope():
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **arguments,
        )
    return model


def train(optimizer, moves, **arguments):
    model = build(keras.optimizers.get(optimizer), **arguments)
    history = model.fit(
        *data(), batch_size=BATCH, verbose=0, callbacks=[MoveAt(moves)]
    )
    return model.get_weights(), model.optimizer.state(), history.history


def with_and_without(optimizer, moves, **arguments):
    return train(optimizer, moves, **arguments), train(
        optimizer, {}, **arguments
    )
