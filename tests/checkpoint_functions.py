"""What the ranks run in tests of checkpoints.

`python -m tests.checkpoint_functions DIRECTORY` writes what a test of later
versions reads: a checkpoint of today's format, and what is in it.
"""

import json
import os
import resource
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.checkpoint import folder, state, storage

VOCABULARY = 40
NUM_EXAMPLES = 64
BATCH = 8
EPOCHS = 4


class Interruption(Exception):
    pass


class InterruptAfter(keras.callbacks.Callback):
    """Ends a training in the middle, on every rank."""

    def __init__(self, num_executions):
        super().__init__()
        self._left = num_executions

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if not self._left:
            raise Interruption


class Batches(keras.utils.PyDataset):
    """Draws an order of its own in each epoch, as users' data sets do."""

    def __init__(self):
        super().__init__()
        self._rng = np.random.default_rng(3)
        self.on_epoch_end()

    def on_epoch_end(self):
        self._order = self._rng.permutation(NUM_EXAMPLES)

    def __len__(self):
        return NUM_EXAMPLES // BATCH

    def __getitem__(self, index):
        x, y = arrays()
        rows = self._order[index * BATCH : (index + 1) * BATCH]
        return x[rows], y[rows]


def arrays():
    rng = np.random.default_rng(1)
    ids = rng.zipf(1.4, (NUM_EXAMPLES, 6)) % VOCABULARY
    return ids.astype("int32"), rng.integers(0, 3, NUM_EXAMPLES)


def generated():
    rng = np.random.default_rng(4)
    x, y = arrays()
    while True:
        rows = rng.permutation(NUM_EXAMPLES)[:BATCH]
        yield x[rows], y[rows]


def fit_arguments(kind):
    """Each kind of input that `fit` takes, in an order that changes."""
    x, y = arrays()
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(30, seed=2)
    arguments = {
        "dataset": {"x": dataset.batch(BATCH)},
        "repeated": {"x": dataset.repeat().batch(BATCH), "steps_per_epoch": 7},
        "unknown length": {
            "x": dataset.filter(lambda x, y: y < 2).batch(BATCH)
        },
        "generator": {"x": generated(), "steps_per_epoch": 5},
        "batches": {"x": Batches()},
    }
    return {"shuffle": False, **arguments[kind]}


def build(partitions=(1, 3), dropout=0.3, optimizer="adam", **arguments):
    """A model with tables, dense variables, random states and metrics."""
    inputs = keras.Input((6,), dtype="int32")
    features = [
        keras.layers.Flatten()(
            ks.layers.ShardedEmbedding(VOCABULARY, 3, num_partitions=count)(
                inputs
            )
        )
        for count in partitions
    ]
    hidden = keras.layers.Dense(6, activation="tanh")(
        keras.layers.Concatenate()(features)
    )
    if dropout:  # neither is independent of the number of processes
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Dropout(dropout)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    strategy = ks.HybridStrategy(architecture="hybrid")
    with strategy.scope():
        model.compile(
            keras.optimizers.get(optimizer),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **arguments,
        )
    return model


def train(
    directory=None,
    kind="arrays",
    interrupt_after=None,
    every_steps=3,
    epochs=EPOCHS,
    seed=5,
    callbacks=(),
    **arguments,
):
    """Trains, perhaps until an interruption.

    Returns:
        `(weights, optimizer's state, history)`; None if it was interrupted.
    """
    keras.utils.set_random_seed(seed)
    model = build(**arguments)
    callbacks = list(callbacks)
    if directory:
        callbacks.append(
            ks.callbacks.ShardedCheckpoint(directory, every_steps=every_steps)
        )
    callbacks += [
        keras.callbacks.ReduceLROnPlateau(
            monitor="loss", patience=1, min_delta=0.01
        ),
    ]
    if interrupt_after:
        callbacks.append(InterruptAfter(interrupt_after))
    try:
        history = model.fit(
            **fit_arguments(kind), epochs=epochs, verbose=0, callbacks=callbacks
        )
    except Interruption:
        return None
    history.history.pop("learning_rate", None)
    return (
        model.get_weights(),
        model.optimizer.state(),
        history.epoch,
        history.history,
    )


def train_and_resume(directory, interruptions, **arguments):
    """An undisturbed training, and one with interruptions."""
    undisturbed = train(**arguments)
    for interruption in interruptions:
        train(directory, interrupt_after=interruption, **arguments)
    return undisturbed, train(directory, **arguments)


def save(directory):
    """Trains and saves in each way; then the next step."""
    train(directory, epochs=1, every_steps=None, dropout=0.0)
    model = build(dropout=0.0)
    ks.callbacks.ShardedCheckpoint(directory).restore(model)
    model.save(os.path.join(directory, "model.keras"))
    plain = ks.export(model)
    if ks.collectives.current().rank == 0:
        plain.save(os.path.join(directory, "plain.keras"))
    return _next_step(model)


