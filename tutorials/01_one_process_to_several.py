"""From a Keras script to several processes.

    python tutorials/01_one_process_to_several.py
    keras-sparsity run -n 2 tutorials/01_one_process_to_several.py

The script below is an ordinary Keras script that learns how users rate films,
with three lines changed. Run it both ways: the second uses two processes, and
prints the same losses, to float rounding.
"""

import keras
import numpy as np

import keras_sparsity as ks

NUM_USERS, NUM_FILMS, DIM = 20_000, 5_000, 16
NUM_RATINGS, BATCH = 65_536, 2_048

# 1. The strategy, first of all: it finds out which processes there are. The
# same script run by `python` has one, and that is fine.
strategy = ks.HybridStrategy()

# The data of all processes: `fit` is given the global batch, as everywhere in
# Keras, and each process trains on its part. Few films have most ratings, as
# in life: so a batch touches a small part of the rows of both tables.
random = np.random.default_rng(0)
users = random.integers(NUM_USERS, size=NUM_RATINGS, dtype="int32")
films = (random.zipf(1.2, size=NUM_RATINGS) % NUM_FILMS).astype("int32")
taste = random.normal(size=(NUM_USERS, 4)) @ random.normal(size=(4, NUM_FILMS))
ratings = (taste[users, films] > 0).astype("float32")[:, None]

# Seeded, so that both runs start from the same weights.
keras.utils.set_random_seed(1)

# 2. `ShardedEmbedding` in place of `keras.layers.Embedding`: each process
# holds and updates a part of the rows, and is sent those it needs. Everything
# else is Keras.
user = keras.Input((), dtype="int32", name="user")
film = keras.Input((), dtype="int32", name="film")
of_user = ks.layers.ShardedEmbedding(NUM_USERS, DIM, name="users")(user)
of_film = ks.layers.ShardedEmbedding(NUM_FILMS, DIM, name="films")(film)
hidden = keras.layers.Concatenate()([of_user, of_film])
hidden = keras.layers.Dense(32, activation="relu")(hidden)
output = keras.layers.Dense(1, activation="sigmoid")(hidden)
model = keras.Model({"user": user, "film": film}, output)

# 3. `compile` inside the strategy's scope: gradients are now summed over the
# processes, losses and metrics are those of the whole batch.
with strategy.scope():
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss="binary_crossentropy",
        metrics=["accuracy"],
    )

# Only rank 0 shows its progress.
history = model.fit(
    {"user": users, "film": films},
    ratings,
    batch_size=BATCH,
    epochs=2,
    verbose=2,
)

# Every process has the same history.
if strategy.rank == 0:
    losses = ", ".join(f"{loss:.4f}" for loss in history.history["loss"])
    print(f"losses with {strategy.size} process(es): {losses}")
