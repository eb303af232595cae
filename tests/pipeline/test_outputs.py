"""Losses and metrics of outputs, in one process, as in stock Keras."""

import contextlib

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests import pipeline_functions

_SCHEDULES = ["1f1b", "spectrain"]


def _trained(model, compile_options, x, y, schedule=None, batch_size=8):
    """The logs of an epoch, with those of its validation."""
    scope = contextlib.nullcontext
    if schedule is not None:
        scope = ks.PipelineStrategy(schedule).scope
    with scope():
        model.compile(**compile_options)
    options = {"batch_size": batch_size, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, validation_data=(x, y), **options).history
    return {key: value[0] for key, value in history.items()}


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_metrics_that_a_layer_holds(schedule):
    def trained(*schedule):
        layers = [
            keras.Input((1,)),
            pipeline_functions.Watch(),
            keras.layers.Dense(1),
        ]
        x = np.arange(8.0)[:, None]
        options = {"optimizer": keras.optimizers.SGD(0.0), "loss": "mse"}
        return _trained(keras.Sequential(layers), options, x, x, *schedule)

    assert trained()["seen"] == pytest.approx(3.5)
    assert trained(schedule)["seen"] == pytest.approx(3.5)


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_losses_use_logits(schedule):
    """Not probabilities, of which the smallest are cut."""

    def trained(*schedule):
        layer = keras.layers.Dense(
            2, activation="softmax", kernel_initializer="identity"
        )
        options = {
            "optimizer": keras.optimizers.SGD(0.0),
            "loss": "sparse_categorical_crossentropy",
            "metrics": [keras.metrics.SparseCategoricalCrossentropy(name="ce")],
        }
        return _trained(
            keras.Sequential([keras.Input((2,)), layer]),
            options,
            np.array([[0.0, 40.0]] * 8),
            np.zeros(8),
            *schedule,
        )

    stock = trained()
    assert stock["ce"] == pytest.approx(40.0)
    assert trained(schedule) == pytest.approx(stock)


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_sums(schedule):
    """Of all examples, not means of the micro-batches' sums."""

    def trained(*schedule):
        inputs = keras.Input((1,))
        layers = [
            keras.layers.Dense(1, kernel_initializer="zeros", name=name)
            for name in "ab"
        ]
        model = keras.Model(inputs, [layer(inputs) for layer in layers])
        # The last batch has less examples than there are micro-batches.
        x, y = np.ones((11, 1)), [np.ones((11, 1)), 2 * np.ones((11, 1))]
        losses = [keras.losses.MeanSquaredError(reduction="sum"), "mse"]
        options = {"optimizer": keras.optimizers.SGD(0.01), "loss": losses}
        found = _trained(model, options, x, y, *schedule, batch_size=8)
        return found, model.get_weights()

    (logs, weights), (expected, others) = trained(schedule), trained()
    assert expected["a_loss"] > 4
    assert logs == pytest.approx(expected, rel=1e-5)
    for value, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "num_micro_batches"),
    [("1f1b", 4), ("spectrain", 3), ("gpipe", 8)],
)
def test_means_over_sample_weights(schedule, num_micro_batches):
    """Of the mini-batch, not means of its parts; each output has weights."""
    reduction = "mean_with_sample_weight"
    try:
        keras.losses.MeanSquaredError(reduction=reduction)
    except ValueError as error:
        pytest.skip(f"This Keras has none: {error}")

    def trained(scope):
        inputs = keras.Input((1,))
        layers = [
            keras.layers.Dense(1, kernel_initializer="zeros", name=name)
            for name in "abc"
        ]
        model = keras.Model(inputs, [layer(inputs) for layer in layers])
        losses = [
            keras.losses.MeanSquaredError(reduction=reduction),
            keras.losses.MeanAbsoluteError(reduction=reduction),
            "mse",
        ]
        with scope():
            model.compile(
                keras.optimizers.SGD(0.1), losses, loss_weights=[1.0, 2.0, 0.5]
            )
        x = np.linspace(-1.0, 2.0, 11)[:, None]
        y = [x**2, np.sin(x), x]
        # The first ones' are 0 in whole parts.
        weights = [np.maximum(x, 0.0)[:, 0], np.linspace(5, 0, 11), x[:, 0]]
        options = {"sample_weight": weights, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, batch_size=8, epochs=2, **options).history
        return history, model.get_weights()

    strategy = ks.PipelineStrategy(
        schedule, num_micro_batches=num_micro_batches
    )
    logs, weights = trained(strategy.scope)
    expected, others = trained(contextlib.nullcontext)
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5)
    for value, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_weights_of_masked_examples(num_micro_batches, caplog):
    """A part does not know how many of the others' are masked."""
    reduction = "mean_with_sample_weight"
    try:
        loss = keras.losses.MeanSquaredError(reduction=reduction)
    except ValueError as error:
        pytest.skip(f"This Keras has none: {error}")

    def told(weights, scope):
        layers = [keras.Input((3, 1)), keras.layers.Masking()]
        layers.append(keras.layers.Dense(1, kernel_initializer="ones"))
        model = keras.Sequential(layers)
        with scope():
            model.compile("sgd", loss)
        caplog.clear()
        x = np.array([[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 0, 0]])[..., None]
        found = model.train_on_batch(x, 0 * x, weights(x))
        messages = [
            record.message
            for record in caplog.records
            if record.name.startswith("keras_sparsity")
        ]
        return messages, float(found)

    strategy = ks.PipelineStrategy("1f1b", num_micro_batches=num_micro_batches)
    stock = contextlib.nullcontext

    def of_places(x):
        return 1.0 * (x[..., 0] != 0)

    def of_examples(x):
        return np.ones((len(x), 1))

    found = told(of_places, strategy.scope)
    assert found == ([], pytest.approx(told(of_places, stock)[1]))
    messages, value = told(of_examples, strategy.scope)
    _, expected = told(of_examples, stock)
    if num_micro_batches == 1:
        assert messages == [] and value == pytest.approx(expected)
    else:
        assert "0 where it masks" in messages[0]
        assert value != pytest.approx(expected, rel=1e-3)


def test_values_that_are_not_reduced():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    loss = keras.losses.MeanSquaredError(reduction="none")
    scope = ks.PipelineStrategy("1f1b").scope
    with pytest.raises(ValueError, match="mean_squared_error.*reduction='none"):
        with scope():
            model.compile("sgd", loss)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("make", "is_told"),
    [
        (lambda: keras.losses.Dice(), True),
        (lambda: "tversky", True),
        (lambda: keras.losses.Dice(axis=1), False),
        (lambda: "crossentropy", False),
        (lambda: None, False),
    ],
)
def test_losses_of_keras_that_mix_examples(
    make, is_told, num_micro_batches, caplog
):
    """Each pass has the loss of its part."""
    layers = [keras.Input((2, 2)), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    strategy = ks.PipelineStrategy("1f1b", num_micro_batches=num_micro_batches)
    with strategy.scope():
        model.compile("sgd", make())
    messages = [
        record.message
        for record in caplog.records
        if record.name.startswith("keras_sparsity")
    ]
    assert len(messages) == (is_told and num_micro_batches > 1)
    assert all("no mean over examples" in message for message in messages)
