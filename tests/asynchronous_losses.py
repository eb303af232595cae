"""Trainings whose workers are killed, stopped, or raise."""

import ast
import functools
import itertools
import os
import random
import signal
import sys
import threading
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.asynchronous import joiners, store, taking
from keras_sparsity.asynchronous.operations import Operations
from keras_sparsity.asynchronous.store import Store
from keras_sparsity.checkpoint import folder as checkpoint_folder
from keras_sparsity.health import watch
from keras_sparsity.machines import door

NUM_BATCHES = 40
# Of a table that two servers store in pieces. A batch's row is that of its
# number times an odd step: the batches' rows are in both pieces.
NUM_ROWS, ROW_STEP = 9000, 211
BETAS = 0.99, 0.999
RULES = {
    "adagrad": lambda: keras.optimizers.Adagrad(
        1.0, initial_accumulator_value=0.0
    ),
    "adam": lambda: keras.optimizers.Adam(0.01, *BETAS),
}


class Loss(keras.layers.Layer):
    """Its output is that of the batch's number, and its gradient marks it.

    It is 1 for the batch's element of two dense weights, and for its row of an
    `Embedding`; see `applied`.

    Args:
        begin: function of a batch's number, called in its step.
        num_batches: of an epoch.
    """

    def __init__(self, begin, num_batches):
        super().__init__()
        self._begin, self._size = begin, num_batches
        self.kernel = self.add_weight(shape=(num_batches,), initializer="zeros")
        self.other = self.add_weight(shape=(num_batches,), initializer="zeros")
        self.rows = keras.layers.Embedding(
            NUM_ROWS, 2, embeddings_initializer="zeros"
        )

    def call(self, x, training=False):
        number = tf.cast(x[0, 0], tf.int32)
        waited = tf.zeros([])
        if training:
            waited = tf.numpy_function(self._begin, [number], tf.float32)
        mark = tf.one_hot(number, self._size) + waited
        kernel = tf.convert_to_tensor(self.kernel.value)
        other = tf.convert_to_tensor(self.other.value)
        product = tf.reduce_sum((kernel + other) * mark)
        # Twice the same row.
        product += tf.reduce_sum(self.rows(tf.fill([2], ROW_STEP * number))) / 2
        # Its value is the batch's number.
        return 0 * x + x[0, 0] + (product - tf.stop_gradient(product))


def applied(model):
    """How often each batch's gradient was applied, to each variable.

    The slots say it, and the weights, or other slots, must follow from it.

    Args:
        model: a model of a `Loss`, with an optimizer of `RULES`.

    Returns:
        An array, a row for each variable.
    """
    accumulators, *of_adam = (
        [v.numpy() for v in model.optimizer.variables if v.path.endswith(kind)]
        for kind in ("_accumulator", "_momentum", "_velocity")
    )
    if accumulators:
        counts = _by_batch(accumulators)
        steps = 1 / np.sqrt(np.arange(1, counts.max() + 1))
        moved = np.concatenate([[0], -np.cumsum(steps)])
        np.testing.assert_allclose(
            _by_batch(model.get_weights()), moved[counts.astype(int)], 1e-4
        )
        return counts
    slots = [_by_batch(values) for values in of_adam]
    # Of a row, whose updates are its batch's alone.
    counts = np.rint(np.log1p(-slots[0][2]) / np.log(BETAS[0]))
    number = int(model.optimizer.iterations)
    assert counts.sum() == number
    for found, beta in zip(slots, BETAS, strict=True):
        np.testing.assert_allclose(found[2], 1 - beta**counts, 1e-3, 1e-6)
        # Each update decays all elements and moves one.
        np.testing.assert_allclose(found[:2].sum(1), 1 - beta**number, 1e-3)
    return counts[None]


def _by_batch(values):
    """The batches' elements and rows of the three variables, or of slots."""
    *dense, table = values
    rows = ROW_STEP * np.arange(len(dense[0]))
    assert not np.delete(table, rows, 0).any()
    np.testing.assert_array_equal(table[:, 0], table[:, 1])
    return np.stack([*dense, table[rows, 0]])


@keras.saving.register_keras_serializable(package="tests")
def output(y, outputs):
    return tf.reduce_mean(outputs)


