"""The error of predicted weights, beside that of stale ones.

SpecTrain's figure 8: in each step of a training, the weights s steps later are
compared with those predicted now and with those of now (root of the mean square
of the differences, all weights together). Two models read the source of
Python's standard library, character by character: a residual LSTM and dilated
convolutions. Predicted weights must be nearer than stale ones at each s.
"""

import glob
import os
import sysconfig

import _program
import _report
import keras
import numpy as np

from keras_sparsity.stages.prediction import predictor_of

DISTANCES = (1, 2, 3)
_PER_POINT = 10  # steps
_TIME, _BATCH, _CHARACTERS = 32, 32, 128


def residual_lstm():
    x = inputs = keras.Input((_TIME,), dtype="int32")
    x = keras.layers.Embedding(_CHARACTERS, 64)(x)
    for _ in range(3):
        y = keras.layers.LSTM(64, return_sequences=True)(x)
        x = keras.layers.Add()([x, y])
    return keras.Model(inputs, keras.layers.Dense(_CHARACTERS)(x))


def convolutions():
    x = inputs = keras.Input((_TIME,), dtype="int32")
    x = keras.layers.Embedding(_CHARACTERS, 64)(x)
    for rate in (1, 2, 4, 8):
        x = keras.layers.Conv1D(
            96, 3, padding="causal", dilation_rate=rate, activation="relu"
        )(x)
    return keras.Model(inputs, keras.layers.Dense(_CHARACTERS)(x))


MODELS = {"residual LSTM": residual_lstm, "convolutions": convolutions}
RULES = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "Adam": lambda: keras.optimizers.Adam(0.002),
}


def main():
    args = parse_arguments()
    plots = _report.Plots(args.plots)
    figures, misses = {"steps": args.steps}, []
    for name in MODELS:
        for rule in args.rules:
            errors = measured(MODELS[name](), RULES[rule](), args.steps)
            figures[f"{name}, {rule}"] = found = {}
            for s, (predicted, stale) in errors.items():
                ratio = np.mean(predicted) / np.mean(stale)
                found[s] = {
                    "predicted": float(np.mean(predicted)),
                    "stale": float(np.mean(stale)),
                    "ratio": round(float(ratio), 3),
                }
                # Not a number is no smaller one.
                if not ratio < 1:
                    misses.append(f"{name}, {rule}, s = {s}: {ratio:.3f}")
            ratios = ", ".join(
                f"{each['ratio']:.2f}" for each in found.values()
            )
            print(f"{name}, {rule}: predicted / stale {ratios}", flush=True)
            _draw(plots, name, rule, errors)
    plots.save()
    _program.finish(figures, misses)


def measured(model, rule, num_steps):
    """Errors over a training.

    Returns:
        Dict from s to two lists, the errors of predicted and of stale weights
        in each step.
    """
    keras.utils.set_random_seed(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(rule, loss)
    variables = model.trainable_variables
    rule.build(variables)
    predictor = predictor_of(rule)
    errors = {s: ([], []) for s in DISTANCES}
    # For each step: the weights, and the predicted ones by distance.
    known = []
    for x, y in batches(num_steps + max(DISTANCES)):
        now = _flat(variables)
        for s in DISTANCES:
            if len(known) >= s:
                stale, predicted = known[-s]
                errors[s][0].append(_rms(predicted[s] - now))
                errors[s][1].append(_rms(stale - now))
        ahead = {
            s: _flat([predictor.ahead(v, s) for v in variables])
            for s in DISTANCES
        }
        known = [*known[1 - max(DISTANCES) :], (now, ahead)]
        # Of all rows: the gradients do not matter.
        with predictor.following(variables, [None] * len(variables)):
            model.train_on_batch(x, y)
    return errors


def batches(number):
    """Characters and, for each, the next one."""
    library = sysconfig.get_path("stdlib")
    text = b"".join(
        _bytes(path)
        for path in sorted(glob.glob(os.path.join(library, "*.py")))
    )
    characters = np.frombuffer(text, np.uint8).astype("int32") % _CHARACTERS
    draws = np.random.default_rng(0)
    for _ in range(number):
        begins = draws.integers(len(characters) - _TIME - 1, size=_BATCH)
        rows = characters[begins[:, None] + np.arange(_TIME + 1)]
        yield rows[:, :-1], rows[:, 1:]


def _bytes(path):
    with open(path, "rb") as file:
        return file.read()


def _flat(values):
    return np.concatenate([np.ravel(value) for value in values])


def _rms(difference):
    return float(np.sqrt(np.mean(np.square(difference, dtype="float64"))))


def _draw(plots, name, rule, errors):
    """A plot for each distance; a point is the mean of some steps."""
    for s, of_kinds in errors.items():
        lines = {
            label: [
                (step, float(np.mean(each[step : step + _PER_POINT])))
                for step in range(0, len(each), _PER_POINT)
            ]
            for label, each in zip(
                ("predicted", "stale"), of_kinds, strict=True
            )
        }
        title = f"{name}, {rule}, s = {s}"
        file = f"prediction_{rule.lower()}"
        plots.lines(file, title, ("step", "root of the mean square"), lines)


def parse_arguments():
    parser = _program.parser(__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--rules", nargs="+", choices=RULES, default=list(RULES)
    )
    parser.add_argument("--plots", help="a folder, for PNG files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
