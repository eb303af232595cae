"""From a Keras script to several processes.

    python tutorials/01_one_process_to_several.py
    keras-sparsity run -n 2 tutorials/01_one_process_to_several.py

An ordinary Keras script that learns how users rate films, with three lines
changed. The first command trains on one process, the second on two; both print
the same losses, to float rounding.
"""

import keras
import numpy as np

import keras_sparsity as ks

NUM_USERS, NUM_FILMS, DIM = 20_000, 5_000, 16
NUM_RATINGS, BATCH = 65_536, 2_048

# 1. The strategy comes first: it finds the processes of this run. Under plain
# `python` there is one.
strategy = ks.HybridStrategy()

# The data of all processes: `fit` takes the global batch, as everywhere in
# Keras, and each process trains on its part. Few films have most ratings, so a
# batch touches few rows of both tables.
random = np.random.default_rng(0)
users = random.integers(NUM_USERS, size=NUM_RATINGS, dtype="int32")
films = (random.zipf(1.2, size=NUM_RATINGS) % NUM_FILMS).astype("int32")
taste = random.normal(size=(NUM_USERS, 4)) @ random.normal(size=(4, NUM_FILMS))
ratings = (taste[users, films] > 0).astype("float32")[:, None]

# Seeded, so that both runs start from the same weights.
keras.utils.set_random_seed(1)

# 2. `ShardedEmbedding` replaces `keras.layers.Embedding`: each process stores
# and updates a part of the rows and pulls the rows of its part of the batch
# from their owners. Everything else is Keras.
user = keras.Input((), dtype="int32", name="user")
film = keras.Input((), dtype="int32", name="film")
of_user = ks.layers.ShardedEmbedding(NUM_USERS, DIM, name="users")(user)
of_film = ks.layers.ShardedEmbedding(NUM_FILMS, DIM, name="films")(film)
hidden = keras.layers.Concatenate()([of_user, of_film])
hidden = keras.layers.Dense(32, activation="relu")(hidden)
output = keras.layers.Dense(1, activation="sigmoid")(hidden)
model = keras.Model({"user": user, "film": film}, output)

# 3. `compile` inside the strategy's scope: gradients are summed over the
# processes; losses and metrics are those of the whole batch.
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