def train(
    begin,
    epochs=2,
    bound=3,
    num_batches=NUM_BATCHES,
    known=True,
    callbacks=(),
    before=lambda model, data: None,
    rule="adagrad",
):
    """`(applied, history, steps of this rank, ranks that are left)`.

    Args:
        begin: function of the strategy, the number of this rank's step, and
            that of the batch.
        known: whether the number of batches is known.
        before: function of the model and the data, called before `fit`.
        rule: key of `RULES`.
    """
    strategy = ks.HybridStrategy(
        synchronous=False, max_staleness=bound, sparse_updates="lazy"
    )
    steps = []

    def began(number):
        steps.append(int(number))
        begin(strategy, len(steps), int(number))
        return np.float32(0)

    layer = Loss(began, num_batches)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(RULES[rule](), output)
    x = np.arange(num_batches, dtype="float32")[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(1)
    if not known:
        data = data.filter(lambda x, y: True)
    data = data.shuffle(num_batches, seed=3)
    before(model, data)
    history = model.fit(
        data,
        epochs=epochs,
        validation_data=(x, x),
        callbacks=list(callbacks),
        verbose=0,
    )
    # A call of all ranks that are left.
    ranks = strategy.collectives.gather_objects(strategy.rank)
    return applied(model), history.history, steps, ranks


def in_blocks():
    """Variables go to servers and back in small blocks of rows."""
    with mock.patch.object(store, "_BLOCK_BYTES", 10_000):
        return train(
            lambda *_: None,
            # The next one gives the servers what this one has trained.
            before=lambda model, data: model.fit(data, verbose=0),
        )


def end_by(kind):
    if kind == "raise":
        raise RuntimeError("no luck")
    if kind == "exit":
        sys.exit(0)
    os.kill(os.getpid(), getattr(signal, kind))


def at_step(victims, kind, step, known=True):
    """Some ranks end in one of their steps: by a signal, or "raise"."""

    def begin(strategy, count, number):
        time.sleep(0.01)
        if strategy.rank in victims and count == step:
            if kind == "SIGSTOP":
                # The others wait for it so long. They might for a first step,
                # which is traced, on a busy machine.
                watch.set_timeout(8)
            end_by(kind)

    return train(begin, known=known)


def behind_step(victims, kind, step, log_dir):
    """Some ranks end behind one of their steps: as `at_step`, or "exit".

    The others go on, though rank 0 draws histograms of all weights; also with
    another strategy, unless its ranks take their steps together.
    """
    count = itertools.count(1)

    def end(batch, logs):
        is_victim = ks.collectives.current().rank in victims
        if next(count) == step and is_victim:
            end_by(kind)

    callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_end=end),
        keras.callbacks.TensorBoard(log_dir, histogram_freq=1),
    ]
    found = train(lambda *_: time.sleep(0.01), callbacks=callbacks)
    # All ranks that are left compare its timeout.
    ks.HybridStrategy(synchronous=False, max_staleness=3, timeout=8)
    with pytest.raises(RuntimeError, match="was lost"):
        ks.HybridStrategy(timeout=8)
    return found


def at_any_time(victims, seconds):
    """Some ranks are killed so many seconds after their first step."""
    chance = random.Random(0)

    def begin(strategy, count, number):
        time.sleep(chance.uniform(0, 0.02))
        if strategy.rank in victims and count == 1:
            threading.Timer(seconds, end_by, ["SIGKILL"]).start()

    return train(begin)


def while_pushing(victim, when):
    """A rank is killed when its fifth push is under way.

    Args:
        victim: the rank.
        when: "unsent", or "partly": applied at one server; or "applied", or
            "next": the sixth one, too. The victim has taken the sixth batch,
            and tells no more than that.
    """
    if ks.collectives.current().rank != victim:
        return train(lambda *_: time.sleep(0.01))
    has_taken, pushes, takes = threading.Event(), [], []
    stock, take, made = Store.pusher, Store.take, Operations.push

    def made_partly(operations, *names):
        feeds, counts, *_ = made(operations, *names)
        return feeds, counts[:1]

    def pusher(store, variables):
        push = stock(store, variables)
        calls, store._calls = store._calls, {}
        Operations.push = made_partly
        push_partly = stock(store, variables)
        Operations.push, store._calls = made, calls

        def delayed(*values):
            pushes.append(1)
            if len(pushes) < 5:
                return push(*values)
            has_taken.wait()
            if when == "partly":
                push_partly(*values)
            elif when != "unsent":
                before = push(*values)
            if when == "next" and len(pushes) == 5:
                return before
            end_by("SIGKILL")

        return delayed

    def taken(store, record):
        takes.append(1)
        if len(takes) == 7:
            time.sleep(60)  # until the kill
        return take(store, record)

    def begin(strategy, count, number):
        time.sleep(0.01)
        if count == 6:
            has_taken.set()

    Store.pusher, Store.take = pusher, taken
    return train(begin)


