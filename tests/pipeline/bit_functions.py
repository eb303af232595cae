"""Trainings without a flush, for a comparison to the bit."""

import keras
import numpy as np

import keras_sparsity as ks
from tests import pipeline_functions, pipeline_oracle
from tests.pipeline.saved_state_functions import without_graph_optimizer

_SIZE = pipeline_functions.BATCH_SIZE
NUM_EPOCHS = 2


def handed():
    """Two inputs and outputs, an LSTM, and a skip connection.

    The LSTM's states and their mask are handed on through the second of three
    stages. The last one also reads an input.
    """
    options = {"dtype": "float64"}
    ids = keras.Input((5,), dtype="int32", name="ids")
    numbers = keras.Input((6,), name="numbers", **options)
    rows = keras.layers.Embedding(
        20, 4, mask_zero=True, name="rows", **options
    )(ids)
    x = keras.layers.Dense(4, "tanh", name="dense", **options)(numbers)
    states = keras.layers.LSTM(
        4, return_sequences=True, name="states", **options
    )(rows)
    mean = keras.layers.GlobalAveragePooling1D(name="mean", **options)(states)
    both = keras.layers.Add(name="both", **options)([mean, x])
    wide = keras.layers.Concatenate(name="wide", **options)([both, x, numbers])
    tokens = keras.layers.Dense(3, name="tokens", **options)(states)
    two = keras.layers.Dense(2, name="two", **options)(wide)
    return keras.Model([ids, numbers], [tokens, two])


def mixed():
    """Layers that compute in bfloat16, and a skip connection."""
    options = {"dtype": "mixed_bfloat16"}
    inputs = keras.Input((6,), dtype="float32")
    skip = x = pipeline_functions.HalfDense(
        7, "tanh", name="dense_0", **options
    )(inputs)
    for i in (1, 2):
        x = pipeline_functions.HalfDense(
            7, "tanh", name=f"dense_{i}", **options
        )(x)
    x = keras.layers.Add(name="both", **options)([skip, x])
    x = pipeline_functions.HalfDense(2, name="out", **options)(x)
    return keras.Model(inputs, x)


_MODELS = {"handed": handed, "mixed": mixed}
# The layers of each stage, and with what each is called.
_STAGES = {
    "handed": [
        {"rows": ["ids"], "states": ["rows"]},
        {"dense": ["numbers"], "mean": ["states"], "both": ["mean", "dense"]},
        {
            "wide": ["both", "dense", "numbers"],
            "tokens": ["states"],
            "two": ["wide"],
        },
    ],
    "mixed": [
        {"dense_0": ["x"]},
        {"dense_1": ["dense_0"]},
        {
            "dense_2": ["dense_1"],
            "both": ["dense_0", "dense_2"],
            "out": ["both"],
        },
    ],
    "line": [
        {"dense_0": ["x"], "drop": ["dense_0"]},
        {"dense_1": ["drop"], "norm": ["dense_1"]},
        {"dense_2": ["norm"], "dense_3": ["dense_2"], "out": ["dense_3"]},
    ],
}
_STAGES["line32"] = _STAGES["line"]
# The names of inputs and outputs, unless there is one of each.
_ENDS = {"handed": (["ids", "numbers"], ["tokens", "two"])}


def made(model):
    if model not in _MODELS:
        return pipeline_functions.made(model)
    keras.utils.set_random_seed(3)
    return _MODELS[model]()


def data(model, num_examples, is_weighted):
    """`(inputs, outputs, weights of examples or None)`, lists."""
    of_two = model == "handed"
    x, y = pipeline_functions.data(
        "branches" if of_two else "line", num_examples
    )
    x, y = (each if of_two else [each] for each in (x, y))
    x = [a.astype("int32" if a.dtype.kind == "i" else _dtype(model)) for a in x]
    weights = None
    if is_weighted:
        # Of few bits, some of them 0.
        draws = np.random.default_rng(2)
        weights = draws.integers(0, 5, num_examples) / 4
    return x, [each.astype(_dtype(model)) for each in y], weights


def _dtype(model):
    return "float32" if model == "line32" else "float64"


def _losses(y, model):
    return [keras.losses.MeanSquaredError(dtype=_dtype(model)) for _ in y]


def trained(*case):
    """All weights and the history, without the graph optimizer.

    It rounds otherwise: of fused operations, of quotients by a constant.
    """
    with without_graph_optimizer():
        return _trained(*case)


def _trained(
    model, rule, schedule, target, messages_ahead, is_weighted, num_examples
):
    keras.config.set_floatx(_dtype(model))
    try:
        strategy = ks.PipelineStrategy(
            schedule,
            [list(calls)[-1] for calls in _STAGES[model][:-1]],
            **pipeline_oracle.of_prediction(schedule, target),
            messages_ahead=messages_ahead,
        )
        x, y, weights = data(model, num_examples, is_weighted)
        network = made(model)
        of_two = len(y) > 1
        with strategy.scope():
            network.compile(
                pipeline_oracle.RULES[rule](),
                _losses(y, model) if of_two else _losses(y, model)[0],
                metrics=[["mae"], ["mae"]] if of_two else ["mae"],
                weighted_metrics=[["mse"], ["mse"]] if of_two else ["mse"],
            )
        history = network.fit(
            *((x, y) if of_two else (x[0], y[0])),
            _SIZE,
            epochs=NUM_EPOCHS,
            sample_weight=weights,
            shuffle=False,
            verbose=0,
        ).history
        return network.get_weights(), history
    finally:
        keras.config.set_floatx("float32")


def expected(
    model, rule, schedule, target, messages_ahead, is_weighted, num_examples
):
    """The same by the oracle."""
    network = made(model)
    stages = pipeline_oracle.stages_of(
        network, rule, _STAGES[model], *_ENDS.get(model, (["x"], ["out"]))
    )
    x, y, weights = data(model, num_examples, is_weighted)
    losses = _losses(y, model)
    batches = []
    for begin in range(0, num_examples, _SIZE):
        rows = slice(begin, begin + _SIZE)
        batches.append(
            (
                [each[rows] for each in x],
                [each[rows] for each in y],
                None if weights is None else weights[rows],
            )
        )

    def loss_of(outputs, batch):
        of_outputs = [
            loss(each, output, batch[2])
            for loss, each, output in zip(
                losses, batch[1], outputs, strict=True
            )
        ]
        return sum(of_outputs[1:], start=of_outputs[0])

    names = [""]
    if len(y) > 1:
        names = [f"{name}_" for name in network.output_names]
    history = {}
    for _ in range(NUM_EPOCHS):
        metrics = {}
        for name in names:
            metrics[name + "mae"] = keras.metrics.MeanAbsoluteError()
            metrics[name + "mse"] = keras.metrics.MeanSquaredError()

        def note(batch, outputs, metrics=metrics):
            for name, each, output in zip(
                names, batch[1], outputs, strict=True
            ):
                metrics[name + "mae"].update_state(each, output)
                metrics[name + "mse"].update_state(each, output, batch[2])

        of_batches = pipeline_oracle.train(
            *(stages, batches, schedule, target, messages_ahead),
            *(loss_of, note),
        )
        sizes = [len(each) for _, (each, *_), _ in batches]
        found = {"loss": np.average(of_batches, weights=sizes)}
        found |= {name: float(m.result()) for name, m in metrics.items()}
        for name, value in found.items():
            history.setdefault(name, []).append(value)
    return network.get_weights(), history
