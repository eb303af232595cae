"""Which rules and variables have a closed form of many zero gradients."""

import keras
import numpy as np
import pytest

from keras_sparsity.update.closed_form import closed_form_of

_MOMENTS = [
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
]


class _Own(keras.optimizers.SGD):
    """A rule of a user's, whose steps nobody knows."""


def _has_form(rule, dtype="float32", constraint=None):
    variable = keras.Variable(np.zeros((4, 2)), dtype=dtype)
    variable.constraint = constraint
    rule.build([variable])
    return closed_form_of(rule, variable) is not None


@pytest.mark.parametrize("make", _MOMENTS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"beta_1": 0.0}, True),
        ({"beta_1": 1.0}, False),
        ({"beta_2": 0.0}, False),
        ({"beta_2": 1.0}, False),
        # 0 / 0 in rows that were never touched.
        ({"epsilon": 0.0}, False),
    ],
)
def test_moments(make, options, expected):
    assert _has_form(make(**options)) == expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (keras.optimizers.SGD(0.1), True),
        (keras.optimizers.SGD(0.1, momentum=0.9), True),
        (keras.optimizers.SGD(0.1, momentum=1.0), False),
        (keras.optimizers.RMSprop(momentum=1.0), False),
        (keras.optimizers.Lion(), True),
        (keras.optimizers.Lion(beta_2=1.0), False),
        (keras.optimizers.Ftrl(), True),
        (
            keras.optimizers.Ftrl(l2_shrinkage_regularization_strength=0.1),
            False,
        ),
        (_Own(0.1), False),
    ],
)
def test_other_rules(rule, expected):
    assert _has_form(rule) == expected


def test_variables():
    adam, non_negative = keras.optimizers.Adam, keras.constraints.NonNeg()
    assert _has_form(adam(), "float64")
    assert not _has_form(adam(), "float16")
    assert not _has_form(adam(), constraint=keras.constraints.MaxNorm())
    assert _has_form(adam(), constraint=non_negative)
    # Steps that only accumulate constrain weights, too.
    accumulating = adam(gradient_accumulation_steps=2)
    assert not _has_form(accumulating, constraint=non_negative)
    assert _has_form(adam(gradient_accumulation_steps=2))
