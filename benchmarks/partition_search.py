"""The number of partitions that a search finds, against trying them all.

Several shapes of tables, on several processes of this machine. For each,
`ks.callbacks.PartitionSearch` searches inside of `fit`, as in a user's program;
its time is that from the start of `fit` to the choice, moves of tables and new
traces included. Then models with each number of partitions of a grid over the
sampled range run in turn, round by round; those near the best go on to the next
stage, until one is left. It and the choice run in turn until the median of the
rounds' ratios is known to 1 %, or for long enough.

Asked of each shape: at least 0.97 of the best one's steps/s, at most 7 samples,
in 90 s, and a worst number that takes at least 1.3 times the best one's time,
so that there is something to find; and of all shapes together, that the best is
not always the default, a partition for each process.
"""

import operator
import statistics
import time

import _program
import keras
import numpy as np
import tensorflow as tf
from _steps import Steps
from _timing import in_turn

import keras_sparsity as ks
from keras_sparsity.callbacks.step_seconds import median_and_error

LEAST_SHARE = 0.97
MOST_SAMPLES = 7
MOST_SECONDS = 90
LEAST_SPREAD = 1.3

BATCH, WORDS = 128, 16
# Exact updates of whole partitions: with many, a partition fits into the
# processor's cache; each one costs operations.
SHAPES = {
    "long": {
        "tables": [(200_000, 64)],
        "optimizer": "adam",
        "num_processes": 2,
    },
    "wide": {
        "tables": [(20_000, 512)],
        "optimizer": "rmsprop",
        "num_processes": 2,
    },
    "several": {
        "tables": [(50_000, 64)] * 2,
        "optimizer": "adam",
        "num_processes": 2,
    },
}
# Rounds of each stage, and the largest time / the best one's that stays.
STAGES = [(4, 1.15), (6, 1.05), (12, 1.0)]
# Rounds of the last two numbers, until the standard error is small enough.
LEAST_ROUNDS, MOST_ROUNDS, ERROR = 20, 100, 0.01
# Steps of a round.
STEPS = 8


def main():
    args = parse_arguments()
    shapes, misses = {}, []
    for name in args.shapes:
        figures = ks.launch.run(
            measure,
            SHAPES[name]["num_processes"],
            engine=args.engine,
            args=(name, args.per_octave),
        )[0]
        shapes[name] = figures
        misses += [f"{name}: {miss}" for miss in missed(figures)]
        print(row(name, figures), flush=True)
    misses += missed_together(shapes)
    figures = {
        "least_share": LEAST_SHARE,
        "most_seconds": MOST_SECONDS,
        "engine": args.engine,
        "shapes": shapes,
    }
    _program.finish(figures, misses)


def missed(figures):
    if figures["share"] < LEAST_SHARE:
        yield (
            f"{figures['chosen']} partitions reach {figures['share']:.3f} of "
            f"the steps/s of {figures['best']}, at least {LEAST_SHARE} asked"
        )
    if len(figures["samples"]) > MOST_SAMPLES:
        yield f"{len(figures['samples'])} samples, at most {MOST_SAMPLES} asked"
    if figures["search_seconds"] > MOST_SECONDS:
        yield (
            f"{figures['search_seconds']} s of search, at most {MOST_SECONDS} "
            "asked"
        )
    if figures["spread"] < LEAST_SPREAD:
        yield (
            f"the worst takes {figures['spread']:.2f} times the best's time, "
            f"at least {LEAST_SPREAD} asked, so that the choice matters"
        )


def missed_together(shapes):
    if all(
        each["best"] == SHAPES[name]["num_processes"]
        for name, each in shapes.items()
    ):
        yield "the best is the default, a partition per process, for all shapes"


# On each rank.