def asking_early(name, *args):
    """A function of these, on ranks that ask for each next batch early."""
    with mock.patch.object(taking, "_LEAST_SHARE", -1.0):
        return globals()[name](*args)


def stopping(ranks, step):
    """Some ranks stop behind one of their steps of the first epoch."""
    count = itertools.count(1)

    def end(batch, logs):
        if ks.collectives.current().rank in ranks and next(count) == step:
            callback.model.stop_training = True

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    return train(lambda *_: time.sleep(0.01), callbacks=[callback])


def woken(victim):
    """A rank's fifth push comes when it is left out at the servers alone.

    As if it was stopped before and goes on at this moment.
    """
    stock, pushes = Store.pusher, []

    def pusher(store, variables):
        push = stock(store, variables)

        def made():
            rank = tf.compat.v1.placeholder(tf.int64, [])
            servers = store._operations.servers.values()
            return [rank], [server.leave_out(rank) for server in servers]

        leave_out = store._call(made)

        def delayed(*values):
            pushes.append(1)
            if len(pushes) == 5:
                leave_out(victim)
            return push(*values)

        return delayed

    if ks.collectives.current().rank == victim:
        Store.pusher = pusher
    return train(lambda *_: time.sleep(0.01))


def failing_push(folder, is_last):
    """A push of rank 1 fails that is under way.

    Args:
        folder: gets the file "error": the message, and how many threads push.
        is_last: whether the rank has no further batch then, of two in all;
            else it computes the next one's gradient.
    """
    is_failing, begun = ks.collectives.current().rank == 1, f"{folder}/begun"
    goes_on, pushes = threading.Event(), []
    stock, take = Store.pusher, Store.take

    def pusher(store, variables):
        push = stock(store, variables)

        def failing(*values):
            pushes.append(1)
            if len(pushes) == (1 if is_last else 5):
                goes_on.wait()
                raise ArithmeticError("no luck")
            return push(*values)

        return failing

    def taken(store, record):
        number, held = take(store, record)
        if is_last and number not in (0, 1):  # at the end of the data
            goes_on.set()
        return number, held

    def begin(strategy, count, number):
        if is_failing:
            open(begun, "w").close()
            if count == 6:
                goes_on.set()
        while not os.path.exists(begun):
            time.sleep(0.01)
        time.sleep(0.01)

    if is_failing:
        Store.pusher, Store.take = pusher, taken
    try:
        return train(begin, num_batches=2 if is_last else NUM_BATCHES)
    except Exception as error:
        if is_failing:
            names = [thread.name for thread in threading.enumerate()]
            number = sum(
                name.startswith("keras_sparsity-push") for name in names
            )
            with open(f"{folder}/error", "w") as file:
                file.write(f"{error}\n{number}")
        raise


def without_a_batch(path):
    """Rank 1 takes no batch in the first of three epochs."""

    def begin(strategy, count, number):
        time.sleep(0.005)
        if strategy.rank == 0 and count == NUM_BATCHES:
            open(path, "w").close()

    take = Store.take

    def late(store, record):
        while not os.path.exists(path):
            time.sleep(0.01)
        return take(store, record)

    if ks.collectives.current().rank == 1:
        Store.take = late
    try:
        return train(begin, epochs=3, bound=None)
    finally:
        Store.take = take


def while_saving(path, victim, where):
    """A rank is killed while it writes the last of two checkpoints.

    Args:
        where: the function of `checkpoint/folder.py` in which that is; the
            rank calls it once for each checkpoint.
    """
    stock, calls = getattr(checkpoint_folder, where), itertools.count(1)

    def killed(*args):
        if next(calls) == 2:
            end_by("SIGKILL")
        return stock(*args)

    if ks.collectives.current().rank == victim:
        setattr(checkpoint_folder, where, killed)
    return train(
        lambda *_: None, callbacks=[ks.callbacks.ShardedCheckpoint(path)]
    )


