"""The first step of a custom training loop in a process, against a later one's.

    python -m keras_sparsity.launch run -n 2 benchmarks/first_step.py

Each model's first step traces the same operations. The first one in a process
also imports, and has AutoGraph convert the loop; it must not convert this
library's code. Compared are seconds of processor time from the call of a step
to its end on rank 0: of the first model's first step, and the median of those
of `--rounds` further models. Asked: at most 3.
"""

import statistics
import time

import _program
import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks

LIMIT = 3
NUM_ROWS, DIM, LENGTH, BATCH_SIZE = 1000, 16, 8, 32


def main():
    parser = _program.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    strategy = ks.HybridStrategy()
    random = np.random.default_rng(0)
    x = random.integers(NUM_ROWS, size=(BATCH_SIZE, LENGTH), dtype="int32")
    y = random.random((BATCH_SIZE, 1), dtype="float32")
    first, *others = (
        seconds_of_a_first_step(make_model(), strategy, x, y)
        for _ in range(args.rounds + 1)
    )
    if strategy.rank:
        return
    later = statistics.median(others)
    print(f"first model   {first:6.2f} s")
    print(f"later models  {later:6.2f} s")
    print(f"ratio         {first / later:6.2f}")
    miss = f"first / later: {first / later:.2f}, at most {LIMIT} asked"
    figures = {
        "first_seconds": round(first, 3),
        "later_seconds": round(later, 3),
        "ratio": round(first / later, 3),
        "limit": LIMIT,
    }
    _program.finish(figures, [miss] * (first > LIMIT * later))


def make_model():
    words = keras.Input((LENGTH,), dtype="int32")
    rows = [ks.layers.ShardedEmbedding(NUM_ROWS, DIM)(words) for _ in range(2)]
    hidden = keras.layers.Flatten()(keras.layers.Concatenate()(rows))
    hidden = keras.layers.Dense(16, "relu")(hidden)
    return keras.Model(words, keras.layers.Dense(1)(hidden))


def seconds_of_a_first_step(model, strategy, x, y):
    optimizer = ks.HybridOptimizer(keras.optimizers.Adagrad())
    optimizer.build(model.trainable_variables)

    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    step = tf.function(lambda x, y: strategy.run(train_step, args=(x, y)))
    x, y = (np.array_split(v, strategy.size)[strategy.rank] for v in (x, y))
    begin = time.process_time()
    step(tf.constant(x), tf.constant(y))
    return time.process_time() - begin


if __name__ == "__main__":
    main()
