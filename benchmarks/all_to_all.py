"""Use of the links while all machines exchange rows.

The message of a pull or a push: each process of an emulated cluster sends every
other one a part of its own, along a known route; the parts differ by a tenth.
Asked of the largest parts at the slowest rate, on Horovod's engine: the busiest
link is in use for nine tenths of the time. Needs root, as `cluster.py` does.
"""

import argparse

import _network
import _program
import cluster
import numpy as np
import tensorflow as tf

import keras_sparsity as ks

LEAST = 0.9
RATES = (50, 200)
SIZES = (40, 190, 380)
WIDTH = 64


def main():
    args = parse_arguments()
    if args.inside:
        inside(args)
        return
    shares = {}
    for size in args.sizes:
        for window in on_cluster(args, size):
            name = f"{size} kB, {window['rate_mbit']:g} Mbit/s"
            shares[name] = window["network_share"]
            print(
                f"{args.engine}, {args.machines} machines, parts of {name}: "
                f"{1e3 / window['steps_per_second']:,.0f} ms, of which the "
                f"busiest link is in use for {shares[name]:.0%}",
                flush=True,
            )
    largest = f"{max(args.sizes)} kB, {min(RATES)} Mbit/s"
    misses = []
    if args.engine == "horovod" and shares[largest] < LEAST:
        misses = [f"{largest}: {shares[largest]:.0%}, {LEAST:.0%} asked"]
    _program.finish({"least": LEAST, "network_share": shares}, misses)


def on_cluster(args, size):
    """The figures of `inside`, at each rate."""
    arguments = ["--inside", str(size), "--times", str(args.times)]
    return cluster.measure(
        __file__, arguments, args.engine, machines=args.machines, rate=RATES
    )


def inside(args):
    strategy = ks.HybridStrategy(architecture="hybrid")
    ranks = strategy.collectives
    random = np.random.default_rng(ranks.rank)
    rows = args.inside * 1000 / (4 * WIDTH)
    splits = rows * (1 + 0.1 * random.standard_normal(ranks.size))
    splits = tf.constant(splits.astype("int32"))
    sent = tf.zeros([tf.reduce_sum(splits), WIDTH])

    @tf.function
    def send(times):
        _, route = ranks.all_to_all(sent[:, 0], splits, name="rows/first")
        for _ in tf.range(times):
            ranks.all_to_all_along(sent, route, name="rows")

    window = _network.Window(is_first=ranks.rank == 0)
    for rate in window.rates:
        ranks.barrier("limit")
        window.limit(rate)
        send(tf.constant(_network.SETTLE))
        ranks.barrier("begin")
        window.begin()
        send(tf.constant(args.times))
        ranks.barrier("end")
        window.end(args.times)
    window.idle()
    ranks.barrier("idle")
    window.report(0)


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    add("--engine", default="horovod")
    add("--machines", type=int, default=8)
    add("--sizes", type=int, nargs="+", default=SIZES, help="kB of a part")
    add("--times", type=int, default=10, help="that are timed")
    add("--inside", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
