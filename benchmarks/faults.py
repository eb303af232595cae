"""Kills a random rank at a random instant, again and again.

Each round trains a model (Adam, dropout, shuffled input, sharded tables) on
several processes with `ShardedCheckpoint`, under `keras-sparsity run
--max-restarts`, and kills one rank by SIGKILL: in half of the rounds while a
checkpoint is written, in the others at any instant of the training. The
processes restart, and the final weights and optimizer slots must equal those of
an undisturbed training, to the bit.

With `--kill worker` or `--kill server` workers pull from dedicated servers and
push to them: `HybridStrategy(synchronous=False)`. Each batch then marks its own
weights and its own row of an `Embedding`, under Adagrad, so that the final
slots are how often each batch was applied, and its number is its loss, so that
the last epoch's is how often each was counted. A worker is killed at any
instant, and the others end the training. A server is killed when there is a
checkpoint: within an epoch it comes back alone, and has lost at most its own
updates of that epoch; else all processes resume, and nothing is lost.
"""

import argparse
import hashlib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import _program
import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks

TIMEOUT_SECONDS = 300


def main():
    args = parse_arguments()
    if args.train_in:
        (train_asynchronously if args.kill else train)(args)
        return
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        expected, seconds = undisturbed(args, os.path.join(folder, "first"))
        print(f"undisturbed: {seconds:.0f} s, weights {expected}", flush=True)
        rounds = []
        while len(rounds) < args.rounds:
            path = os.path.join(folder, f"round-{len(rounds)}")
            outcome = disturbed(args, path, chance)
            shutil.rmtree(path)
            if outcome is None:
                print("the training ended before the kill", flush=True)
                continue
            is_equal = outcome["weights"] == expected
            # Then the training has checked which updates are lost.
            is_equal |= outcome["is_alone"] and outcome["weights"] is not None
            outcome["is_equal"] = is_equal
            rounds.append(outcome)
            print(
                f"round {len(rounds):3}: rank {outcome['rank']} killed "
                f"{outcome['when']}, {outcome['checkpoints']} checkpoints "
                f"complete; "
                + ("it came back alone; " if outcome["is_alone"] else "")
                + ("equal" if outcome["is_equal"] else "NOT EQUAL"),
                flush=True,
            )
    num_equal = sum(each["is_equal"] for each in rounds)
    num_killed = sum(each["restarts"] > 0 for each in rounds)
    misses = []
    num_resumed = sum(each["is_resumed"] for each in rounds)
    num_alone = sum(each["is_alone"] for each in rounds)
    if args.kill == "server" and num_resumed + num_alone < args.rounds:
        misses.append(f"only {num_resumed} of {args.rounds} rounds resumed")
    if num_equal < args.rounds:
        misses.append(f"{num_equal} of {args.rounds} rounds ended equal")
    if num_killed < args.rounds:
        misses.append(f"only {num_killed} of {args.rounds} kills struck")
    _program.finish(
        {
            "rounds": args.rounds,
            "equal": num_equal,
            "resumed_from_a_checkpoint": num_resumed,
            "servers_back_alone": num_alone,
            "kills_while_writing": sum(e["is_writing"] for e in rounds),
            "kills_before_any_checkpoint": sum(
                not e["checkpoints"] for e in rounds
            ),
            "num_processes": args.num_processes,
            "num_servers": args.servers,
            "kill": args.kill or "rank",
            "engine": args.engine,
        },
        misses,
    )


# The training.


def train(args):
    """On each rank: trains, or resumes; rank 0 tells the weights' digest."""
    # No architecture chosen by times: runs are compared to the bit.
    strategy = ks.HybridStrategy(architecture="hybrid")
    rank, size = strategy.rank, strategy.size
    tell_pid(args, rank)
    keras.utils.set_random_seed(1)
    chance = np.random.default_rng(2)
    ids = (chance.zipf(1.3, (args.steps * 12, 5)) - 1) % 200
    labels = chance.integers(0, 4, len(ids))
    inputs = keras.Input((5,), dtype="int32")
    x = ks.layers.ShardedEmbedding(200, 8, num_partitions=size + 2)(inputs)
    x = keras.layers.Dropout(0.3)(keras.layers.Flatten()(x))
    x = keras.layers.Dense(16, activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(4)(x))
    with strategy.scope():
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    model.fit(
        ids,
        labels,
        batch_size=12,
        epochs=args.epochs,
        verbose=0,
        callbacks=[
            ks.callbacks.ShardedCheckpoint(
                os.path.join(args.train_in, "checkpoints"), every_steps=3
            )
        ],
    )
    # Reading a table is a call of all ranks.
    values = [*model.get_weights(), *model.optimizer.state()]
    if rank == 0:
        tell_digest(args, rank, values)


