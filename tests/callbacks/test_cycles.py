"""Times of whole cycles of gradient accumulation."""

import keras
import pytest

import keras_sparsity as ks
from keras_sparsity.callbacks import cycles


@pytest.mark.parametrize(
    ("length", "executions", "expected"),
    [
        (1, [1, 1], [1, 1]),
        (3, [1] * 7, [3, 3]),
        # Of several cycles, and of parts of two.
        (3, [6, 6], [6, 6]),
        (3, [2] * 6, [6, 6]),
        # Behind a shorter one they would not end together again.
        (4, [3, 2, 2, 2, 2, 2, 2], [9, 4]),
        (4, [1, 2, 2, 2, 2, 2], [7, 4]),
    ],
)
def test_executions_are_added_up_to_whole_cycles(length, executions, expected):
    added = cycles.Cycles(length)
    found = [added.add(10.0 * number, number) for number in executions]
    assert [each for each in found if each] == [
        (10.0 * number, number) for number in expected
    ]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (keras.optimizers.Adam(), 1),
        (keras.optimizers.SGD(gradient_accumulation_steps=4), 4),
        (
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(gradient_accumulation_steps=3)
            ),
            3,
        ),
    ],
)
def test_the_steps_of_an_update(optimizer, expected):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    assert cycles.steps_of(model) == 1
    with ks.HybridStrategy().scope():
        model.compile(optimizer, "mse")
    assert cycles.steps_of(model) == expected
