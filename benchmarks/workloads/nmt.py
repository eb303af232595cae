"""Translation: encoder, decoder, attention; a third or more dense; generated.

    python benchmarks/cluster.py --machines 4 benchmarks/workloads/nmt.py

A sentence's translation is its mirror image, with another word for each: the
least possible loss is 0.
"""

import _common
import keras
import numpy as np

# A step of the large one shall be nearly all network. With 64 examples dense
# gradients, whose bytes do not depend on the batch, would outweigh the rows;
# with wider tables and LSTMs it would be eight machines' computation on few
# cores.
SIZES = {
    "small": {
        "vocabulary": 4_000,
        "dim": 64,
        "units": 256,
        "sampled": 512,
        "batch": 128,
    },
    "large": {
        "vocabulary": 5_000,
        "dim": 128,
        "units": 256,
        "sampled": 512,
        "batch": 128,
    },
    # The size in most lines of `results/scaling.jsonl`.
    "earlier": {
        "vocabulary": 1_200,
        "dim": 256,
        "units": 192,
        "sampled": 256,
        "batch": 128,
    },
}


def options(add):
    add("--vocabulary", type=int)
    add("--dim", type=int, help="width of the tables")
    add("--units", type=int, help="width of the LSTMs")
    add("--time", type=int, default=16, help="words of a sentence")
    add("--sampled", type=int, help="classes of a sample")
    _common.target_options(add)


def make(kit, args, num_examples, generator):
    softmax = kit.softmax(args.vocabulary, args.sampled)
    source = keras.Input((args.time,), dtype="int32")
    target = keras.Input((args.time,), dtype="int32")

    def embedded(ids, name):
        return kit.embedding(args.vocabulary, args.dim, name=name)(ids)

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

    text = _common.zipf((num_examples, args.time), args.vocabulary, generator)
    # The neighbour of each word, which is as frequent.
    translated = np.minimum(text ^ 1, args.vocabulary - 1)[:, ::-1]
    before = np.zeros_like(translated)
    before[:, 1:] = translated[:, :-1]
    return _common.Workload(
        model,
        (text, before),
        translated,
        softmax.loss(),
        keras.optimizers.Adagrad(0.05),
        args.time,
        lambda x, y: 0.0,
    )


if __name__ == "__main__":
    import _training

    _training.run("nmt")