def train_asynchronously(args):
    """On each rank: trains, or resumes; all workers tell the digest."""
    strategy = ks.HybridStrategy(synchronous=False, max_staleness=4)
    tell_pid(args, strategy.rank)
    layer = Marks(args.steps)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(
            keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0),
            mean_output,
        )
    x = np.arange(args.steps, dtype="float32")[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(1)
    callbacks = []
    if args.kill == "server":
        folder = os.path.join(args.train_in, "checkpoints")
        callbacks = [ks.callbacks.ShardedCheckpoint(folder)]
    history = model.fit(
        data.shuffle(args.steps, seed=3),
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=0,
    ).history
    if not strategy.collectives.is_server:
        weights, loss = model.get_weights(), np.float64(history["loss"][-1])
        # Behind the number of updates and the learning rate.
        slots = [v.numpy() for v in model.optimizer.variables[2:]]
        # A server that came back has lost updates of one epoch at most.
        check_marks(weights, slots, args.epochs, bool(callbacks))
        np.testing.assert_array_equal(loss, (args.steps - 1) / 2)
        tell_digest(args, strategy.rank, [*weights, *slots, loss])


def check_marks(weights, slots, num_updates, may_lack_one):
    """Checks weights and slots of `Marks`."""
    least = num_updates - may_lack_one
    for values, numbers in zip(weights, slots, strict=True):
        if len(values) > len(weights[0]):
            marked = slice(None, None, Marks.STEP)
            np.testing.assert_equal(
                np.count_nonzero(values), values[marked].size
            )
            values, numbers = values[marked], numbers[marked]
        np.testing.assert_array_less(least - 0.5, numbers)
        np.testing.assert_array_less(numbers, num_updates + 0.5)
        # Of the update number n, the rule subtracts 1 / sqrt(n).
        steps = np.arange(1, num_updates + 1) ** -0.5
        moved = -np.cumsum(steps)[numbers.round().astype(int) - 1]
        np.testing.assert_allclose(values, moved, 1e-5)


class Marks(keras.layers.Layer):
    """Its output is the batch's number; its gradient marks it.

    In two weights, and in rows of an `Embedding`; on two servers, if there are
    two.

    Args:
        num_batches: of an epoch.
    """

    # From one batch's row to the next one's: odd, as each server has every
    # second row. The table is then large enough to be cut.
    STEP = 101

    def __init__(self, num_batches):
        super().__init__()
        self._size = num_batches
        self.marks = [
            self.add_weight(shape=(num_batches,), initializer="zeros")
            for _ in range(2)
        ]
        self.rows = keras.layers.Embedding(
            self.STEP * num_batches, 2, embeddings_initializer="zeros"
        )

    def call(self, x):
        number = tf.cast(x[0, 0], tf.int32)
        mark = tf.one_hot(number, self._size)
        product = tf.add_n([tf.reduce_sum(m * mark) for m in self.marks])
        # Twice the same row.
        row = self.rows(tf.fill([2], self.STEP * number))
        product += tf.reduce_sum(row) / 2
        return x + (product - tf.stop_gradient(product))


def mean_output(y, outputs):
    return tf.reduce_mean(outputs)


def tell_pid(args, rank):
    with open(os.path.join(args.train_in, f"rank-{rank}.pid"), "w") as file:
        file.write(str(os.getpid()))


def tell_digest(args, rank, values):
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(np.ascontiguousarray(value).tobytes())
    with open(os.path.join(args.train_in, f"rank-{rank}.end"), "w") as file:
        file.write(digest.hexdigest())


# The kills.


def start(args, folder):
    os.makedirs(folder)
    options = ["--servers", str(args.servers)] if args.servers else []
    if args.kill != "worker":
        options += ["--max-restarts", "3"]
    own = ["--kill", args.kill] if args.kill else []
    return subprocess.Popen(
        [
            *[sys.executable, "-m", "keras_sparsity.launch", "run"],
            *["-n", str(args.num_processes), "--engine", args.engine],
            *[*options, os.path.abspath(__file__), *own],
            *["--train-in", folder, "--engine", args.engine],
            *["--steps", str(args.steps), "--epochs", str(args.epochs)],
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process, folder, num_ends):
    """The weights' digest that so many ranks told, and all that was printed."""
    try:
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, errors = process.communicate()
    found = ended(folder)
    if process.returncode or len(found) < num_ends or len(set(found)) != 1:
        print(f"{output}{errors}{found}", file=sys.stderr)
        return None, f"{output}{errors}"
    return found[0], f"{output}{errors}"


def ended(folder):
    """The digests of the ranks that have ended their training."""
    paths = pathlib.Path(folder).glob("rank-*.end")
    return [path.read_text() for path in paths]


def undisturbed(args, folder):
    """The final weights' digest, and the training's seconds."""
    process = start(args, folder)
    wait_for_ranks(args, folder)
    began = time.monotonic()
    while process.poll() is None and not ended(folder):
        time.sleep(0.05)
    args.seconds = time.monotonic() - began
    num_ends = args.num_processes if args.kill else 1
    weights, _ = end(process, folder, num_ends)
    if weights is None:
        sys.exit("The undisturbed training failed.")
    return weights, args.seconds


def disturbed(args, folder, chance):
    """Trains, kills a rank once, and returns the outcome.

    None if a rank had ended its training by then.
    """
    process = start(args, folder)
    pids = wait_for_ranks(args, folder)
    rank = chance.randrange(args.num_processes)
    num_checkpoints = args.steps * args.epochs // 4
    if args.kill == "server":
        rank = args.num_processes + chance.randrange(args.servers)
        num_checkpoints = args.epochs
    checkpoints = os.path.join(folder, "checkpoints")
    first, seconds = 1, 0.9 * args.seconds
    if args.kill == "server":
        # Then the rest is to be disturbed.
        first, seconds = 2, seconds * (1 - 1 / args.epochs)
        wait_for_complete(checkpoints)
    if args.kill != "worker" and chance.random() < 0.5:
        number = chance.randrange(first, 1 + num_checkpoints) - (first - 1)
        when = f"while writing a checkpoint, after {number} looks"
        wait_for_writing(checkpoints, number)
        time.sleep(chance.uniform(0, 0.03))
    else:
        seconds = chance.uniform(0, seconds)
        when = f"after {seconds:.1f} s"
        time.sleep(seconds)
    names = os.listdir(checkpoints) if os.path.isdir(checkpoints) else []
    is_writing = any(name.endswith(".partial") for name in names)
    num_complete = complete(checkpoints)
    is_late = bool(ended(folder))
    if not is_late:
        os.kill(pids[rank], signal.SIGKILL)
    num_ends = args.num_processes - (args.kill == "worker")
    weights, printed = end(process, folder, num_ends if args.kill else 1)
    if is_late:
        return None
    return {
        "rank": rank,
        "when": when,
        "is_writing": is_writing,
        "checkpoints": num_complete,
        "is_resumed": "Resuming from" in printed,
        "is_alone": "it starts anew" in printed,
        "restarts": len(
            re.findall(
                r"restart \d+ of \d+|others go on\.|it starts anew", printed
            )
        ),
        "weights": weights,
    }


def wait_for_ranks(args, folder):
    """The process ids of all ranks, once each has written its own."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    pids = {}
    while len(pids) < args.num_processes + args.servers:
        if time.monotonic() > deadline:
            sys.exit("The ranks did not start.")
        time.sleep(0.05)
        for rank in range(args.num_processes + args.servers):
            path = os.path.join(folder, f"rank-{rank}.pid")
            if rank not in pids and os.path.exists(path):
                with open(path) as file:
                    text = file.read()
                if text:
                    pids[rank] = int(text)
    return pids


def complete(checkpoints):
    """The number of checkpoints that are complete."""
    names = os.listdir(checkpoints) if os.path.isdir(checkpoints) else []
    return sum(not name.startswith(".") for name in names)


def wait_for_complete(checkpoints):
    """Waits until a checkpoint is complete."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not complete(checkpoints) and time.monotonic() < deadline:
        time.sleep(0.001)


def wait_for_writing(checkpoints, number):
    """Waits until a checkpoint is being written for the `number`-th time."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    was_writing = False
    while number and time.monotonic() < deadline:
        names = os.listdir(checkpoints) if os.path.isdir(checkpoints) else []
        is_writing = any(name.endswith(".partial") for name in names)
        number -= is_writing and not was_writing
        was_writing = is_writing
        time.sleep(0.001)


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--num-processes", type=int, default=3)
    add("--engine", default="native", choices=["native", "horovod"])
    add("--kill", choices=["worker", "server"], help="asynchronous training")
    add("--servers", type=int, help="by default 1 with --kill")
    add("--seed", type=int, default=None, help="of the kills")
    add("--steps", type=int, help="steps of an epoch")
    add("--epochs", type=int, default=2)
    add("--train-in", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.servers is None:
        args.servers = 1 if args.kill else 0
    if args.steps is None:
        args.steps = 1000 if args.kill else 16
    return args


if __name__ == "__main__":
    main()
