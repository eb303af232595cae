"""The time of a step on touched rows of a large and of a small table.

A step gathers 4,096 rows of a sharded table in one process, computes their
gradient and applies it by `HybridOptimizer`. Asked of optimizers that update
touched rows alone, exact ones included: at most 1.3 times as long on a million
rows as on ten thousand. Exact rules run in turn with their lazy ones, of whose
time at most 1.5 times is asked. Stock Keras is shown beside them.

The rows are the same in both tables, all among the first ten thousand: this
compares the work, not the processor's access to 4,096 rows in 5 MB and in 512
MB. `--spread` shows the latter, with rows from all of the large table and no
limit. Rows are drawn by Zipf, others in each of 64 steps, which are repeated:
in an exact step most of them have been left behind, some for 64 steps. Before,
`--idle-steps` steps touch a few rows alone, from which the others come back
after as many steps.
"""

import gc
import itertools
import statistics

import _program
import _timing
import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks

LIMIT = 1.3
EXACT_LIMIT = 1.5  # times lazy
NUM_BATCHES = 64
NUM_IDLE = 16  # rows of an idle step
RULES = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.01, 0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "centered": lambda: keras.optimizers.RMSprop(0.01, centered=True),
    "adadelta": lambda: keras.optimizers.Adadelta(0.01),
}
BY_ROWS = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    **{
        f"{name}_{mode}": make
        for name, make in RULES.items()
        for mode in ("lazy", "exact")
    },
    # Which no lazy rule has.
    "averaged_adam_exact": lambda: keras.optimizers.Adam(0.01, use_ema=True),
}
BESIDE = {
    "stock_sgd": lambda: keras.optimizers.SGD(0.01),
    "stock_adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "stock_adam": lambda: keras.optimizers.Adam(0.01),
    "stock_averaged_adam": lambda: keras.optimizers.Adam(0.01, use_ema=True),
}


def main():
    args = parse_arguments()
    figures, misses = {}, []
    for names in together(args.rules or [*BY_ROWS, *BESIDE]):
        seconds = measure(names, args)
        for name in names:
            large, small = seconds[name, "large"], seconds[name, "small"]
            ratio = _timing.median_ratio(large, small)
            figures[name] = {
                "large_milliseconds": round(1e3 * statistics.median(large), 3),
                "small_milliseconds": round(1e3 * statistics.median(small), 3),
                "ratio": round(ratio, 3),
            }
            print(f"{name:20}" + row(figures[name]), flush=True)
            if name in BY_ROWS and ratio > LIMIT and not args.spread:
                misses.append(
                    f"{name}: {ratio:.2f} times the small table's step, at "
                    f"most {LIMIT} asked"
                )
        if len(names) == 2:
            lazy, exact = names
            ratio = _timing.median_ratio(
                seconds[exact, "large"], seconds[lazy, "large"]
            )
            figures[exact]["times_lazy"] = round(ratio, 3)
            print(f"{'':20}exact / lazy {ratio:.2f}", flush=True)
            if ratio > EXACT_LIMIT:
                misses.append(
                    f"{exact}: {ratio:.2f} times the lazy step, at most "
                    f"{EXACT_LIMIT} asked"
                )
    limit = None if args.spread else LIMIT
    _program.finish({"limit": limit, "optimizers": figures}, misses)


def together(names):
    """Lists of names that are measured in turn: a rule's lazy and exact one."""
    pairs = [[f"{rule}_lazy", f"{rule}_exact"] for rule in RULES]
    pairs = [pair for pair in pairs if set(pair) <= set(names)]
    paired = sum(pairs, [])
    return [[name] for name in names if name not in paired] + pairs


def measure(names, args):
    """Seconds of steps, in turn: dict from `(name, size)` to a list."""
    sizes = {"large": args.num_rows, "small": args.num_small_rows}
    steps = {
        (name, size): make_step(name, num_rows, args)
        for name in names
        for size, num_rows in sizes.items()
    }
    are_by_rows = names[0] in BY_ROWS
    seconds = _timing.interleaved(
        steps, num_rounds=args.rounds if are_by_rows else args.rounds_beside
    )
    del steps
    gc.collect()  # tables and what keeps their rows refer to each other
    return seconds


def wrap(name, optimizer):
    if name.startswith("stock"):
        return optimizer
    mode = "lazy" if name.endswith("_lazy") else "exact"
    return ks.HybridOptimizer(optimizer, sparse_updates=mode)


def make_step(name, num_rows, args):
    """One training step on a table of `num_rows` rows, as a function."""
    optimizer = wrap(name, {**BY_ROWS, **BESIDE}[name]())
    random = np.random.default_rng(0)
    high = num_rows if args.spread else args.num_small_rows
    by_zipf = 1 / np.arange(1, high + 1)
    batches = [
        random.choice(
            high, args.num_touched, replace=False, p=by_zipf / by_zipf.sum()
        )
        for _ in range(NUM_BATCHES)
    ]
    batches = [tf.constant(ids, tf.int64) for ids in batches]
    upstream = tf.constant(
        random.normal(size=(args.num_touched, args.dim)), tf.float32
    )
    if isinstance(optimizer, ks.HybridOptimizer):
        table = ks.ShardedTable(num_rows, args.dim)
        variable, gather = table.variable, table.gather
    else:
        embedding = keras.layers.Embedding(num_rows, args.dim)
        embedding.build()
        variable, gather = embedding.embeddings, embedding
    optimizer.build([variable])

    @tf.function(reduce_retracing=True)
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(gather(ids) * upstream[: tf.size(ids)])
        gradients = tape.gradient(loss, [variable.value])
        optimizer.apply(gradients, [variable])
        return loss

    if name.endswith("_exact"):
        for ids in batches:
            step(ids)
        for _ in range(args.idle_steps):
            step(batches[0][:NUM_IDLE])
    batches = itertools.cycle(batches)
    return lambda: step(next(batches)).numpy()


def row(figures):
    return (
        f"{figures['large_milliseconds']:10.2f} ms"
        f"{figures['small_milliseconds']:10.2f} ms"
        f"  ratio {figures['ratio']:.2f}"
    )


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    add("--num-rows", type=int, default=1_000_000, help="of the large table")
    add("--num-small-rows", type=int, default=10_000)
    add("--dim", type=int, default=128)
    add("--num-touched", type=int, default=4096)
    add("--rounds", type=int, default=200)
    add("--rounds-beside", type=int, default=3, help="of exact and stock")
    add("--idle-steps", type=int, default=10_000, help="of exact rules")
    add("--rules", nargs="+", choices=[*BY_ROWS, *BESIDE], help="of all")
    add("--spread", action="store_true", help="rows all over the large table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
