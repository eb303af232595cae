"""Trains an LSTM language model over real text on several processes.

    keras-sparsity run -n 2 tutorials/language_model.py
    python tutorials/language_model.py            # the same, in one process

The model predicts each word from the words before it. Its two large variables
are sparse: a step reads the rows of the words in the batch from the embedding,
and those of the target words and of a random sample from the softmax. Each
process stores a part of these tables and pulls the rows it needs; the LSTM's
dense gradients are summed over the processes. `model.fit` is plain Keras: the
script mentions distribution in `HybridStrategy`, the two sharded layers, and
`strategy.scope()` around `compile`.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
import text

import keras_sparsity as ks

# What training must reach, as a share of the unigram model's perplexity.
REQUIRED_SHARE = 0.6


def main():
    args = parse_arguments()
    strategy = ks.HybridStrategy(sparse_updates=args.sparse_updates)
    is_first = strategy.rank == 0
    report = print if is_first else lambda *_: None
    corpus = text.load_corpus(args.text, time=args.time)

    num_words = len(corpus.vocabulary)
    unigram = corpus.unigram_perplexity()
    report(
        f"{corpus.train[:, 0].size:,} words to train on, "
        f"{corpus.held_out[:, 0].size:,} held out, vocabulary {num_words:,}; "
        f"{strategy.size} process(es)"
    )

    model, softmax = build_model(num_words, args)
    with strategy.scope():
        model.compile(
            optimizer=keras.optimizers.Adam(args.learning_rate),
            loss=softmax.loss(),
        )
    train = make_dataset(corpus.train, args.batch_size, shuffle=True)
    held_out = make_dataset(corpus.held_out, args.batch_size)

    before = perplexity(model, held_out.take(4))  # near to the vocabulary
    report(f"held-out perplexity before training: {before:,.1f}")
    speed = WordsPerSecond(args.batch_size * args.time)
    model.fit(
        train,
        epochs=args.epochs,
        steps_per_epoch=args.steps_per_epoch,
        callbacks=[speed],
        verbose=2 if is_first else 0,
    )
    after = perplexity(model, held_out)

    report(f"words/s: {speed.words_per_second():,.0f}")
    report_alpha(corpus, args, strategy.size, report)
    share = after / unigram
    report(f"held-out perplexity, unigram model: {unigram:,.1f}")
    report(f"held-out perplexity after training: {after:,.1f}")
    report(f"share of the unigram model's: {share:.3f}")

    plain = ks.export(model)
    if is_first:
        reloaded = perplexity_in_plain_keras(plain, corpus.held_out, args)
        report(f"the same, reloaded without this package: {reloaded:,.1f}")
        if not math.isclose(reloaded, after, rel_tol=1e-3):
            sys.exit(f"the reloaded model differs: {reloaded} against {after}")
        if share > REQUIRED_SHARE:
            sys.exit(f"it has not learned enough: {share} > {REQUIRED_SHARE}")


def build_model(num_words, args):
    """Words `(batch, time)` to what `SampledSoftmax` makes of the LSTM."""
    softmax = ks.layers.SampledSoftmax(
        num_words,
        num_sampled=args.num_sampled,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.05),
    )
    words = keras.Input((None,), dtype="int32")
    x = ks.layers.ShardedEmbedding(
        num_words,
        args.dim,
        embeddings_initializer=keras.initializers.RandomNormal(stddev=0.1),
    )(words)
    x = keras.layers.LSTM(args.units, return_sequences=True)(x)
    x = keras.layers.Dense(args.dim)(x)
    return keras.Model(words, softmax(x)), softmax


def make_dataset(sequences, batch_size, shuffle=False):
    """Batches of (words, words that follow), each `(batch, time)`.

    These are global batches: each process trains on its part of them.
    """
    dataset = tf.data.Dataset.from_tensor_slices(
        (sequences[:, 0], sequences[:, 1])
    )
    if shuffle:
        dataset = dataset.shuffle(len(sequences), seed=0).repeat()
    return dataset.batch(batch_size).prefetch(2)


def perplexity(model, dataset):
    """exp(mean negative log-likelihood per word), over the full softmax."""
    return math.exp(model.evaluate(dataset, verbose=0))


class WordsPerSecond(keras.callbacks.Callback):
    """Words of the global batch per second, the first ten steps left out."""

    def __init__(self, words_per_step, num_skipped_steps=10):
        super().__init__()
        self.words_per_step = words_per_step
        self.num_skipped_steps = num_skipped_steps
        self.num_steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        if self.num_steps <= self.num_skipped_steps:
            self.start_seconds = time.perf_counter()
        self.end_seconds = time.perf_counter()

    def words_per_second(self):
        num_timed_steps = self.num_steps - self.num_skipped_steps
        seconds = self.end_seconds - self.start_seconds
        return (
            max(num_timed_steps, 0) * self.words_per_step / max(seconds, 1e-9)
        )


def report_alpha(corpus, args, size, report, num_steps=50):
    """Reports alpha: the share of a variable's rows one process touches.

    Measured over random batches. The softmax's rows are those of the targets
    and of the sample, which is the same on all processes.
    """
    num_words = len(corpus.vocabulary)
    part = max(args.batch_size // size, 1)  # one process's part of a batch
    random = np.random.default_rng(0)
    read, predicted = [], []
    for _ in range(num_steps):
        chosen = random.integers(len(corpus.train), size=part)
        words, targets = corpus.train[chosen].swapaxes(0, 1)
        sample = tf.random.log_uniform_candidate_sampler(
            targets.reshape(-1, 1), 1, args.num_sampled, True, num_words
        ).sampled_candidates
        read.append(np.unique(words).size)
        predicted.append(np.union1d(targets, sample).size)
    report("alpha (share of the rows that a process touches in a step):")
    report(f"  embedding        {np.mean(read) / num_words:.3f}")
    report(f"  sampled softmax  {np.mean(predicted) / num_words:.3f}")
    report("  LSTM, projection 1.000")


def perplexity_in_plain_keras(model, held_out, args):
    """Saves `model`, and evaluates it where keras_sparsity is not imported."""
    program = pathlib.Path(__file__).with_name("evaluate_plain.py")
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(args.export or directory)
        directory.mkdir(parents=True, exist_ok=True)
        model.save(directory / "language_model.keras")
        np.save(directory / "held_out.npy", held_out)
        # A process of its own: no cluster to join.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TF_CONFIG", "HOROVOD_"))
        }
        output = subprocess.run(
            [sys.executable, program, directory],
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
    return json.loads(output.splitlines()[-1])["perplexity"]


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--text",
        nargs="+",
        metavar="FILE",
        help="text to learn (default: the Python standard library)",
    )
    add("--export", metavar="DIR", help="keep the exported model here")
    add("--epochs", type=int, default=2)
    add("--steps-per-epoch", type=int, default=150)
    add("--batch-size", type=int, default=128, help="global, in sequences")
    add("--time", type=int, default=20, help="words of a sequence")
    add("--dim", type=int, default=128, help="width of both tables")
    add("--units", type=int, default=256, help="width of the LSTM")
    add("--num-sampled", type=int, default=1024, help="of the softmax")
    add("--learning-rate", type=float, default=0.008)
    add("--sparse-updates", choices=["exact", "lazy"], default="exact")
    return parser.parse_args()


if __name__ == "__main__":
    main()
