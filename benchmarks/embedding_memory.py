"""The memory of a process that trains ordinary embeddings.

A subclassed model of ordinary `keras.layers.Embedding`s, with Adagrad, of
which the user changes the strategy line only. Its peak in each process, less
that of a process of stock Keras whose tables are tiny, in terms of the bytes of
all tables and their slots: at most 0.3 on 4 processes.
"""

import contextlib
import math

import _program
import keras
import numpy as np

import keras_sparsity as ks

LIMIT, DIM, BATCH = 0.3, 64, 256


def main():
    parser = _program.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("-n", "--num-processes", type=int, default=4)
    parser.add_argument("--engine", default="native")
    args = parser.parse_args()
    num_rows = math.ceil(args.megabytes * 2**20 / (4 * DIM * args.tables))
    (stock,) = ks.launch.run(
        peak_megabytes, 1, engine="local", args=(1000, args.tables, False)
    )
    peaks = ks.launch.run(
        peak_megabytes,
        args.num_processes,
        engine=args.engine,
        args=(num_rows, args.tables, True),
    )
    whole = 2 * args.megabytes  # with their slots
    shares = [(peak - stock) / whole for peak in peaks]
    figures = {
        "megabytes_of_tables_and_slots": whole,
        "megabytes_of_stock_process": round(stock),
        "megabytes_of_processes": [round(peak) for peak in peaks],
        "shares": [round(share, 3) for share in shares],
        "limit": LIMIT,
    }
    misses = []
    if max(shares) > LIMIT:
        misses.append(f"{max(shares):.3f} of the tables, at most {LIMIT} asked")
    _program.finish(figures, misses)


class Recommender(keras.Model):
    def __init__(self, num_rows, num_tables):
        super().__init__()
        self.tables = [
            keras.layers.Embedding(num_rows, DIM) for _ in range(num_tables)
        ]
        self.last = keras.layers.Dense(1)

    def call(self, ids):
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.last(keras.ops.concatenate(rows, axis=1))


def peak_megabytes(num_rows, num_tables, is_distributed):
    """The peak of this process, in MiB, after some steps of `fit`."""
    model = Recommender(num_rows, num_tables)
    scope = contextlib.nullcontext()
    if is_distributed:
        scope = ks.HybridStrategy().scope()
    with scope:
        model.compile("adagrad", "mse")
    ids = np.random.default_rng(0).integers(
        num_rows, size=(20 * BATCH, num_tables)
    )
    model.fit(ids, np.ones((len(ids), 1)), batch_size=BATCH, verbose=0)
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmHWM"].split()[0]) / 1024


if __name__ == "__main__":
    main()
