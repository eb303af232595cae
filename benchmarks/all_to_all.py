"""How much of their links machines fill that all send rows to each other.

What a pull or a push of rows is made of: each process of an emulated cluster
sends every other one a part of its own, of parts that differ by a tenth, along
a route that is known. Asked of the largest, at the slowest rate, on Horovod's
engine: that the busiest link is in use for nine tenths of the time. Needs root,
as `cluster.py` does.
"""

import argparse
import contextlib
import io
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import _network
import _timing
import numpy as np
import tensorflow as tf
from cluster import Cluster, ClusterError

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
    _timing.finish({"least": LEAST, "network_share": shares}, misses)


def on_cluster(args, size):
    """What `inside` reports, of each rate."""
    arguments = ["--inside", str(size), "--times", str(args.times)]
    shown = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(shown),
            Cluster(args.machines, rate=RATES) as cluster,
        ):
            found = cluster.run(__file__, arguments, args.engine)
    except ClusterError as error:
        sys.exit(f"all_to_all.py: {error}")
    if found["exit_code"]:
        sys.exit(
            f"{shown.getvalue()}\n{size} kB: exit code {found['exit_code']}"
        )
    return _network.by_rate(found)


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
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--engine", default="horovod")
    add("--machines", type=int, default=8)
    add("--sizes", type=int, nargs="+", default=SIZES, help="kB of a part")
    add("--times", type=int, default=10, help="that are timed")
    add("--inside", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
