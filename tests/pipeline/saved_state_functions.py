"""Functions that the processes of tests of checkpoints in stages run."""

import contextlib
import functools
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from tests import pipeline_functions
from tests.checkpoint_functions import Interruption

BATCH_SIZE = pipeline_functions.BATCH_SIZE
EVERY_STEPS = 3


class Before(keras.callbacks.Callback):
    """Calls a function before a batch of a training, counted from 0."""

    def __init__(self, number, function):
        super().__init__()
        self._left, self._function = number, function

    def on_train_batch_begin(self, batch, logs=None):
        self._left -= 1
        if self._left < 0:
            self._function()


def interrupt():
    raise Interruption


def pipeline(schedule, rule, stages, replicas=1, messages_ahead=False):
    """A compiled model with random states, statistics and metrics."""
    network = pipeline_functions.made("watched line")
    strategy = ks.PipelineStrategy(
        schedule, stages, replicas=replicas, messages_ahead=messages_ahead
    )
    with strategy.scope():
        network.compile(
            pipeline_functions.OPTIMIZERS[rule](), "mse", metrics=["mae"]
        )
    return network


def divided(head, num_tail_workers=1, tail_split="batch"):
    """A compiled model of which the workers draw differently."""
    keras.utils.set_random_seed(3)
    network = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu", name="first"),
            keras.layers.Dropout(0.25, name="drop"),
            keras.layers.Dense(16, activation="relu", name="wide"),
            keras.layers.Dropout(0.25, name="last_drop"),
            keras.layers.Dense(2, name="out"),
        ],
        name="divided",
    )
    has_columns = tail_split == "columns"
    strategy = ks.LayerPlacementStrategy(
        [head],
        num_tail_workers,
        tail_batches="whole" if has_columns else "by_worker",
        tail_split=tail_split,
    )
    with strategy.scope():
        network.compile(
            pipeline_functions.OPTIMIZERS["adam"](), "mse", metrics=["mae"]
        )
    return network


MODELS = {"pipeline": pipeline, "divided": divided}


def fit(network, folder, num_examples, before=None, epochs=3, shuffle=True):
    """Trains.

    Args:
        network: the compiled model.
        folder: that of its checkpoints.
        num_examples: the number of examples.
        before: `(number, function)`, see `Before`.
        epochs, shuffle: as for `fit`.

    Returns:
        `(weights, slots, epochs, history)`; None if it was interrupted.
    """
    keras.utils.set_random_seed(5)
    x, y = pipeline_functions.data("dense", num_examples)
    callbacks = [
        ks.callbacks.ShardedCheckpoint(folder, every_steps=EVERY_STEPS)
    ]
    if shuffle:
        plateau = keras.callbacks.ReduceLROnPlateau(
            "loss", patience=0, min_delta=100.0
        )
        callbacks.append(plateau)
    if before:
        callbacks.append(Before(*before))
    try:
        history = network.fit(
            *(x, y, BATCH_SIZE),
            epochs=epochs,
            shuffle=shuffle,
            verbose=0,
            callbacks=callbacks,
        )
    except Interruption:
        return None
    return *state_of(network), history.epoch, history.history


def state_of(network):
    """All weights, and this rank's slots by name."""
    return network.get_weights(), slots_of(network.optimizer)


def slots_of(optimizer):
    """Values by their paths behind the optimizer's own name."""
    return {v.path.partition("/")[2]: v.numpy() for v in optimizer.variables}


def train_and_resume(kind, arguments, folder, num_examples, number):
    """An undisturbed training; one that went on, and where it went on from."""
    make = MODELS[kind]
    whole = fit(make(*arguments), f"{folder}/whole", num_examples)
    network, parts = make(*arguments), f"{folder}/parts"
    assert fit(network, parts, num_examples, (number, interrupt)) is None
    stopped = state_of(network)
    # All state is another one, as in a new process.
    fit(network, f"{folder}/others", num_examples, epochs=1)
    network.optimizer.learning_rate = 1.0
    return whole, stopped, fit(network, parts, num_examples)


def losses_of_outputs(folder):
    """The histories of an undisturbed epoch and of one that was resumed.

    Of a model with two outputs, each on two replicas.
    """
    num_examples, found = 4 * BATCH_SIZE, []
    x, y = pipeline_functions.data("masks", num_examples)
    strategy = ks.PipelineStrategy("1f1b", 1, replicas=2)
    for stops in ([None], [2, None]):
        for stop in stops:
            network = pipeline_functions.made("masks")
            with strategy.scope():
                network.compile("adam", ["mse", "mae"])
            callbacks = [
                ks.callbacks.ShardedCheckpoint(
                    f"{folder}/{len(stops)}", every_steps=1
                )
            ]
            if stop:
                callbacks.append(Before(stop, interrupt))
            with contextlib.suppress(Interruption):
                network.fit(
                    *(x, y, BATCH_SIZE),
                    shuffle=False,
                    verbose=0,
                    callbacks=callbacks,
                )
        found.append(network.history.history)
    return found


def interrupted(folder, num_examples, number, *arguments):
    """Trains until it is interrupted; saves the model as it is then."""
    network = pipeline(*arguments)
    before = number, interrupt
    fit(network, folder, num_examples, before, epochs=2, shuffle=False)
    network.save(f"{folder}/model.keras")


def gone_on(folder, num_examples, *arguments):
    """The restored state, and that at the end of the training.

    TensorFlow's graph optimizer fuses operations of a larger stage in another
    way, which rounds in another way.
    """
    with without_graph_optimizer():
        return _gone_on(folder, num_examples, *arguments)


@contextlib.contextmanager
def without_graph_optimizer():
    set_options = tf.config.optimizer.set_experimental_options
    set_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        set_options({"disable_meta_optimizer": False})


def _gone_on(folder, num_examples, *arguments):
    network = pipeline(*arguments)
    ks.callbacks.ShardedCheckpoint(folder).restore(network)
    restored = state_of(network)
    # From the checkpoint again, not from here.
    network.set_weights([0 * value for value in restored[0]])
    return restored, fit(network, folder, num_examples, epochs=2, shuffle=False)


def _fail_once(how):
    if os.environ["KERAS_SPARSITY_RESTARTS"] == "0":
        if ks.collectives.current().rank == 1:
            if how == "raise":
                raise ValueError("no such file: corpus.txt")
            os.kill(os.getpid(), signal.SIGKILL)
        # Only a failure of rank 1 ends it.
        ks.collectives.current().barrier("test/failed")


if __name__ == "__main__":
    folder, num_examples, number, how, kind, *arguments = sys.argv[1:]
    if kind == "pipeline":
        *arguments, last_layer = arguments
        arguments.append([last_layer])
    weights, slots, *_ = fit(
        MODELS[kind](*arguments),
        f"{folder}/checkpoints",
        int(num_examples),
        (int(number), functools.partial(_fail_once, how)),
    )
    np.savez(
        f"{folder}/rank_{ks.collectives.current().rank}",
        *weights,
        **slots,
    )
