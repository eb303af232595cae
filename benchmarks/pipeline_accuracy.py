"""Accuracy of models in stages, by schedule: SpecTrain's table 1.

A convolutional and a recurrent language model with residual connections learn
the next word of the source of Python's standard library, in 4 stages: by
data parallelism, which gives the result of one process, and by the schedules
that do not. Rare words count neither as right nor as wrong. Each way is run
with several seeds of the weights and of the order of the data. The figure is
the best accuracy on held-out modules over the epochs, in percent: its mean and
standard error. "spectrain" must not be significantly below "vanilla", by the
differences of runs with the same seed.
"""

import functools
import pathlib
import sys

import _program
import keras
import numpy as np

import keras_sparsity as ks

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tutorials"))

_DATA_PARALLEL = "data parallel"
_AHEAD = ", messages ahead"
WAYS = {
    _DATA_PARALLEL: None,
    "vanilla": {"schedule": "vanilla"},
    "stash": {"schedule": "stash"},
    "spectrain": {"schedule": "spectrain"},
    "spectrain, sequential": {
        "schedule": "spectrain",
        "prediction": "sequential",
    },
    # For shorter steps on slow links; weights are four times as stale.
    **{
        schedule + _AHEAD: {"schedule": schedule, "messages_ahead": True}
        for schedule in ("vanilla", "spectrain")
    },
}
NUM_WORDS, TIME, UNITS, BATCH = 500, 16, 64, 32
# By the number of stages.
CUTS = {2: ["b1"], 4: ["b0", "b1", "b2"]}
NUM_EPOCHS, NUM_HELD_OUT = 4, 1_024
# Of Student's t, one-sided at 2.5 %, by degrees of freedom.
_CRITICAL = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262}


def main():
    args = parse_arguments()
    figures, misses = {}, []
    for name in args.models:
        figures[name] = {}
        for way in args.ways:
            # Each way in processes of its own; all ranks tell the same.
            found = ks.launch.run(
                measure, args.stages, engine="native", args=(args, name, way)
            )[0]
            figures[name][way] = summary(found)
            print(f"{name}, {way}: {_words(figures[name][way])}", flush=True)
        misses += [f"{name}: {miss}" for miss in missed(figures[name])]
    _program.finish(figures, misses)


def summary(accuracies):
    """Mean and standard error of some runs' accuracies, in percent."""
    percent = 100 * np.array(accuracies)
    error = percent.std(ddof=1) / np.sqrt(len(percent))
    return {
        "mean": round(float(percent.mean()), 3),
        "standard_error": round(float(error), 3),
        "runs": [round(float(each), 3) for each in percent],
    }


def missed(ways):
    """Sentences, one for each target that is significantly below "vanilla".

    With messages ahead, below "vanilla" with messages ahead.
    """
    for way in ways:
        other = "vanilla" + _AHEAD * way.endswith(_AHEAD)
        if not (way.startswith("spectrain") and other in ways):
            continue
        differences = np.subtract(ways[way]["runs"], ways[other]["runs"])
        degrees = len(differences) - 1
        error = differences.std(ddof=1) / np.sqrt(len(differences))
        if differences.mean() < -_CRITICAL[degrees] * error:
            yield (
                f"{way} is {-differences.mean():.2f} points below {other}, "
                f"standard error {error:.2f}"
            )


def _words(found):
    return f"{found['mean']:.2f} ± {found['standard_error']:.2f} %"


def measure(args, name, way):
    """The best accuracy of each seed, on one of the ranks."""
    train, held_out = data()
    strategy = (
        ks.HybridStrategy()
        if way == _DATA_PARALLEL
        else ks.PipelineStrategy(**WAYS[way], stages=CUTS[args.stages])
    )
    found = []
    for seed in range(args.seeds):
        keras.utils.set_random_seed(seed)
        model = MODELS[name]()
        with strategy.scope():
            model.compile(
                keras.optimizers.SGD(args.learning_rate, momentum=0.9),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                weighted_metrics=["accuracy"],
            )
        size = BATCH * args.steps
        places = np.random.default_rng(seed).permutation(len(train))[:size]
        x, y, weights = _examples(train[places])
        history = model.fit(
            x,
            y,
            BATCH,
            NUM_EPOCHS,
            sample_weight=weights,
            shuffle=False,
            verbose=0,
            validation_data=_examples(held_out),
            validation_batch_size=256,
        ).history
        found.append(max(history["val_accuracy"]))
    return found


def data():
    """`(training, held-out)` sequences; rare words become 0, the unknown."""
    import text

    corpus = text.load_corpus(time=TIME)
    draws = np.random.default_rng(0)
    held_out = draws.permutation(corpus.held_out)[:NUM_HELD_OUT]
    return [
        np.where(each < NUM_WORDS, each, 0) for each in (corpus.train, held_out)
    ]


def _examples(sequences):
    """`(words, next words, weights)`; the unknown is not to be learnt."""
    words, following = sequences[:, 0], sequences[:, 1]
    return words, following, (following != 0).astype("float32")


def _model(make_layer):
    x = words = keras.Input((TIME,), dtype="int32")
    x = keras.layers.Embedding(NUM_WORDS, UNITS)(x)
    for block in range(4):
        x = keras.layers.Add(name=f"b{block}")([x, make_layer()(x)])
    return keras.Model(words, keras.layers.Dense(NUM_WORDS)(x))


MODELS = {
    "convolutional": functools.partial(
        _model,
        lambda: keras.layers.Conv1D(
            UNITS, 3, padding="causal", activation="relu"
        ),
    ),
    "recurrent": functools.partial(
        _model, lambda: keras.layers.LSTM(UNITS, return_sequences=True)
    ),
}


def parse_arguments():
    parser = _program.parser(__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS)
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--stages", type=int, default=4, choices=CUTS)
    parser.add_argument(
        "--seeds", type=int, default=5, choices=[n + 1 for n in _CRITICAL]
    )
    parser.add_argument(
        "--steps", type=int, default=100, help="of an epoch; there are 4"
    )
    parser.add_argument("--learning-rate", type=float, default=0.2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
