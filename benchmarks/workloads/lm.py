"""A language model: embedding, LSTM, sampled softmax; generated text.

    python benchmarks/cluster.py --machines 4 benchmarks/workloads/lm.py

Words are drawn by Zipf's law or, with the probability `--follows`, are one of
four that follow the word before; the least possible loss is known exactly.
`--time` is the length of an instance: EuroSys Table 6 has 1 to 120 words, and
alpha grows with it.
"""

import _common
import keras
import numpy as np

# Eight machines compute on the few cores of one: the large size computes little
# for its rows, so that a step is nearly all network, and has about as many
# examples per machine as the paper (six GPUs with 128 each).
SIZES = {
    "small": {
        "vocabulary": 20_000,
        "dim": 64,
        "units": 64,
        "sampled": 512,
        "batch": 64,
    },
    "large": {
        "vocabulary": 200_000,
        "dim": 256,
        "units": 64,
        "sampled": 256,
        "batch": 256,
    },
}
# Probabilities of the four words that follow a word.
SHARES = np.array([0.4, 0.3, 0.2, 0.1])
# `--follows` with `--target`.
STRUCTURE = 0.9


def options(add):
    add("--vocabulary", type=int)
    add("--dim", type=int, help="width of the tables")
    add("--units", type=int, help="width of the LSTM")
    add("--time", type=int, default=20, help="words of an example")
    add("--sampled", type=int, help="classes of a sample")
    add(
        "--follows",
        type=float,
        help="share of words that depend on the one before; by default 0, "
        f"with --target {STRUCTURE}",
    )
    _common.target_options(add)


def make(kit, args, num_examples, generator):
    softmax = kit.softmax(args.vocabulary, args.sampled)
    model = keras.Sequential(
        [
            keras.Input((args.time,), dtype="int32"),
            kit.embedding(args.vocabulary, args.dim, name="words"),
            keras.layers.LSTM(args.units, return_sequences=True),
            keras.layers.Dense(args.dim),
            softmax,
        ]
    )
    source = Source(args, generator)
    text = source.text((num_examples, args.time + 1), generator)
    return _common.Workload(
        model,
        text[:, :-1],
        text[:, 1:],
        softmax.loss(),
        keras.optimizers.Adagrad(0.05),
        args.time,
        source.least_loss,
    )


class Source:
    """A source of text: each word depends on the one before alone.

    Args:
        args: Of the command line.
        generator: NumPy's, to draw the followers of each word.
    """

    def __init__(self, args, generator):
        self._vocabulary = args.vocabulary
        self._follows = args.follows
        if self._follows is None:
            self._follows = 0.0 if args.target is None else STRUCTURE
        self._followers = _common.zipf(
            (args.vocabulary, len(SHARES)), args.vocabulary, generator
        )

    def text(self, shape, generator):
        """Ids `(examples, time)`."""
        # A generator each: the first examples do not depend on their number.
        words, followers, structure = generator.spawn(3)
        text = _common.zipf(shape, self._vocabulary, words)
        which = followers.choice(len(SHARES), shape, p=SHARES)
        follows = structure.random(shape) < self._follows
        for time in range(1, shape[1]):
            followers = self._followers[text[:, time - 1], which[:, time]]
            text[:, time] = np.where(follows[:, time], followers, text[:, time])
        return text

    def least_loss(self, words, next_words):
        """Mean of -log of the probability of each next word."""
        is_one = self._followers[words] == next_words[..., np.newaxis]
        probability = self._follows * (is_one @ SHARES)
        probability += (1 - self._follows) * _common.zipf_probability(
            next_words, self._vocabulary
        )
        return float(-np.log(probability).mean())


if __name__ == "__main__":
    import _training

    _training.run("lm")