def measure(name, per_octave):
    """Searches, then tries all; returns the figures."""
    shape = SHAPES[name]
    strategy = ks.HybridStrategy(architecture="hybrid")
    dataset = make_dataset(strategy, shape)
    choice, search_seconds = search(strategy, shape, dataset)
    say(strategy, f"{name}: {choice.explained()}; {search_seconds:.0f} s")
    sampled = [sample.num_partitions for sample in choice.samples]
    counts = grid(min(sampled), max(sampled), per_octave)
    counts = sorted({*counts, *sampled, choice.num_partitions})
    steps = {}
    for count in counts:
        model = make_model(strategy, shape, count)
        steps[count] = Steps(model, dataset, STEPS)
        steps[count]()  # traced and warm
    first = None
    for num_rounds, share in STAGES:
        rounds = in_turn(steps, num_rounds)
        medians = {c: statistics.median(r) for c, r in rounds.items()}
        first = first or medians
        say(strategy, f"  {num_rounds} rounds, ms: {rounded(medians)}")
        best = min(medians, key=medians.get)
        steps = {
            count: each
            for count, each in steps.items()
            if medians[count] <= share * medians[best]
            or count == choice.num_partitions
        }
    share, error, num_rounds = compare(steps, best, choice.num_partitions)
    return {
        "start": sampled[0],
        "samples": {
            sample.num_partitions: round(1e3 * sample.seconds, 2)
            for sample in choice.samples
        },
        "theta_milliseconds": [round(1e3 * t, 4) for t in choice.theta],
        "misfit": round(choice.misfit, 4),
        "chosen": choice.num_partitions,
        "search_seconds": round(search_seconds, 1),
        "best": best,
        "best_milliseconds": round(medians[best], 2),
        "share": round(share, 3),
        "share_error": round(error, 3),
        "rounds": num_rounds,
        "spread": round(max(first.values()) / min(first.values()), 2),
        "grid_milliseconds": rounded(first),
    }


def compare(steps, best, chosen):
    """Steps/s of the choice / the best's: median, error, rounds."""
    if best == chosen:
        return 1.0, 0.0, 0
    shares = []
    while True:
        rounds = in_turn(steps, LEAST_ROUNDS)
        shares += map(operator.truediv, rounds[best], rounds[chosen])
        share, error = median_and_error(shares)
        if error <= ERROR or len(shares) >= MOST_ROUNDS:
            return share, error, len(shares)


def search(strategy, shape, dataset):
    """The choice of a search inside of `fit`, and the seconds it took."""
    model = make_model(strategy, shape, None)
    callback = ks.callbacks.PartitionSearch(verbose=0)
    start = time.perf_counter()
    model.fit(
        dataset,
        epochs=1,
        steps_per_epoch=100_000,
        verbose=0,
        callbacks=[callback, StopWhenFound(callback)],
    )
    return callback.result["tables"], time.perf_counter() - start


class StopWhenFound(keras.callbacks.Callback):
    """Ends training with the first step after the choice."""

    def __init__(self, search):
        super().__init__()
        self._search = search

    def on_train_batch_end(self, batch, logs=None):
        if self._search.result:
            self.model.stop_training = True


def grid(low, high, per_octave):
    """Numbers from `low` to `high`, so many between one and its double."""
    counts = []
    count = low
    while count <= high:
        counts.append(count)
        count += max(1, 2 ** (count.bit_length() - 1) // per_octave)
    return counts


def make_model(strategy, shape, num_partitions):
    keras.utils.set_random_seed(0)
    inputs, pooled = [], []
    for num_rows, dim in shape["tables"]:
        inputs.append(keras.Input((WORDS,), dtype="int32"))
        rows = ks.layers.ShardedEmbedding(
            num_rows, dim, num_partitions=num_partitions
        )(inputs[-1])
        pooled.append(keras.layers.GlobalAveragePooling1D()(rows))
    x = pooled[0]
    if len(pooled) > 1:
        x = keras.layers.Concatenate()(pooled)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    with strategy.scope():
        model.compile(shape["optimizer"], loss="mse")
    return model


def make_dataset(strategy, shape):
    """Zipf ids, as words of a text are."""
    random = np.random.default_rng(0)
    num_examples = 20 * BATCH
    words = [
        ((random.zipf(1.2, (num_examples, WORDS)) - 1) % num_rows).astype(
            "int32"
        )
        for num_rows, _ in shape["tables"]
    ]
    labels = random.normal(size=(num_examples, 1)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((tuple(words), labels))
    return strategy.shard(dataset.batch(BATCH).cache().repeat())


# Output.


def say(strategy, text):
    if strategy.rank == 0:
        print(text, flush=True)


def rounded(medians):
    return {count: round(value, 1) for count, value in medians.items()}


def row(name, figures):
    return (
        f"{name:16} chosen {figures['chosen']:3} best {figures['best']:3} "
        f"share {figures['share']:.3f} (+- {figures['share_error']:.3f} in "
        f"{figures['rounds']} rounds), "
        f"{len(figures['samples'])} samples in "
        f"{figures['search_seconds']:.0f} s, worst over best "
        f"{figures['spread']:.2f}"
    )


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    add(
        "--shapes",
        nargs="+",
        choices=list(SHAPES),
        default=list(SHAPES),
        help="of tables, by default all",
    )
    add(
        "--per-octave",
        type=int,
        choices=[1, 2, 4, 8],
        default=2,
        help="numbers of partitions to try between one and its double, beside "
        "those that were sampled",
    )
    add("--engine", choices=["native", "horovod"], default="native")
    return parser.parse_args()


if __name__ == "__main__":
    main()
