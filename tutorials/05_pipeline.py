"""Models in stages: pipelined training with predicted weights.

    keras-sparsity run -n 2 tutorials/05_pipeline.py

Each process trains a part of the layers. This script trains a language model on
the source of Python's standard library by three schedules, and compares the
loss of text that none has seen.
"""

import keras
import numpy as np
import text

import keras_sparsity as ks

NUM_WORDS, TIME, BATCH, STEPS = 1_000, 16, 64, 80

corpus = text.load_corpus(time=TIME)


def drawn(sequences, number):
    """Some sequences of word ids, and for each word the next one.

    All but the most frequent words become 0, the unknown.
    """
    places = np.random.default_rng(0).choice(len(sequences), number)
    words = np.where(sequences < NUM_WORDS, sequences, 0)[places]
    return words[:, 0], words[:, 1]


def new_model():
    keras.utils.set_random_seed(1)
    x = words = keras.Input((TIME,), dtype="int32")
    x = keras.layers.Embedding(NUM_WORDS, 64, name="words")(x)
    x = keras.layers.LSTM(64, return_sequences=True, name="first")(x)
    y = keras.layers.LSTM(64, return_sequences=True, name="second")(x)
    x = keras.layers.Add(name="sum")([x, y])
    return keras.Model(words, keras.layers.Dense(NUM_WORDS, name="next")(x))


# --- The stages -----------------------------------------------------------
# Inside of the scope, `compile` cuts the model into as many stages as there are
# processes. Rank 0 measures the layers first, so that the slowest stage is as
# fast as it can be; `stages=["second"]` would cut after that layer instead.
def compiled(schedule):
    strategy = ks.PipelineStrategy(schedule)
    model = new_model()
    with strategy.scope():
        model.compile(
            keras.optimizers.Adam(0.005),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return strategy, model


# --- The schedules --------------------------------------------------------
# "1f1b" gives what one process gives. In "vanilla" and "spectrain" no stage
# waits for an update: several mini-batches are under way. "vanilla" computes
# with the weights of the moment, "spectrain" with predicted ones.
train = drawn(corpus.train, BATCH * STEPS)
unseen = drawn(corpus.held_out, 1024)
for schedule in ("1f1b", "vanilla", "spectrain"):
    strategy, model = compiled(schedule)
    model.fit(*train, BATCH, shuffle=False, verbose=0)
    loss = model.evaluate(*unseen, 256, verbose=0)
    if strategy.rank == 0:
        print(f"{schedule}: loss of unseen text {loss:.3f}")

# --- Saving ---------------------------------------------------------------
# Each process holds its stage's weights alone. `save` and `get_weights` gather
# them, so every process calls them; rank 0 writes an ordinary Keras model.
model.save("pipeline.keras")
whole = keras.models.load_model("pipeline.keras")
np.testing.assert_allclose(
    whole.predict(unseen[0][:64], verbose=0),
    model.predict(unseen[0][:64], verbose=0),
    atol=1e-4,
)
if strategy.rank == 0:
    print("saved and loaded: both predict the same")
