"""Kills a random rank at a random instant, again and again.

Each round trains a model (Adam, dropout, shuffled input, sharded tables) on
several processes with `ShardedCheckpoint`, under `keras-sparsity run
--max-restarts`, and kills one rank by SIGKILL: in half of the rounds while a
checkpoint is written, in the others at any instant of the training. The
processes restart, and the final weights and optimizer slots must equal those of
an undisturbed training, to the bit.
"""

import argparse
import hashlib
import os
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

import keras_sparsity as ks

TIMEOUT_SECONDS = 300


def main():
    args = parse_arguments()
    if args.train_in:
        train(args)
        return
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        expected, seconds = undisturbed(args, os.path.join(folder, "first"))
        print(f"undisturbed: {seconds:.0f} s, weights {expected}", flush=True)
        rounds = []
        for number in range(args.rounds):
            path = os.path.join(folder, f"round-{number}")
            outcome = disturbed(args, path, chance)
            outcome["is_equal"] = outcome["weights"] == expected
            rounds.append(outcome)
            print(
                f"round {number + 1:3}: rank {outcome['rank']} killed "
                f"{outcome['when']}, {outcome['checkpoints']} checkpoints "
                f"complete; "
                + ("equal" if outcome["is_equal"] else "NOT EQUAL"),
                flush=True,
            )
            shutil.rmtree(path)
    num_equal = sum(each["is_equal"] for each in rounds)
    num_killed = sum(each["restarts"] > 0 for each in rounds)
    misses = []
    if num_equal < args.rounds:
        misses.append(f"{num_equal} of {args.rounds} rounds ended equal")
    if num_killed < args.rounds:
        misses.append(f"only {num_killed} of {args.rounds} kills struck")
    _program.finish(
        {
            "rounds": args.rounds,
            "equal": num_equal,
            "kills_while_writing": sum(e["is_writing"] for e in rounds),
            "kills_before_any_checkpoint": sum(
                not e["checkpoints"] for e in rounds
            ),
            "num_processes": args.num_processes,
            "engine": args.engine,
        },
        misses,
    )


# The training.


def train(args):
    """On each rank: trains, or resumes, and prints the weights' digest."""
    # No architecture chosen by times: runs are compared to the bit.
    strategy = ks.HybridStrategy(architecture="hybrid")
    folder = args.train_in
    rank, size = strategy.rank, strategy.size
    with open(os.path.join(folder, f"rank-{rank}.pid"), "w") as file:
        file.write(str(os.getpid()))
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
                os.path.join(folder, "checkpoints"), every_steps=3
            )
        ],
    )
    digest = hashlib.blake2b(digest_size=8)
    for value in [*model.get_weights(), *model.optimizer.state()]:
        digest.update(np.ascontiguousarray(value).tobytes())
    if rank == 0:
        print(f"weights {digest.hexdigest()}", flush=True)


# The kills.


def start(args, folder):
    os.makedirs(folder)
    return subprocess.Popen(
        [
            *[sys.executable, "-m", "keras_sparsity.launch", "run"],
            *["-n", str(args.num_processes), "--engine", args.engine],
            *["--max-restarts", "3", os.path.abspath(__file__)],
            *["--train-in", folder, "--engine", args.engine],
            *["--steps", str(args.steps), "--epochs", str(args.epochs)],
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process):
    """The weights' digest that rank 0 printed, and the errors."""
    try:
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, errors = process.communicate()
    found = re.findall(r"^weights (\w+)$", output, re.MULTILINE)
    if process.returncode or not found:
        print(output + errors, file=sys.stderr)
        return None, errors
    return found[-1], errors


def undisturbed(args, folder):
    """The final weights' digest, and the training's seconds."""
    process = start(args, folder)
    wait_for_ranks(args, folder)
    began = time.monotonic()
    weights, _ = end(process)
    if weights is None:
        sys.exit("The undisturbed training failed.")
    args.seconds = time.monotonic() - began
    return weights, args.seconds


def disturbed(args, folder, chance):
    """Trains, kills a rank once, and returns the outcome."""
    process = start(args, folder)
    pids = wait_for_ranks(args, folder)
    rank = chance.randrange(args.num_processes)
    checkpoints = os.path.join(folder, "checkpoints")
    if chance.random() < 0.5:
        number = chance.randrange(1, 1 + args.steps * args.epochs // 4)
        when = f"while writing a checkpoint, after {number} looks"
        wait_for_writing(checkpoints, number)
        time.sleep(chance.uniform(0, 0.03))
    else:
        seconds = chance.uniform(0, 0.9 * args.seconds)
        when = f"after {seconds:.1f} s"
        time.sleep(seconds)
    names = os.listdir(checkpoints) if os.path.isdir(checkpoints) else []
    is_writing = any(name.endswith(".partial") for name in names)
    try:
        os.kill(pids[rank], signal.SIGKILL)
    except ProcessLookupError:
        when += " (too late)"
    weights, errors = end(process)
    return {
        "rank": rank,
        "when": when,
        "is_writing": is_writing,
        "checkpoints": sum(not name.startswith(".") for name in names),
        "restarts": len(re.findall(r"restart \d+ of \d+", errors)),
        "weights": weights,
    }


def wait_for_ranks(args, folder):
    """The process ids of all ranks, once each has written its own."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    pids = {}
    while len(pids) < args.num_processes:
        if time.monotonic() > deadline:
            sys.exit("The ranks did not start.")
        time.sleep(0.05)
        for rank in range(args.num_processes):
            path = os.path.join(folder, f"rank-{rank}.pid")
            if rank not in pids and os.path.exists(path):
                with open(path) as file:
                    text = file.read()
                if text:
                    pids[rank] = int(text)
    return pids


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
    add("--seed", type=int, default=None, help="of the kills")
    add("--steps", type=int, default=16, help="steps of an epoch")
    add("--epochs", type=int, default=2)
    add("--train-in", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
