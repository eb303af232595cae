"""Predicted weights, against what stock Keras does in the steps that follow."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.stages.prediction import OfChanges, predictor_of

_RULES = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.5),
    "Nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.5, nesterov=True),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1),
    "RMSprop, momentum": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "AMSGrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, weight_decay=0),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.1),
    # Its steps are as long as the weights: of a small rate they stay so.
    "Lamb": lambda: keras.optimizers.Lamb(1e-5),
    "Lion": lambda: keras.optimizers.Lion(0.1),
}
_WITHOUT_MOMENT = ("SGD", "RMSprop")


def _steps(rule, predictor, variable, gradients):
    for gradient in gradients:
        gradient = tf.constant(gradient, variable.dtype)
        with predictor.following([variable], [gradient]):
            rule.apply([gradient], [variable])


@pytest.mark.parametrize("num_updates", [1, 3])
@pytest.mark.parametrize("name", _RULES)
def test_under_a_constant_gradient_the_prediction_comes_true(name, num_updates):
    rule = _RULES[name]()
    variable = keras.Variable([[1.0, -2.0]], dtype="float64")
    predictor = predictor_of(rule, decay=0.5)
    assert isinstance(predictor, OfChanges) == (name in _WITHOUT_MOMENT)
    gradient = np.array([[0.3, -0.01]])
    _steps(rule, predictor, variable, [gradient] * 200)
    before = variable.numpy()
    predicted = predictor.ahead(variable, num_updates).numpy()
    _steps(rule, predictor, variable, [gradient] * num_updates)
    np.testing.assert_allclose(
        predicted - before, variable.numpy() - before, rtol=2e-4
    )


@pytest.mark.parametrize("num_later", [1, 2, 3, 4])
def test_accumulated_gradients_are_one_update(num_later):
    """Of calls of `apply` each third updates, whichever was the last."""
    rule = keras.optimizers.SGD(
        0.125, momentum=0.5, gradient_accumulation_steps=3
    )
    variable, gradient = keras.Variable([1.0, -2.0]), [0.25, -1.0]
    predictor = predictor_of(rule)
    _steps(rule, predictor, variable, [gradient] * 120)
    for _ in range(3):
        predicted = predictor.ahead(variable, num_later).numpy()
        now = [variable.numpy(), *(v.numpy() for v in rule.variables)]
        _steps(rule, predictor, variable, [gradient] * num_later)
        np.testing.assert_allclose(predicted, variable.numpy(), rtol=1e-6)
        for each, value in zip([variable, *rule.variables], now, strict=True):
            each.assign(value)
        _steps(rule, predictor, variable, [gradient])


@pytest.mark.parametrize("name", ["Adam", "AMSGrad", "Adamax", "Nadam"])
def test_averages_that_have_just_begun_have_no_bias(name):
    rule, variable = _RULES[name](), keras.Variable([1.0, -2.0])
    predictor = predictor_of(rule)
    _steps(rule, predictor, variable, [[0.3, -0.01]])
    step = predictor.ahead(variable, 1).numpy() - variable.numpy()
    np.testing.assert_allclose(step, [-0.1, 0.1], rtol=1e-3)


def test_the_papers_equations_for_sgd():
    draws = np.random.default_rng(0)
    gradients = draws.normal(size=(20, 4))
    weights, average, rate, gamma = np.ones(4), np.zeros(4), 0.125, 0.9
    for gradient in gradients:
        average = gamma * average + (1 - gamma) * gradient  # (1)
        weights = weights - rate * gradient  # (2)
    rule = keras.optimizers.SGD(rate)
    variable = keras.Variable(np.ones(4), dtype="float64")
    predictor = predictor_of(rule, decay=gamma)
    _steps(rule, predictor, variable, gradients)
    for num_updates in range(4):
        np.testing.assert_allclose(
            predictor.ahead(variable, num_updates),
            weights - num_updates * rate * average,  # (4)
            rtol=1e-12,
        )


@pytest.mark.parametrize("name", _RULES)
def test_before_the_first_step_nothing_is_predicted(name):
    rule, variable = _RULES[name](), keras.Variable([1.0, 2.0])
    rule.build([variable])
    ahead = predictor_of(rule).ahead(variable, 3)
    np.testing.assert_array_equal(ahead, [1.0, 2.0])


def test_averages_follow_in_a_traced_function():
    rule, variable = _RULES["SGD"](), keras.Variable([1.0, 2.0])
    rule.build([variable])
    predictor = predictor_of(rule, decay=0.0)

    @tf.function
    def step(gradient):
        with predictor.following([variable], [gradient]):
            rule.apply([gradient], [variable])
        return predictor.ahead(variable, 2)

    step(tf.constant([5.0, 5.0]))
    ahead = step(tf.constant([1.0, -1.0]))
    np.testing.assert_allclose(ahead, [1 - 0.8, 2 - 0.2], rtol=1e-5)


def test_an_average_is_stored_once():
    variable = keras.Variable(np.ones((3, 2)), dtype="float64")
    with mock.patch.object(tf, "zeros", side_effect=AssertionError):
        average = OfChanges(keras.optimizers.SGD(0.1), 0.9).average(variable)
    assert average.dtype == "float64"
    np.testing.assert_array_equal(average, np.zeros((3, 2)))
