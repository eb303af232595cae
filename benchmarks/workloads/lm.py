"""A language model: embedding, LSTM, sampled softmax; generated text.

python benchmarks/cluster.py --machines 4 benchmarks/workloads/lm.py
"""

import _training
import keras

import keras_sparsity as ks


def make(args, num_examples, generator):
    softmax = ks.layers.SampledSoftmax(args.vocabulary, args.sampled)
    model = keras.Sequential(
        [
            keras.Input((args.time,), dtype="int64"),
            ks.layers.ShardedEmbedding(args.vocabulary, args.dim),
            keras.layers.LSTM(args.units, return_sequences=True),
            keras.layers.Dense(args.dim),
            softmax,
        ]
    )
    text = _training.zipf(
        (num_examples, args.time + 1), args.vocabulary, generator
    )
    optimizer = keras.optimizers.Adagrad(0.05)
    x, y = text[:, :-1], text[:, 1:]
    return model, x, y, softmax.loss(), optimizer, args.time


def options():
    parser = _training.options(__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--vocabulary", type=int, default=20_000)
    add("--dim", type=int, default=64, help="width of the tables")
    add("--units", type=int, default=64, help="width of the LSTM")
    add("--time", type=int, default=20, help="words of an example")
    add("--sampled", type=int, default=512, help="classes of a sample")
    return parser


if __name__ == "__main__":
    _training.run(make, options())
