"""A training that ArchitectureLogger shows: it has all there is to show."""

import keras
import numpy as np

import keras_sparsity as ks
from keras_sparsity.health import journal

ROWS, DIM, BATCH, STEPS = 3_000, 16, 32, 24


def ids():
    random = np.random.default_rng(2)
    return random.zipf(1.3, size=(STEPS * BATCH, 4)) % ROWS


def train(log_dir, searches, num_steps=3):
    # Not "auto": what is fastest here is not to decide what is there to show.
    strategy = ks.HybridStrategy(architecture="hybrid")
    words = keras.Input((4,), dtype="int64")
    sharded = ks.layers.ShardedEmbedding(ROWS, DIM, name="sharded")(words)
    stock = keras.layers.Embedding(ROWS, DIM, name="stock")(words)
    hidden = keras.layers.Concatenate()([sharded, stock])
    out = keras.layers.Dense(1, name="out")(keras.layers.Flatten()(hidden))
    model = keras.Model(words, out)
    with strategy.scope():
        model.compile("adagrad", "mse")
    callbacks = [ks.callbacks.ArchitectureLogger(log_dir, every_steps=8)]
    if searches:
        callbacks.append(
            ks.callbacks.PartitionSearch(num_steps, num_warm_up_steps=0)
        )
    model.fit(
        ids(),
        np.ones((len(ids()), 1)),
        batch_size=BATCH,
        epochs=2 if searches else 1,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    choice = callbacks[1].result["tables"] if searches else None
    return {
        "roles": {role for role, _ in journal.current().totals()},
        "alpha": [v.alpha for v in ks.sparsity.measured(model)[:2]],
        "choice": choice and (choice.num_partitions, choice.sampled_seconds),
        "partitions": sharded_partitions(model),
    }


def sharded_partitions(model):
    layout = model.get_layer("sharded").table.layout
    return layout.num_partitions if layout else 1


def train_in_ways(log_dir):
    """The same batches: alone, after others, and with validation between.

    And with updates in every third step, and by eager steps.
    """
    for name, options in WAYS.items():
        strategy = ks.HybridStrategy(architecture="hybrid")
        words = keras.Input((4,), dtype="int64")
        rows = ks.layers.ShardedEmbedding(ROWS, DIM, name="sharded")(words)
        out = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
        model = keras.Model(words, out)
        every = 3 if name == "accumulated" else None
        with strategy.scope():
            model.compile(
                keras.optimizers.Adam(gradient_accumulation_steps=every),
                "mse",
                run_eagerly=name == "eager",
            )
        y = np.ones((len(ids()), 1))
        model.fit(
            *(ids(), y, BATCH),
            shuffle=False,
            verbose=0,
            callbacks=[
                ks.callbacks.ArchitectureLogger(f"{log_dir}/{name}", STEPS)
            ],
            **{k: (ids(), y) for k in options},
        )


WAYS = {
    "alone": (),
    "later": (),
    "validated": ("validation_data",),
    "accumulated": (),
    "eager": (),
}
