"""Translation: encoder, decoder, attention; about half of it dense; generated.

python benchmarks/cluster.py --machines 4 benchmarks/workloads/nmt.py
"""

import _training
import keras

import keras_sparsity as ks


def make(args, num_examples, generator):
    softmax = ks.layers.SampledSoftmax(args.vocabulary, args.sampled)
    source = keras.Input((args.time,), dtype="int64")
    target = keras.Input((args.time,), dtype="int64")

    def embedded(ids, name):
        return ks.layers.ShardedEmbedding(args.vocabulary, args.dim, name=name)(
            ids
        )

    encoded, *state = keras.layers.LSTM(
        args.units, return_sequences=True, return_state=True
    )(embedded(source, "source"))
    decoded = keras.layers.LSTM(args.units, return_sequences=True)(
        embedded(target, "target"), initial_state=state
    )
    attended = keras.layers.Attention()([decoded, encoded])
    hidden = keras.layers.Concatenate()([decoded, attended])
    hidden = keras.layers.Dense(args.dim, activation="tanh")(hidden)
    model = keras.Model([source, target], softmax(hidden))

    text = _training.zipf(
        (num_examples, args.time + 1), args.vocabulary, generator
    )
    # A sentence and its mirror image, word by word another one.
    mirrored = (args.vocabulary - 1 - text)[:, ::-1]
    x = [text[:, 1:], mirrored[:, :-1]]
    optimizer = keras.optimizers.Adagrad(0.05)
    return model, x, mirrored[:, 1:], softmax.loss(), optimizer, args.time


def options():
    parser = _training.options(__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--vocabulary", type=int, default=10_000)
    add("--dim", type=int, default=64, help="width of the tables")
    add("--units", type=int, default=256, help="width of the LSTMs")
    add("--time", type=int, default=16, help="words of a sentence")
    add("--sampled", type=int, default=512, help="classes of a sample")
    return parser


if __name__ == "__main__":
    _training.run(make, options())
