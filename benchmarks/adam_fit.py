"""`fit` with Keras's default Adam and a large table, against stock Keras.

The whole training step of a small model in one process: `ShardedEmbedding`
compiled inside `HybridStrategy.scope()`, with its default exact updates, and
`keras.layers.Embedding` in plain Keras, which updates the whole table. Asked:
at least 30 times the steps/s. Weights are not compared here: stock Keras does
not sum the gradients of rows that occur twice, see `tests/update`.
"""

import functools

import _program
import _timing
import keras
import numpy as np
import tensorflow as tf
from single_process import StepSeconds

import keras_sparsity as ks

LIMIT = 30


def main():
    args = parse_arguments()
    dataset = make_dataset(args)
    with ks.HybridStrategy().scope():
        models = {"exact": make_model(ks.layers.ShardedEmbedding, args)}
    models["stock"] = make_model(keras.layers.Embedding, args)
    clocks = {name: StepSeconds() for name in models}
    _timing.interleaved(
        {
            name: functools.partial(
                model.fit, dataset, callbacks=[clocks[name]], verbose=0
            )
            for name, model in models.items()
        },
        num_rounds=args.rounds,
        num_warm_up=1,  # traced
    )
    seconds = {name: clock.seconds[1:] for name, clock in clocks.items()}
    ratio = _timing.median_ratio(seconds["stock"], seconds["exact"])
    figures = {
        f"{name}_milliseconds": round(1e3 * float(np.median(s)), 2)
        for name, s in seconds.items()
    }
    print(
        f"exact {figures['exact_milliseconds']} ms, stock "
        f"{figures['stock_milliseconds']} ms: {ratio:.1f} times the steps/s"
    )
    misses = []
    if ratio < LIMIT:
        misses.append(f"{ratio:.1f} times the steps/s, {LIMIT} asked")
    figures["ratio"] = round(ratio, 2)
    _program.finish({"limit": LIMIT, **figures}, misses)


def make_model(embedding, args):
    model = keras.Sequential(
        [
            keras.Input((args.time,), dtype="int32"),
            embedding(args.num_rows, args.dim),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy")
    return model


def make_dataset(args):
    """As many different batches as `fit` takes, of ids by Zipf."""
    rng = np.random.default_rng(0)
    shape = args.steps * args.batch_size, args.time
    ids = np.minimum(rng.zipf(1.2, shape), args.num_rows) - 1
    labels = rng.integers(0, 2, shape[0]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(
        args.batch_size
    )


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    add("--num-rows", type=int, default=400_000)
    add("--dim", type=int, default=256)
    add("--batch-size", type=int, default=128)
    add("--time", type=int, default=20, help="words of an example")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=6, help="steps of a round")
    return parser.parse_args()


if __name__ == "__main__":
    main()