def load(directory, kind):
    """A saved model's predictions, and its weights after the next step."""
    if kind == "plain":
        path = os.path.join(directory, "plain.keras")
        return _next_step(keras.models.load_model(path))
    if kind == "checkpoint":
        model = build(partitions=(4, 2), dropout=0.0)
        ks.callbacks.ShardedCheckpoint(directory).restore(model)
        return _next_step(model)
    with ks.HybridStrategy(architecture="hybrid").scope():
        path = os.path.join(directory, "model.keras")
        return _next_step(keras.models.load_model(path))


def _next_step(model):
    x, y = arrays()
    model.run_eagerly = True  # a step or two: tracing them would take longer
    predictions = model.predict(x, batch_size=NUM_EXAMPLES, verbose=0)
    # No row twice, which stock Keras would not add up.
    ids = np.arange(36).reshape(6, 6)
    model.train_on_batch(ids, y[:6])
    return predictions, model.get_weights()


def fail_to_write(directory):
    """Trains while rank 1 may not write files of any size."""
    outcome = None
    train(directory, interrupt_after=12)
    is_full = ks.collectives.current().rank == 1
    # The first rank removes what all have begun, perhaps behind the others.
    listed = folder.complete if is_full else lambda path: set(os.listdir(path))
    before = listed(directory)
    if is_full:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        # The probe of the directory is empty; the files are not.
        train(directory)
    except OSError as error:
        outcome = str(error)
    finally:
        resource.setrlimit(
            resource.RLIMIT_FSIZE,
            (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        )
    return before, listed(directory), outcome


def save_spoiled(directory):
    """Saves a table before and after rank 1's part of it is spoiled."""
    model = build(dropout=0.0)
    x, y = arrays()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    communicator = ks.collectives.current()
    spoiled = None
    for step in (1, 2):
        position = {"epoch": 0, "step": step}
        spoiled = storage.save(model, directory, position, communicator, keep=2)
        if communicator.rank == 1:
            table = next(
                e for e in state.entries(model) if e.layout and e.parts(1)
            )
            table.variable.assign(table.variable * np.nan)
    # The first rank has removed what was begun.
    listed = folder.complete if communicator.rank else os.listdir
    return listed(directory), spoiled


def fail_on_rank_1():
    """How an error of rank 1 is told: its kind, the message, what is raised."""
    communicator = ks.collectives.current()
    told = []
    for kind in (ZeroDivisionError, UnicodeError, PermissionError):

        def fail(kind=kind):
            if communicator.rank == 1:
                raise kind("the cause")

        try:
            storage.on_all_ranks(communicator, "do it", fail)
        except Exception as error:
            cause = type(error.__cause__ or error).__name__
            is_here = communicator.rank == 1
            told.append(
                (
                    cause if is_here else kind.__name__,
                    str(error),
                    type(error).__name__,
                )
            )
    return told


def try_to_train(directory):
    """The error of a `fit` in a directory, and after how many seconds."""
    start = time.monotonic()
    try:
        train(directory)
    except OSError as error:
        return str(error), time.monotonic() - start


def peak_memory(directory, num_rows, dim):
    """MiB by which saving and restoring raise the most that is in memory."""
    inputs = keras.Input((4,), dtype="int32")
    table = ks.layers.ShardedEmbedding(
        num_rows, dim, embeddings_initializer="zeros"
    )
    model = keras.Model(inputs, keras.layers.Flatten()(table(inputs)))
    strategy = ks.HybridStrategy(architecture="hybrid")
    with strategy.scope():
        model.compile("sgd", "mse")
    x = np.arange(32).reshape(8, 4)
    model.fit(x, np.ones((8, 4 * dim)), batch_size=8, verbose=0)
    position = {"epoch": 0, "step": 1}
    communicator = strategy.collectives
    # Not the pages of libraries that are read for the first time.
    storage.save(model, directory, position, communicator, keep=1)
    with Peak() as saving:
        storage.save(model, directory, position, communicator, keep=1)
    path, index = storage.latest(directory, communicator)
    with Peak() as restoring:
        storage.restore(model, path, index, communicator, ("model",))
    part = sum(
        entry.layout.num_stored_rows(communicator.rank) if entry.layout else 0
        for entry in state.entries(model)
    )
    return part * dim * 4 / 2**20, saving.mebibytes, restoring.mebibytes


class Peak:
    """The growth of the process's memory while it is entered, at its most."""

    def __enter__(self):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak is now what is used now
        self._before = self._read("VmRSS")
        return self

    def __exit__(self, *exception):
        self.mebibytes = self._read("VmHWM") - self._before

    def _read(self, key):
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines[key].split()[0]) / 1024


def write_sample(directory):
    weights, optimizer_state, *_ = train(directory, epochs=1, every_steps=None)
    return [v.tolist() for v in [*weights, *optimizer_state]]


if __name__ == "__main__":
    values = ks.launch.run(write_sample, 2, args=(sys.argv[1],))[0]
    with open(os.path.join(sys.argv[1], "weights.json"), "w") as file:
        json.dump(values, file)
