"""Processor time of dedicated servers while nothing happens.

    python benchmarks/idle_servers.py --engine native

Two workers and two servers train by `fit`, synchronously and asynchronously
(`HybridStrategy(synchronous=False)`). In the middle of an epoch, and in the
middle of its validation, all workers sleep. Measured is the servers' processor
time meanwhile (`/proc/PID/stat`, all threads), in percent of a core. Asked: at
most 1; of Horovod, which polls, at most 10.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import _program
import keras
import numpy as np

import keras_sparsity as ks

# Percent of a core. Horovod polls on all ranks.
LIMITS = {"native": 1, "horovod": 10}
MODES = ["synchronous", "asynchronous"]
NUM_WORKERS, NUM_SERVERS = 2, 2
NUM_ROWS, DIM, LENGTH, BATCH_SIZE, NUM_BATCHES = 100_000, 16, 8, 32, 8
# Until the server has done what workers asked for before, and between the
# sleeps of the workers.
SETTLE_SECONDS = 1
TIMEOUT_SECONDS = 300


def main():
    args = parse_arguments()
    if args.train_in:
        train(args)
        return
    figures, misses = {}, []
    for mode in [args.mode] if args.mode else MODES:
        for when, percents in trained(args, mode).items():
            name = f"{mode} {when}"
            figures[name] = percents
            print(f"{name:24} {percents} % of a core", flush=True)
            if max(percents) > (limit := LIMITS[args.engine]):
                misses.append(f"{name}: {max(percents)} %, {limit} % asked")
    _program.finish({"engine": args.engine, **figures}, misses)


def trained(args, mode):
    """dict from `"epoch"` and `"validation"` to each server's percents."""
    with tempfile.TemporaryDirectory(prefix="idle-") as folder:
        subprocess.run(
            [
                *[sys.executable, "-m", "keras_sparsity.launch", "run"],
                *["-n", str(NUM_WORKERS), "--servers", str(NUM_SERVERS)],
                *["--engine", args.engine, os.path.abspath(__file__)],
                *["--engine", args.engine, "--seconds", str(args.seconds)],
                *["--train-in", folder, "--mode", mode],
            ],
            timeout=TIMEOUT_SECONDS,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        with open(os.path.join(folder, "percents")) as file:
            return json.load(file)


def train(args):
    """On each rank; rank 0 measures, and writes what it finds."""
    options, embedding = {}, ks.layers.ShardedEmbedding
    if args.mode == "asynchronous":
        options = {"synchronous": False, "max_staleness": 4}
        embedding = keras.layers.Embedding
    strategy = ks.HybridStrategy(**options)
    pids = strategy.collectives.gather_objects(os.getpid(), "pids")
    inputs = keras.Input((LENGTH,), dtype="int32")
    rows = embedding(NUM_ROWS, DIM)(inputs)
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
    model = keras.Model(inputs, outputs)
    with strategy.scope():
        model.compile(keras.optimizers.Adagrad(), "mse")
    random = np.random.default_rng(0)
    x = random.integers(NUM_ROWS, size=(NUM_BATCHES * BATCH_SIZE, LENGTH))
    y = random.random((len(x), 1), dtype="float32")
    asleep = Asleep(pids[NUM_WORKERS:], args.seconds)
    model.fit(
        *(x.astype("int32"), y, BATCH_SIZE),
        validation_data=(x.astype("int32"), y),
        validation_batch_size=BATCH_SIZE,
        callbacks=[] if strategy.collectives.is_server else [asleep],
        verbose=0,
    )
    if strategy.rank == 0:
        with open(os.path.join(args.train_in, "percents"), "w") as file:
            json.dump(asleep.percents, file)


class Asleep(keras.callbacks.Callback):
    """Sleeps in the second step of an epoch, and of its validation.

    Args:
        pids: process ids of the servers.
        seconds: the time for which they are measured.

    Attributes:
        percents: dict of lists, of one core.
    """

    def __init__(self, pids, seconds):
        super().__init__()
        self._pids, self._seconds = pids, seconds
        self._counts = {"epoch": 0, "validation": 0}
        self.percents = {}

    def on_train_batch_begin(self, batch, logs=None):
        self._begin("epoch")

    def on_test_batch_begin(self, batch, logs=None):
        self._begin("validation")

    def _begin(self, name):
        self._counts[name] += 1
        if self._counts[name] != 2:
            return
        time.sleep(SETTLE_SECONDS)
        before = [processor_seconds(pid) for pid in self._pids]
        time.sleep(self._seconds)
        self.percents[name] = [
            round(100 * (processor_seconds(pid) - used) / self._seconds, 2)
            for pid, used in zip(self._pids, before, strict=True)
        ]
        time.sleep(SETTLE_SECONDS)


def processor_seconds(pid):
    """Of all threads of a process, in its own code and in the kernel."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    add("--engine", default="native", choices=["native", "horovod"])
    add("--seconds", type=float, default=20)
    add("--train-in", help=argparse.SUPPRESS)
    add("--mode", choices=MODES, help="by default both")
    return parser.parse_args()


if __name__ == "__main__":
    main()
