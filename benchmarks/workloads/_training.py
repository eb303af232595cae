"""What the workloads share: how they are trained, timed and reported."""

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import _facts
import _network
import keras
import numpy as np

import keras_sparsity as ks


class Timed(keras.callbacks.Callback):
    """The steps after some: how long they take, and what they send.

    Args:
        warm_up: Steps before, which trace the model.
        steps: Steps that count.
        ranks: The `Collectives` of all processes.
    """

    def __init__(self, warm_up, steps, ranks):
        super().__init__()
        self.warm_up, self.steps, self.ranks = warm_up, steps, ranks
        self.window = _network.Window()

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.warm_up:
            self.ranks.barrier("timed/begin")
            self.window.begin()
        if batch + 1 == self.warm_up + self.steps:
            self.ranks.barrier("timed/end")
            self.window.end()
            self.window.idle()
            self.ranks.barrier("timed/idle")


def run(make, parser):
    """Trains what `make` makes, and reports it on rank 0.

    Args:
        make: Function of the arguments, of the number of examples of all
            processes and of all steps, and of a NumPy generator. Returns
            the model, its inputs, labels and loss, the optimizer, and the
            number of words in an example.
        parser: `argparse.ArgumentParser` with the workload's own options.
    """
    add = parser.add_argument
    add("--batch", type=int, default=64, help="examples of each process")
    add("--steps", type=int, default=40, help="that count")
    add("--warm-up", type=int, default=10, help="steps before them")
    add("--architecture", default="hybrid", help="of the strategy")
    add("--wire-dtype", help="of the strategy")
    add(
        "--no-local-aggregation",
        dest="local_aggregation",
        action="store_false",
        help="of the strategy",
    )
    add("--alone", action="store_true", help="time it without exchange, too")
    args = parser.parse_args()
    if args.warm_up < 1:
        parser.error(f"--warm-up must be 1 or more. Received: {args.warm_up}.")
    strategy = ks.HybridStrategy(
        architecture=args.architecture,
        wire_dtype=args.wire_dtype,
        local_aggregation=args.local_aggregation,
    )
    batch = args.batch * strategy.size
    model, x, y, loss, optimizer, words = make(
        args, batch * (args.warm_up + args.steps), np.random.default_rng(1)
    )
    with strategy.scope():
        model.compile(optimizer, loss)
    timed = Timed(args.warm_up, args.steps, strategy.collectives)
    losses = model.fit(
        x, y, batch, callbacks=[timed], shuffle=False, verbose=0
    ).history["loss"]
    facts = {"variables": _facts.of_variables(model, x, batch, strategy)}
    if args.alone:
        facts["seconds_alone"] = _facts.seconds_alone(
            lambda: _alone(make, args, strategy.rank),
            args.warm_up,
            args.steps,
            strategy.collectives,
        )
    if strategy.rank == 0:
        timed.window.report(
            args.steps,
            words * batch,
            engine=strategy.collectives.engine,
            workload=vars(args),
            loss=losses[-1],
            **facts,
        )


def _alone(make, args, rank):
    """Makes what a process trains alone, see `_facts.seconds_alone`."""
    strategy = ks.HybridStrategy(architecture="hybrid")
    model, x, y, loss, optimizer, _ = make(
        args,
        args.batch * (args.warm_up + args.steps),
        np.random.default_rng(1 + rank),
    )
    with strategy.scope():
        model.compile(optimizer, loss)
    return lambda callbacks: model.fit(
        x, y, args.batch, callbacks=callbacks, shuffle=False, verbose=0
    )


def options(description):
    return argparse.ArgumentParser(description=description)


def zipf(shape, num_rows, generator):
    """Ids that come as often as words do: id k in proportion to 1 / (k + 1)."""
    uniform = generator.random(shape)
    ids = np.exp(uniform * np.log(num_rows + 1)).astype("int64") - 1
    return np.minimum(ids, num_rows - 1)
