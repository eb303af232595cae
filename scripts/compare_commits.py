"""Trains the same models on two commits and compares the weights to the bit.

    python scripts/compare_commits.py c431dcb .
    python scripts/compare_commits.py c431dcb main --places native:3

Both sides train the cells of the equality matrix with `architecture="hybrid"`
(`tests/matrix.py` of each side, cells of the newer one) and the programs below,
which use the public API alone. Same seeds, same data: weights and optimizer
slots must have the same bits on every rank. Losses that differ are reported and
do not fail the comparison, because metrics may be summed in another order.

A side is a commit, which is unpacked into a temporary folder, or a folder.
`--cache` keeps the results of commits, so that a bisection trains only the new
side. The exit code is 1 if weights differ or a cell fails on one side only.
"""

import argparse
import hashlib
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
PLACES = ("local:1", "native:2", "native:3", "native:4:2", "horovod:2")
TIMEOUT_SECONDS = 200


# Programs: options of `HybridStrategy` and the model that is trained.
PROGRAMS = {
    "prefetch": ({"prefetch": True}, "tables"),
    "no prefetch": ({}, "tables"),
    "lazy": ({"sparse_updates": "lazy", "prefetch": True}, "tables"),
    "sums": (
        {"sparse_aggregation": "sum", "dense_aggregation": "sum"},
        "tables",
    ),
    "bfloat16": ({"wire_dtype": "bfloat16"}, "tables"),
    "float16": ({"wire_dtype": "float16", "prefetch": True}, "tables"),
    "each process": ({"local_aggregation": False}, "tables"),
    "small messages": ({"bucket_bytes": 64}, "tables"),
    "one message": ({"bucket_bytes": None}, "tables"),
    "sampled softmax": ({}, "softmax"),
    "sampled softmax, prefetch": ({"prefetch": True}, "softmax"),
    "sampled softmax, bfloat16": ({"wire_dtype": "bfloat16"}, "softmax"),
}
NUM_ROWS, DIM, BATCH, STEPS = 61, 4, 12, 8


def program(name):
    """On every rank: the weights, slots and losses of a program."""
    import keras
    import numpy as np

    import keras_sparsity as ks

    options, kind = PROGRAMS[name]
    keras.utils.set_random_seed(5)
    strategy = ks.HybridStrategy(architecture="hybrid", **options)
    model, loss = _MODELS[kind]()
    with strategy.scope():
        model.compile(keras.optimizers.Adagrad(0.1, global_clipnorm=0.5), loss)
    rng = np.random.default_rng(11)
    words = rng.zipf(1.3, (STEPS * BATCH - 5, 3)).astype("int32") % NUM_ROWS
    labels = words[:, 0] if kind == "softmax" else words[:, :1] / NUM_ROWS
    losses = model.fit(
        words, labels, BATCH, epochs=2, shuffle=False, verbose=0
    ).history["loss"]
    tables = [layer for layer in model.layers if hasattr(layer, "table")]
    if kind == "tables":
        ks.moves.repartition(model, {tables[0].table: 5})
        losses += model.fit(
            words, labels, BATCH, shuffle=False, verbose=0
        ).history["loss"]
    values = {v.path: v.numpy() for v in model.weights if "state" not in v.name}
    state = model.optimizer.state()
    values.update((f"optimizer/{i}", value) for i, value in enumerate(state))
    return values, losses


def _tables_model():
    import keras

    import keras_sparsity as ks

    words = keras.Input((3,), dtype="int32")
    rows = [
        ks.layers.ShardedEmbedding(
            NUM_ROWS,
            DIM,
            embeddings_regularizer=keras.regularizers.L2(0.01),
            name="sharded",
        )(words),
        ks.layers.ShardedEmbeddingBag(
            NUM_ROWS, DIM, "sqrtn", num_partitions=3, name="bag"
        )(words)[:, None, :],
        keras.layers.Embedding(NUM_ROWS, DIM, name="ordinary")(words),
    ]
    hidden = keras.layers.Flatten()(keras.layers.Concatenate(axis=1)(rows))
    hidden = keras.layers.Dense(8, activation="tanh")(hidden)
    return keras.Model(words, keras.layers.Dense(1)(hidden)), "mse"


def _softmax_model():
    import keras

    import keras_sparsity as ks

    words = keras.Input((3,), dtype="int32")
    rows = ks.layers.ShardedEmbedding(NUM_ROWS, DIM, name="sharded")(words)
    hidden = keras.layers.Dense(DIM)(keras.layers.Flatten()(rows))
    softmax = ks.layers.SampledSoftmax(NUM_ROWS, num_sampled=9, seed=1)
    return keras.Model(words, softmax(hidden)), softmax.loss()


_MODELS = {"tables": _tables_model, "softmax": _softmax_model}


# In a process of one side, whose working folder is that side's checkout.


def list_cells():
    """Prints the matrix's cells for `architecture="hybrid"` as JSON."""
    import keras

    from tests.test_equality import CELLS

    cells = {
        name: case.cell.to_json()
        for name, case in CELLS.items()
        if case.cell.architecture == "hybrid"
        and hasattr(keras.optimizers, case.cell.optimizer)
    }
    print(json.dumps(cells))


