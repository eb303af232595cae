"""Saving, resuming after an interruption, exporting.

    keras-sparsity run -n 2 --max-restarts 1 \
        tutorials/04_saving_resuming_exporting.py

No process holds a whole table while it trains. This script raises an error in
the middle of its second epoch, restarts, and resumes from its last checkpoint.
Then it saves the model in two ways and loads both.
"""

import argparse
import os
import pathlib

import keras
import numpy as np

import keras_sparsity as ks

NUM_WORDS, LENGTH, BATCH = 3_000, 8, 64

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--folder", default="saved", help="where to save")
folder = pathlib.Path(parser.parse_args().folder)
strategy = ks.HybridStrategy()
is_first = strategy.rank == 0

# Does a text have more words of the first half of the vocabulary?
random = np.random.default_rng(0)
texts = random.integers(NUM_WORDS, size=(2_048, LENGTH), dtype="int32")
labels = (texts < NUM_WORDS // 2).mean(axis=1, keepdims=True) > 0.5


def new_model():
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            ks.layers.ShardedEmbedding(NUM_WORDS, 16),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


class PowerCut(keras.callbacks.Callback):
    """Fails on one rank, once: at the first start, in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        is_first_start = os.environ.get("KERAS_SPARSITY_RESTARTS") == "0"
        is_rank = strategy.rank == strategy.size - 1
        if is_rank and is_first_start and (self.epoch, batch) == (1, 20):
            raise RuntimeError("a power cut, as this tutorial wants one")


# --- Resuming -------------------------------------------------------------
# Each process writes its own rows and slots; a checkpoint is complete or
# absent. `fit` looks for the latest one and restores weights, slots, metrics,
# random states and the position in the data.
model = new_model()
with strategy.scope():
    model.compile("adam", loss="binary_crossentropy", metrics=["accuracy"])
checkpoint = ks.callbacks.ShardedCheckpoint(
    folder / "checkpoints", every_steps=8
)
model.fit(
    texts,
    labels,
    batch_size=BATCH,
    epochs=3,
    callbacks=[checkpoint, PowerCut()],
    verbose=2,
)
# `evaluate`, `predict` and `save` are for all processes together.
expected = model.predict(texts[:100], verbose=0)

# --- Saving, for use with this library ------------------------------------
# One file, written by rank 0, one table at a time. It loads on any number of
# processes; a model loaded inside the scope can train on.
model.save(folder / "model.keras")
with strategy.scope():
    loaded = keras.models.load_model(folder / "model.keras")
np.testing.assert_allclose(
    loaded.predict(texts[:100], verbose=0), expected, atol=1e-5
)

# --- Exporting, for everyone else -----------------------------------------
# The same model with `keras.layers.Embedding` in place of the sharded one. It
# loads with Keras alone.
plain = ks.export(model)
if is_first:
    plain.save(folder / "plain.keras")
    found = keras.models.load_model(folder / "plain.keras")
    kinds = [type(layer).__name__ for layer in found.layers]
    np.testing.assert_allclose(
        found.predict(texts[:100], verbose=0), expected, atol=1e-5
    )
    print(f"the exported model's layers: {kinds}")
    print("saved, loaded and exported: all predict the same")