def restored(path, victim):
    """A rank is killed in a step; the others then read the checkpoint.

    Into weights that are zeros.
    """
    models = []

    def begin(strategy, count, number):
        time.sleep(0.01)
        if strategy.rank == victim and count == 3:
            end_by("SIGKILL")

    checkpoint = ks.callbacks.ShardedCheckpoint(path)
    _, *others = train(
        begin,
        callbacks=[checkpoint],
        before=lambda model, data: models.append(model),
    )
    (model,) = models
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    checkpoint.restore(model)
    return applied(model), *others


def end_all():
    """Ends this process and those that it has started, as with its machine."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        for pid in map(int, file.read().split()):
            os.kill(pid, signal.SIGKILL)
    end_by("SIGKILL")


class KillIn(keras.callbacks.Callback):
    """A rank is killed in an epoch, unless the launcher has started it anew.

    Args:
        rank: its number; a server, which takes no steps.
        seconds: so long after the epoch's beginning.
        epoch: the epoch.
        end: function that kills it.
    """

    def __init__(self, rank, seconds, epoch, end):
        super().__init__()
        is_first = os.environ["KERAS_SPARSITY_RESTARTS"] == "0"
        self._is_victim = is_first and ks.collectives.current().rank == rank
        self._seconds, self._epoch, self._end = seconds, epoch, end

    def on_epoch_begin(self, epoch, logs=None):
        if self._is_victim and epoch == self._epoch:
            threading.Timer(self._seconds, self._end).start()


def resumed(folder, rank, seconds, lost, rule):
    """Four epochs, of which a server's death interrupts the third one.

    The scheduler dies with it, without which no server comes back alone. Before
    that, a worker may be lost.
    """

    def begin(strategy, count, number):
        time.sleep(0.01)
        is_first = os.environ["KERAS_SPARSITY_RESTARTS"] == "0"
        if is_first and strategy.rank == lost and count == 5:
            end_by("SIGKILL")

    return train(
        begin,
        epochs=4,
        callbacks=[
            KillIn(rank, seconds, 2, end_all),
            ks.callbacks.ShardedCheckpoint(folder),
        ],
        rule=rule,
    )


def goes_on(folder, epochs, rule):
    """Trains until so many epochs have ended, also by others."""
    return train(
        lambda *_: time.sleep(0.001),
        epochs=epochs,
        callbacks=[ks.callbacks.ShardedCheckpoint(folder)],
        rule=rule,
    )


class UntilJoined(keras.callbacks.Callback):
    """Ends the training after an epoch with a worker that was started anew.

    Args:
        folder: where that worker has made `ready` before its `fit`, and makes
            `joined` in its first step.

    Attributes:
        begun: this worker's first epoch, its updates then, and `applied`.
    """

    def __init__(self, folder):
        super().__init__()
        self._folder, self.begun = folder, None

    def _is_there(self, name):
        return os.path.exists(os.path.join(self._folder, name))

    def on_epoch_begin(self, epoch, logs=None):
        self._is_last = self._is_there("joined")
        if self.begun is None:
            updates = int(self.model.optimizer.iterations)
            self.begun = epoch, updates, applied(self.model)

    def on_epoch_end(self, epoch, logs=None):
        while not self._is_there("ready"):
            time.sleep(0.01)
        if self._is_last:
            self.model.stop_training = True


def is_new():
    """Whether this is a lost worker's new process."""
    if os.environ["KERAS_SPARSITY_RESTARTS"] == "0":
        return False
    if not os.environ.get(door.JOINS_VARIABLE):
        raise RuntimeError("An error has ended all ranks, not one; see above.")
    return True


