"""The library's overhead in one process.

`fit` of a model with `ShardedEmbedding`, compiled inside
`HybridStrategy.scope()`, against `fit` of the same model with
`keras.layers.Embedding` in plain Keras, both under SGD. Asked: at least 0.98 of
the steps/s, by default and with 16 bits on the wire, local aggregation and
prefetch. The models are small, so that overheads show.
"""

import functools
import statistics
import time

import _program
import _timing
import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks

LIMIT = 0.98
# Arguments of `HybridStrategy`.
STRATEGIES = {
    "sharded": {},
    "everything": {
        "wire_dtype": "bfloat16",
        "local_aggregation": True,
        "prefetch": True,
    },
}
# Judged are the first one's steps/s / the second's.
JUDGED = (("sharded", "stock"), ("everything", "stock"))


def main():
    args = parse_arguments()
    dataset = make_dataset(args)
    models = {
        name: sharded_model(args, strategy)
        for name, strategy in STRATEGIES.items()
    }
    models["stock"] = stock_model(args)
    for model in models.values():  # traced and warm
        model.fit(dataset, steps_per_epoch=20, verbose=0)
    clocks = {name: StepSeconds() for name in models}
    _timing.interleaved(
        {
            name: functools.partial(
                model.fit,
                dataset,
                steps_per_epoch=args.steps,
                callbacks=[clocks[name]],
                verbose=0,
            )
            for name, model in models.items()
        },
        num_rounds=args.rounds,
        num_warm_up=0,
    )
    seconds = {name: clock.seconds for name, clock in clocks.items()}
    steps = {name: 1 / statistics.median(s) for name, s in seconds.items()}
    for name, rate in steps.items():
        print(f"{name:10} {rate:8.1f} steps/s")
    figures = {
        f"{name}_steps_per_second": round(rate, 1)
        for name, rate in steps.items()
    }
    misses = []
    for name, other in JUDGED:
        ratio = _timing.median_ratio(seconds[other], seconds[name])
        pair = f"{name} / {other}"
        figures[pair] = round(ratio, 3)
        print(f"{pair:20} {ratio:8.3f}")
        if ratio < LIMIT:
            misses.append(f"{pair}: {ratio:.3f}, at least {LIMIT} asked")
    _program.finish({**figures, "limit": LIMIT}, misses)


def sharded_model(args, strategy):
    model = make_model(ks.layers.ShardedEmbedding, args)
    with ks.HybridStrategy(**strategy).scope():
        model.compile("sgd", loss="sparse_categorical_crossentropy")
    return model


def stock_model(args):
    model = make_model(keras.layers.Embedding, args)
    model.compile("sgd", loss="sparse_categorical_crossentropy")
    return model


def make_model(embedding, args):
    keras.utils.set_random_seed(0)
    words = keras.Input((args.time,), dtype="int32")
    x = embedding(args.num_rows, args.dim)(words)
    x = keras.layers.GlobalAveragePooling1D()(x)
    x = keras.layers.Dense(256, activation="relu")(x)
    x = keras.layers.Dense(10, activation="softmax")(x)
    return keras.Model(words, x)


def make_dataset(args):
    """Zipf ids, as words of a text are."""
    random = np.random.default_rng(0)
    shape = (50 * args.batch_size, args.time)
    words = (random.zipf(1.2, shape) - 1) % args.num_rows
    labels = random.integers(0, 10, shape[0])
    dataset = tf.data.Dataset.from_tensor_slices(
        (words.astype("int32"), labels.astype("int32"))
    )
    return dataset.batch(args.batch_size).cache().repeat().prefetch(2)


class StepSeconds(keras.callbacks.Callback):
    """Mean seconds of a step in each `fit`, from the first step's end on."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_train_batch_end(self, batch, logs=None):
        self._end = time.perf_counter()
        if batch == 0:
            self._start = self._end
        self._num_steps = batch

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append((self._end - self._start) / self._num_steps)


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    add("--num-rows", type=int, default=20_000)
    add("--dim", type=int, default=64)
    add("--batch-size", type=int, default=128)
    add("--time", type=int, default=20, help="words of an example")
    add("--rounds", type=int, default=40)
    add("--steps", type=int, default=100, help="steps of a round")
    return parser.parse_args()


if __name__ == "__main__":
    main()
