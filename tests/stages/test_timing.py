"""The profile of a model's layers."""

import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf import deferred_weights
from keras_sparsity.stages import cutting, timing


def _num_calls(seconds, monkeypatch):
    """The number of runs that take so many seconds of a clock of their own."""
    calls = []
    clock = types.SimpleNamespace(perf_counter=lambda: seconds * len(calls))
    monkeypatch.setattr(timing, "time", clock)

    def wait():
        calls.append(None)
        return 0.0

    def function(tensors):
        del tensors
        return [tf.py_function(wait, [], tf.float32)]

    assert timing.median_seconds(function, []) == pytest.approx(seconds)
    return len(calls)


def test_long_runs_are_not_repeated(monkeypatch):
    # The first one is traced, and not counted.
    assert _num_calls(0.001, monkeypatch) == 1 + 3
    assert _num_calls(0.6, monkeypatch) == 1 + 1


def test_processor_time_of_runs_for_a_while(monkeypatch):
    events = []

    def function(tensors):
        del tensors
        run = tf.py_function(lambda: events.append("run"), [], [])
        with tf.control_dependencies([run]):
            return [tf.zeros([])]

    run = timing.traced(function, [])
    assert events == ["run"]
    clock = types.SimpleNamespace(
        perf_counter=itertools.count(0, 0.25).__next__,
        process_time=itertools.count(0, 3.0).__next__,
    )
    monkeypatch.setattr(timing, "time", clock)
    # The second one begins at 0.25.
    assert timing.processor_seconds(run, [], seconds=0.5) == 3.0 / 2
    assert events == ["run"] * 3


def test_median_of_runs_for_a_while(monkeypatch):
    run = timing.traced(lambda tensors: tensors, [tf.zeros([])])
    times = iter([0.0, 0.1, 0.4, 0.6])
    clock = types.SimpleNamespace(perf_counter=times.__next__)
    monkeypatch.setattr(timing, "time", clock)
    # Of 0.1, 0.3 and 0.2 seconds; the last one begins at 0.4.
    found = timing.lasting_seconds(run, [tf.zeros([])], seconds=0.5)
    assert found == pytest.approx(0.2)


def test_runs_for_no_time_are_one(monkeypatch):
    run = timing.traced(lambda tensors: tensors, [tf.zeros([])])
    times = iter([0.0, 0.1])
    clock = types.SimpleNamespace(perf_counter=times.__next__)
    monkeypatch.setattr(timing, "time", clock)
    assert timing.lasting_seconds(run, [tf.zeros([])], seconds=0) == 0.1


def test_inputs_of_text_are_drawn():
    text = keras.Input((), dtype="string")
    ids = keras.layers.StringLookup(vocabulary=["a", "b"])(text)
    model = keras.Model(text, keras.layers.Embedding(3, 2)(ids))
    found = timing.call_seconds(cutting.Cutter(model), 2)
    assert len(found) == 2 and min(found) > 0


def test_layers_of_the_same_time_are_measured_once(monkeypatch):
    measured = []

    def pass_seconds(compute, variables, tensors, *_):
        measured.append(tuple(tensors[0].shape))
        return float(len(measured))

    monkeypatch.setattr(timing, "pass_seconds", pass_seconds)
    # The start of each pass, which does not count.
    monkeypatch.setattr(timing, "median_seconds", lambda *_: 0.25)
    layers = [keras.layers.Dense(4, name=f"dense_{i}") for i in range(3)]
    model = keras.Sequential(
        [
            keras.Input((8,)),
            *layers,
            keras.layers.Dense(4, activation="relu", name="last"),
        ]
    )
    found = timing.call_seconds(cutting.Cutter(model), 2)
    # The first has other inputs, the last another activation.
    assert found == [0.75, 1.75, 1.75, 2.75]
    assert measured == [(2, 8), (2, 4), (2, 4)]


def test_weights_need_not_be_here():
    """Of a whole model, and of one whose weights have no values yet."""

    def measure(function, tensors):
        gradients = timing.traced(function, tensors)(*tensors)
        return [tf.convert_to_tensor(each).shape for each in gradients]

    layers = [
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(2),
    ]
    with deferred_weights.deferring():
        model = keras.Sequential([keras.Input((8,)), *layers])
        layers[-1].trainable = False
        found = timing.whole_seconds(cutting.Cutter(model), 3, measure=measure)
        # Of the examples, and of what is trained.
        trained = [v.shape for v in model.trainable_weights]
        assert found == [(3, 8), *trained] and len(trained) == 4
        assert all(v._value is None for v in model.weights)
    weights = model.get_weights()
    timing.whole_seconds(cutting.Cutter(model), 3, measure=measure)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


def test_batches_of_a_fixed_size(monkeypatch):
    """A stateful layer refuses any other; times count by the number asked."""
    inputs = keras.Input(batch_shape=(8, 2, 3))
    states = keras.layers.LSTM(4, stateful=True)(inputs)
    cutter = cutting.Cutter(keras.Model(inputs, keras.layers.Dense(1)(states)))
    assert all(each > 0 for each in timing.call_seconds(cutter))

    def number_of(run, tensors):
        del run
        return float(tensors[0].shape[0])

    monkeypatch.setattr(timing, "median_seconds", number_of)
    assert timing.whole_seconds(cutter, 800) == 800
