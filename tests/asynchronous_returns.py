"""Trainings in which a server is killed, and comes back alone."""

import ast
import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.asynchronous import sessions
from keras_sparsity.asynchronous.store import Store
from keras_sparsity.asynchronous.stored import placed
from tests.asynchronous_losses import (
    NUM_BATCHES,
    ROW_STEP,
    KillIn,
    applied,
    end_by,
    train,
)


class Pids:
    """The processes of each rank.

    Args:
        folder: where each process writes its own.
    """

    def __init__(self, folder):
        self._folder = folder

    def _path(self, rank):
        return os.path.join(self._folder, f"{rank}.pids")

    def note(self, rank):
        with open(self._path(rank), "a") as file:
            file.write(f"{os.getpid()}\n")

    def of(self, rank):
        with open(self._path(rank)) as file:
            return [int(line) for line in file]


def is_first_attempt():
    return os.environ["KERAS_SPARSITY_RESTARTS"] == "0"


class Killing(keras.callbacks.Callback):
    """Sends ranks a signal in some steps of this worker's, in one epoch.

    Not in later attempts of all ranks.
    """

    def __init__(self, pids, ranks, epoch, steps, kind):
        super().__init__()
        self._pids, self._ranks = pids, ranks
        self._epoch, self._steps = epoch, steps
        self._signal = getattr(signal, kind)
        self._now = self._count = None

    def on_epoch_begin(self, epoch, logs=None):
        self._now, self._count = epoch, 0

    def step(self):
        self._count += 1
        is_due = self._now == self._epoch and self._count in self._steps
        for rank in self._ranks if is_due and is_first_attempt() else []:
            os.kill(self._pids.of(rank)[-1], self._signal)


def counts(model, owners, server):
    """`applied`: how often each batch was, at a server, and at the others."""
    (layer,) = model.layers
    of_rows = [layer.rows.embeddings]
    told = model.optimizer, model.trainable_variables, of_rows, owners
    of_server = []
    for stored in placed(*told):
        servers = np.array([piece.server for piece in stored.pieces])
        batches = np.arange(layer.kernel.shape[0])
        rows = ROW_STEP * batches if stored.is_of_rows else batches
        of_server.append(servers[rows % len(servers)] == server)
    of_server, found = np.stack(of_server), applied(model)
    return found[of_server].tolist(), found[~of_server].tolist()


def killed(folder, victims, epoch, steps, kind="SIGKILL"):
    """Three epochs; in some steps of one, rank 0 kills others; see `_train`."""
    killing = Killing(Pids(folder), victims, epoch, steps, kind)

    def begin(strategy, count, number):
        time.sleep(0.01)
        if strategy.rank == 0:
            killing.step()

    return _train(folder, max(victims), begin, killing)


def unanswered(folder, dies):
    """The only server is killed before it answers a push that has ended.

    Args:
        dies: whether the worker is, too: its last batches are then another's.
    """
    collectives = ks.collectives.current()
    pids, first = Pids(folder), collectives.num_workers
    stock, due = sessions.function_of, []

    def function_of(session, feeds, fetches, targets=()):
        call = stock(session, feeds, fetches, targets)

        def run(*values):
            results = call(*values)
            # A push alone has targets and fetches.
            if due and targets and fetches:
                due.pop()
                os.kill(pids.of(first)[-1], signal.SIGKILL)
                if dies:
                    end_by("SIGKILL")
                raise tf.errors.UnavailableError(None, None, "killed")
            return results

        return run

    sessions.function_of = function_of

    def begin(strategy, count, number):
        time.sleep(0.01)
        # In the second epoch: the bound is 3.
        is_due = count == NUM_BATCHES // 2 + 5 and is_first_attempt()
        if collectives.rank == 1 and is_due:
            due.append(True)

    return _train(folder, first, begin, keras.callbacks.Callback())


def without_scheduler(folder):
    """In a step of the second epoch, the process that keeps order is killed."""
    collectives = ks.collectives.current()
    pids, first = Pids(folder), collectives.num_workers
    is_due = collectives.rank == 0 and is_first_attempt()

    def begin(strategy, count, number):
        time.sleep(0.01)
        if is_due and count == NUM_BATCHES:
            (server,) = pids.of(first)
            with open(f"/proc/{server}/task/{server}/children") as file:
                (scheduler,) = map(int, file.read().split())
            os.kill(scheduler, signal.SIGKILL)

    callback = keras.callbacks.Callback()
    return _train(folder, first, begin, callback)


def at_any_time(folder, victim, seconds):
    """A rank is killed so long after the beginning of the second epoch."""

    def begin(strategy, count, number):
        time.sleep(0.01)

    killing = KillIn(victim, seconds, 1, lambda: end_by("SIGKILL"))
    return _train(folder, victim, begin, killing)


def _train(folder, victim, begin, callback):
    """Three epochs.

    Files: `<rank>.pids`, of the processes; `restored`, with `counts` when the
    server has come back, and `ended`; `iterations`; `<rank>.staleness`, the
    greatest.

    Args:
        victim: the server that is killed.
    """
    collectives = ks.collectives.current()
    rank, size = collectives.rank, collectives.size
    owners = list(range(collectives.num_workers, size))
    Pids(folder).note(rank)
    found, stock = {}, Store.take_place

    def begun(strategy, *step):
        found["strategy"] = strategy
        begin(strategy, *step)

    def write(name, value):
        with open(os.path.join(folder, name), "w") as file:
            json.dump(value, file)

    def take_place(store, number):
        stock(store, number)
        store.download()
        write("restored", counts(found["model"], owners, victim))

    Store.take_place = take_place
    checkpoints = os.path.join(folder, "checkpoints")
    results = train(
        begun,
        epochs=3,
        callbacks=[callback, ks.callbacks.ShardedCheckpoint(checkpoints)],
        before=lambda model, data: found.update(model=model),
    )
    if rank == 0:
        write("ended", counts(found["model"], owners, victim))
        write("iterations", int(found["model"].optimizer.iterations))
    if "strategy" in found:
        write(f"{rank}.staleness", max(found["strategy"].staleness))
    return results


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    _, history, *_ = globals()[name](*map(ast.literal_eval, given))
    print("losses", history["loss"], flush=True)