def train_here(place, path):
    """Trains the cells on standard input; pickles what came out of each."""
    import compare_commits  # under the name that ranks import it by

    import keras_sparsity
    from tests import matrix
    from tests.cluster import Cluster, ClusterError

    used = pathlib.Path(keras_sparsity.__file__).parents[1]
    if used != pathlib.Path.cwd():
        raise ImportError(f"{pathlib.Path.cwd()} was to be used, not {used}.")
    engine, num_processes, machines = _parsed(place)
    cluster = Cluster(
        num_processes, engine, machines, {"HOROVOD_CYCLE_TIME": "5"}
    )
    results = {}
    for name, cell in json.load(sys.stdin).items():
        call = (matrix.train, cell) if cell else (compare_commits.program, name)
        try:
            ranks = cluster.run(*call, timeout=TIMEOUT_SECONDS)
        except ClusterError as error:
            results[name] = str(error)
            continue
        results[name] = [
            (outcome.end, outcome.losses) if cell else outcome
            for outcome in ranks
        ]
    cluster.stop()
    pathlib.Path(path).write_bytes(pickle.dumps(results))


def _parsed(place):
    """Engine, number of processes and of machines, as in `native:4:2`."""
    engine, num_processes, *machines = place.split(":")
    return engine, int(num_processes), int(machines[0]) if machines else 1


# In the process that compares.


class Side:
    """One of the two checkouts.

    Args:
        name: a commit or a folder.
        folder: where a commit is unpacked.
        cache: folder that keeps a commit's results, or None.
    """

    def __init__(self, name, folder, cache):
        self.name = name
        self._cache = None
        if os.path.isdir(name):
            self._checkout = pathlib.Path(name).resolve()
            return
        commit = _git("rev-parse", f"{name}^{{commit}}").decode().strip()
        self._checkout = pathlib.Path(folder) / commit
        self._checkout.mkdir(exist_ok=True)
        archive = _git("archive", commit)
        subprocess.run(["tar", "-x"], input=archive, cwd=self._checkout)
        if cache:
            source = hashlib.sha256(pathlib.Path(__file__).read_bytes())
            self._cache = pathlib.Path(cache) / (
                f"{commit}-{source.hexdigest()[:8]}"
            )
            self._cache.mkdir(parents=True, exist_ok=True)

    def run(self, *arguments, **options):
        """Runs this script with the side's library and tests."""
        path = [str(self._checkout), str(ROOT / "scripts")]
        return subprocess.run(
            [sys.executable, __file__, *arguments],
            cwd=self._checkout,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "KERAS_BACKEND": "tensorflow",
                "TF_CPP_MIN_LOG_LEVEL": "2",
            },
            check=True,
            **options,
        )

    def cells(self):
        listed = self.run("--list", stdout=subprocess.PIPE).stdout
        return json.loads(listed.splitlines()[-1])

    def train(self, place, cells):
        """What came out of each cell at a place, by name."""
        kept = self._cache and self._cache / f"{place}.pickle"
        results = {}
        if kept and kept.exists():
            results = pickle.loads(kept.read_bytes())
        new = {
            name: cell
            for name, cell in cells.items()
            if (name, cell) not in results
        }
        if new:
            with tempfile.NamedTemporaryFile() as file:
                self.run(
                    "--train",
                    place,
                    file.name,
                    input=json.dumps(new).encode(),
                )
                found = pickle.loads(file.read())
            results.update({(n, cells[n]): found[n] for n in found})
            if kept:
                kept.write_bytes(pickle.dumps(results))
        return {name: results[name, cell] for name, cell in cells.items()}


def _git(*arguments):
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE
    ).stdout


def differences(before, after):
    """Differing values of one cell, as lines; and whether losses differ."""
    if isinstance(before, str) or isinstance(after, str):
        failed = [s for s in (before, after) if isinstance(s, str)]
        # A cell that no side can train compares nothing and must be seen too.
        return [f"failed: {failed[0][-2000:]}"], False
    lines, losses = [], False
    for rank, (one, other) in enumerate(zip(before, after, strict=True)):
        (left, left_losses), (right, right_losses) = one, other
        losses |= left_losses != right_losses
        if left.keys() != right.keys():
            odd = sorted(left.keys() ^ right.keys())
            lines.append(f"rank {rank}: on one side only: {odd}")
        for name in left.keys() & right.keys():
            a, b = left[name], right[name]
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                lines.append(f"rank {rank}: {name}: {a.shape}, {b.shape}")
            elif a.tobytes() != b.tobytes():
                apart = abs(a.astype("float64") - b.astype("float64")).max()
                lines.append(f"rank {rank}: {name}: by up to {apart:.2g}")
    return lines, losses


def compare(options):
    with tempfile.TemporaryDirectory() as folder:
        sides = [
            Side(name, folder, options.cache)
            for name in (options.before, options.after)
        ]
        cells = {**sides[1].cells(), **dict.fromkeys(PROGRAMS)}
        cells = {n: c for n, c in cells.items() if re.search(options.cells, n)}
        num_compared = num_different = 0
        for place in options.places:
            before, after = (side.train(place, cells) for side in sides)
            for name in cells:
                lines, losses = differences(before[name], after[name])
                num_compared += 1
                num_different += bool(lines)
                if losses:
                    print(f"{place}, {name}: losses differ")
                for line in lines[:6]:
                    print(f"{place}, {name}: DIFFERENT: {line}")
            print(f"{place}: {len(cells)} cells compared", flush=True)
    print(
        f"{num_different} of {num_compared} differ between {options.before} "
        f"and {options.after}."
    )
    return 1 if num_different or not num_compared else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", nargs="?", help="a commit or a folder")
    parser.add_argument("after", nargs="?", default=str(ROOT))
    parser.add_argument(
        "--places",
        nargs="+",
        default=PLACES,
        metavar="ENGINE:PROCESSES[:MACHINES]",
    )
    parser.add_argument("--cells", default="", help="a regular expression")
    parser.add_argument("--cache", help="folder for the results of commits")
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        return list_cells()
    if options.train:
        return train_here(*options.train)
    if options.before is None:
        parser.error("name a commit to compare with")
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