class Two:
    """Two `fit`s, in one of which a worker is lost.

    Its new process comes to the first one when the others are in the second.

    Args:
        folder: for files.
        victim: the worker.
        number: the number of the `fit`, 0 or 1.
        saves: whether the first one has a `ShardedCheckpoint`.
    """

    def __init__(self, folder, victim, number, saves):
        self.path = functools.partial(os.path.join, folder)
        self._victim, self._number, self._saves = victim, number, saves
        self.is_new = is_new()
        self._fit = self._count = 0

    def mark(self, name, text=""):
        with open(self.path(name), "a") as file:
            file.write(text)

    def begin(self, strategy, count, number):
        time.sleep(0.01)
        self._count += 1
        if self.is_new:
            self.mark("joined", f"{number}\n")
        elif self._fit == 1 and self._count == 1:
            self.mark("second")
        is_due = self._fit == self._number and self._count == 3
        if strategy.rank == self._victim and is_due and not self.is_new:
            end_by("SIGKILL")

    def before(self, model, data):
        """The first `fit`, and what comes with it."""
        first = ks.callbacks.ShardedCheckpoint(self.path("first"))
        if self.is_new:
            while not os.path.exists(self.path("second")):
                time.sleep(0.01)
        if self.is_new and self._saves:
            self._check_restored(first, model)
        callbacks = [
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: setattr(
                    model, "stop_training", epoch == 1
                )
            ),
            *[first] * self._saves,
        ]
        history = model.fit(data, epochs=3, callbacks=callbacks, verbose=0)
        np.testing.assert_array_equal(applied(model), 2)
        assert history.history["loss"] == [(NUM_BATCHES - 1) / 2] * 2
        assert history.epoch == [0, 1]
        weights = self.path("between.weights.h5")
        written = self.is_new and os.stat(weights).st_mtime_ns
        model.save_weights(weights)
        if self.is_new:  # The others have written it.
            assert os.stat(weights).st_mtime_ns == written
            self.mark("ready")
        self._fit, self._count = 1, 0

    def _check_restored(self, checkpoint, model):
        start = model.get_weights()
        checkpoint.restore(model)
        np.testing.assert_array_equal(applied(model), 2)
        model.set_weights(start)


def rejoined_later(folder, victim, number):
    """A worker is lost in one of two `fit`s, and joins the second one."""
    two = Two(folder, victim, number, True)
    found = train(
        two.begin,
        epochs=1000,
        callbacks=[
            UntilJoined(folder),
            ks.callbacks.ShardedCheckpoint(two.path("checkpoints")),
        ],
        before=two.before,
    )
    two.mark("ranks", f"{found[-1]}\n")
    return found


def left_out_later(folder, victim):
    """As `rejoined_later`, but of the first `fit` there is no checkpoint."""
    two = Two(folder, victim, 0, False)
    stock = joiners._stay_out

    def stay_out(number):
        two.mark("out")
        stock(number)

    def wait(epoch, logs):
        while not os.path.exists(two.path("out")):
            time.sleep(0.01)

    joiners._stay_out = stay_out
    until = keras.callbacks.LambdaCallback(on_epoch_end=wait)
    return train(two.begin, callbacks=[until], before=two.before)


def rejoined(folder, victim, kind):
    """A worker is lost in the first epoch, is started anew, and joins."""
    joins = is_new()
    os.chdir(folder)  # not that of the launcher, whose paths may be relative

    def mark(name, text=""):
        with open(os.path.join(folder, name), "a") as file:
            file.write(text)

    def begin(strategy, count, number):
        time.sleep(0.01)
        if strategy.rank == victim and not joins and count == 5:
            end_by(kind)
        if joins:
            mark("joined", f"{number}\n")
        strategies.append(strategy)

    strategies = []
    if joins:
        mark("ready")
        mark(f"{victim}.csv", "of earlier epochs\n")
    callbacks = [
        keras.callbacks.CSVLogger(os.path.join(folder, "0.csv")),
        until := UntilJoined(folder),
        ks.callbacks.ShardedCheckpoint(os.path.join(folder, "checkpoints")),
    ]
    found = train(begin, epochs=1000, callbacks=callbacks)
    mark("ranks", f"{found[-1]}\n")
    if joins:
        # A checkpoint that it makes when it has joined has others' weights.
        epoch, updates, counts = until.begun
        assert updates == epoch * NUM_BATCHES > 0
        np.testing.assert_array_equal(counts, epoch)
        # Of the last epoch, of which it was a part from the beginning.
        mark("staleness", str(max(strategies[0].staleness)))
    return found


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    found = globals()[name](*map(ast.literal_eval, given))
    counts, history, *_ = found
    print("applied", {*counts.ravel().tolist()}, flush=True)
    print("losses", history["loss"], flush=True)
