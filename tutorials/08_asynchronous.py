"""Asynchronous training: workers that do not wait for each other.

    keras-sparsity run -n 2 tutorials/08_asynchronous.py

The last worker is slower than the others. This script trains a model of the
next word on the source of Python's standard library, in step and with old
weights, and compares the loss of text that none has seen.
"""

import time

import keras
import numpy as np
import text

import keras_sparsity as ks

NUM_WORDS, TIME, BATCH, STEPS = 1_000, 16, 64, 80

corpus = text.load_corpus(time=TIME)
first = ks.HybridStrategy()


def drawn(sequences, number):
    """Some sequences of word ids, and for each word the next one.

    All but the most frequent words become 0, the unknown.
    """
    places = np.random.default_rng(0).choice(len(sequences), number)
    words = np.where(sequences < NUM_WORDS, sequences, 0)[places]
    return words[:, 0], words[:, 1]


class Disturbed(keras.callbacks.Callback):
    """Makes the last worker slow, and counts this worker's steps."""

    num_steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        if first.rank == first.size - 1:
            time.sleep(0.02)


# --- The strategies -------------------------------------------------------
# With a bound, each batch is trained on by one worker, and is one update: a
# fast worker takes more of an epoch's batches. `max_staleness=None` would leave
# the bound out. With a fixed delay, each gradient is applied two steps later.
STRATEGIES = {
    "synchronous": {},
    "bounded": {"synchronous": False, "max_staleness": 8},
    "fixed": {"synchronous": False, "max_staleness": 2, "delay": "fixed"},
}


def trained(name):
    strategy = ks.HybridStrategy(**STRATEGIES[name])
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((TIME,), dtype="int32"),
            keras.layers.Embedding(NUM_WORDS, 64),
            keras.layers.Dense(NUM_WORDS),
        ]
    )
    with strategy.scope():
        model.compile(
            keras.optimizers.Adagrad(0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    disturbed = Disturbed()
    model.fit(
        *drawn(corpus.train, BATCH * STEPS),
        batch_size=BATCH,
        callbacks=[disturbed],
        verbose=0,
    )
    return model, strategy, disturbed.num_steps


unseen = drawn(corpus.held_out, 256)
for name in STRATEGIES:
    model, strategy, num_steps = trained(name)
    loss = model.evaluate(*unseen, batch_size=BATCH, verbose=0)
    steps = first.collectives.gather_objects(num_steps)
    if first.rank == 0:
        print(f"{name}: loss of unseen text {loss:.3f}")
        print(f"{name}: steps of each worker {steps}")
        # --- How old the weights were ---
        # A dict: so many updates between a pull and its push, so many pushes.
        for updates, pushes in strategy.staleness.items():
            print(f"{name}: {pushes} gradients were {updates} updates old")
