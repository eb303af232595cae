"""Ranks whose models, optimizers or inputs differ are told so."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity import collectives
from keras_sparsity.health import agreement

_ROWS = 24


class NoConfig(keras.layers.Layer):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        return self.factor * x


def _model(num_rows=20, dim=4, units=3, rate=0.0, use_bias=True, extra=False):
    layers = [
        keras.layers.Input([2], dtype="int32"),
        ks.layers.ShardedEmbedding(num_rows, dim, name="table"),
        keras.layers.Flatten(),
        keras.layers.Dropout(rate),
        NoConfig(1.0),
        keras.layers.Dense(units, use_bias=use_bias, name="hidden"),
        *([keras.layers.Dense(units, name="more")] if extra else []),
        keras.layers.Dense(1, name="score"),
    ]
    return keras.Sequential(layers, name="model")


def _fit(
    optimizer=None,
    rows=_ROWS,
    model=None,
    steps=None,
    timeout=None,
    options=None,
    compiled=None,
    **arguments,
):
    strategy = ks.HybridStrategy(timeout=timeout, **(options or {}))
    built = _model(**(model or {}))
    kind, options = optimizer or ("Adam", {})
    optimizer = getattr(keras.optimizers, kind)(**options)
    with strategy.scope():
        built.compile(optimizer, **{"loss": "mse", **(compiled or {})})
    ids = np.arange(2 * rows).reshape(rows, 2) % 20
    y = np.ones([rows, 1], "float32")
    if steps is None:
        return built.fit(ids, y, verbose=0, **{"batch_size": 8, **arguments})
    dataset = tf.data.Dataset.from_tensor_slices((ids, y)).repeat().batch(8)
    return built.fit(dataset.take(steps), verbose=0, **arguments)


def _decay(factor):
    return keras.optimizers.schedules.ExponentialDecay(0.1, 10, factor)


def _smoothed(smoothing):
    return keras.losses.BinaryCrossentropy(label_smoothing=smoothing)


_OLD = {"synchronous": False, "delay": "fixed"}

# What rank 0 and rank 1 pass, and what the message says of each.
_CASES = [
    (
        {"model": {"units": 3}},
        {"model": {"units": 5}},
        "units': 3",
        "units': 5",
    ),
    (
        {"model": {"rate": 0.1}},
        {"model": {"rate": 0.2}},
        r"\{'layers\[\d\].rate': 0.1\}",
        r"\{'layers\[\d\].rate': 0.2\}",
    ),
    (
        {"model": {"use_bias": True}},
        {"model": {"use_bias": False}},
        r"'layers\[\d\].use_bias': True.*hidden/bias': 'float32 of shape \(3,",
        r"'layers\[\d\].use_bias': False",
    ),
    ({"model": {"extra": True}}, {}, "more/kernel': 'float32 of", ""),
    (
        {"model": {"num_rows": 20}},
        {"model": {"num_rows": 21}},
        r"\{'num_rows': 20\}",
        r"\{'num_rows': 21\}",
    ),
    (
        {"optimizer": ("Adam", {})},
        {"optimizer": ("SGD", {})},
        "'optimizer': 'Adam'",
        "'optimizer': 'SGD'",
    ),
    (
        {"optimizer": ("SGD", {"learning_rate": 0.5})},
        {"optimizer": ("SGD", {"learning_rate": 0.25})},
        r"\{'optimizer.learning_rate': 0.5\}",
        r"\{'optimizer.learning_rate': 0.25\}",
    ),
    (
        {"optimizer": ("SGD", {"clipnorm": 1.0})},
        {"optimizer": ("SGD", {})},
        r"\{'optimizer.clipnorm': 1.0\}",
        r"\{'optimizer.clipnorm': None\}",
    ),
    (
        {"optimizer": ("SGD", {"learning_rate": _decay(0.5)})},
        {"optimizer": ("SGD", {"learning_rate": _decay(0.9)})},
        r"\{'optimizer.learning_rate.decay_rate': 0.5\}",
        r"\{'optimizer.learning_rate.decay_rate': 0.9\}",
    ),
    (
        {"rows": 24},
        {"rows": 23},
        r"'x': 'int64 of shape \(24, 2\)'",
        r"'x': 'int64 of shape \(23, 2\)'",
    ),
    ({"timeout": 300}, {"timeout": 400}, "300.0", "400.0"),
    ({"steps": 3}, {"steps": 4}, r"batches': 3\}", r"batches': 4\}"),
    ({"epochs": 1}, {"epochs": 2}, r"\{'epochs': 1\}", r"\{'epochs': 2\}"),
    (
        {"batch_size": 8},
        {"batch_size": 12},
        r"\{'batch_size': 8\}",
        r"\{'batch_size': 12\}",
    ),
    *(
        (
            {"compiled": {name: first}},
            {"compiled": {name: second}},
            rf"'{told}': {first_told}",
            rf"'{told}': {second_told}",
        )
        for name, first, second, told, first_told, second_told in (
            ("loss", "mse", "mae", r"loss[.\w]*", "'mse'", "'mae'"),
            (
                *("loss", _smoothed(0.1), _smoothed(0.2)),
                *(r"loss[.\w]*\.label_smoothing", 0.1, 0.2),
            ),
            ("loss_weights", [1.0], [3.0], r"loss_weights\[0\]", 1.0, 3.0),
            (
                *("metrics", ["mae"], ["mape"], r"metrics\[0\]"),
                *("'mae'", "'mape'"),
            ),
        )
    ),
    *(
        (
            {"options": {**more, name: first}},
            {"options": {**more, name: second}},
            rf"'{kind}.{name}': {first!r}",
            rf"'{kind}.{name}': {second!r}",
        )
        for kind, name, first, second, more in (
            ("optimizer", "dense_aggregation", "mean", "sum", {}),
            ("optimizer", "sparse_aggregation", "sum", "mean", {}),
            ("strategy", "max_staleness", 2, 3, _OLD),
            (
                *("strategy", "delay_compensation", 0.5, 0.25),
                {**_OLD, "max_staleness": 2},
            ),
        )
    ),
]


def differ(cases):
    """The message of each case, None where there is none."""
    messages = []
    for case in cases:
        keras.backend.clear_session()
        try:
            _fit(**case[collectives.current().rank])
            messages.append(None)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_differs_is_listed_for_every_rank(cluster):
    same = {"optimizer": ("Adam", {"learning_rate": _decay(0.5)}), "epochs": 2}
    cases = [*_CASES, (same, same)]
    first, second = cluster("native", 2).run(differ, [c[:2] for c in cases])
    assert first == second
    assert first.pop() is None
    for case, message in zip(_CASES, first, strict=True):
        assert message and "must be the same on all ranks" in message, case
        for rank in (0, 1):
            line = re.search(rf"^  rank {rank}: (.*)$", message, re.MULTILINE)
            assert re.search(case[2 + rank], line[1]), message


def test_what_a_rank_may_have_of_its_own():
    first = agreement.of_call(
        "fit", {"verbose": 1, "callbacks": [1], "x": None}
    )
    assert first == agreement.of_call("fit", {"verbose": 0, "x": None})
    keras.backend.clear_session()
    models = [_model(), _model()]
    for seed, model in enumerate(models):
        model.layers[2].seed = seed
        model.compile(keras.optimizers.Adam(float("nan")), "mse")
    facts = list(map(agreement.of_model, models))
    assert facts[0] == facts[1]
    assert facts[0]["optimizer.learning_rate"] == "nan"


@pytest.mark.parametrize(
    ("value", "description"),
    [
        (np.zeros([2, 3], "float32"), "float32 of shape (2, 3)"),
        ({"a": [1, None], "b": "c"}, {"a": [1, None], "b": "c"}),
        (list(range(50)), "list of 50"),
        (len, "builtin_function_or_method"),
    ],
)
def test_how_arguments_are_described(value, description):
    call = agreement.of_call("fit", {"x": value})
    assert call == {"method": "fit", "x": description}


def test_the_bytes_of_a_lambda_may_differ():
    """They depend on how often other objects hold its constants."""
    layer = keras.layers.Lambda(lambda x: keras.ops.map(lambda row: row, x))
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile("sgd", "mse", metrics=[lambda y, x: keras.ops.map(abs, x)])
    codes, facts, held = [], [], []
    for _ in range(2):
        codes.append(layer.get_config()["function"]["config"]["code"])
        facts.append(agreement.of_model(model))
        held += layer.function.__code__.co_consts
    assert codes[0] != codes[1]
    assert facts[0] == facts[1]
    assert "__lambda__" in facts[0].values()
