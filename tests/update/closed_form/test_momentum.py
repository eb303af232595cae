"""Steps without a gradient that follow a momentum, against stock Keras."""

import keras
import numpy as np
import pytest

from keras_sparsity.update.closed_form import closed_form_of
from keras_sparsity.update.rows import slots_of


@pytest.mark.parametrize(
    "rule",
    [
        keras.optimizers.SGD(0.5, momentum=0.9),
        keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True),
        keras.optimizers.RMSprop(0.5, momentum=0.9),  # which subtracts it
    ],
    ids=["sgd", "nesterov", "rmsprop"],
)
def test_is_stepping(rule):
    variable = keras.Variable(np.ones((4, 2)), dtype="float64")
    rule.build([variable])
    form = closed_form_of(rule, variable)
    gradient = np.random.default_rng(1).normal(size=(4, 2))
    rule.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    weights = variable.numpy()
    (slot,) = slots_of(rule, [variable])[form.kind]
    slots = {form.kind: slot.numpy()}
    for num_steps in range(1, 6):
        rule.apply([keras.ops.zeros_like(variable)], [variable])
        sums = [form.kernel[:num_steps].sum()]
        found = form.moved(weights, slots, sums)
        np.testing.assert_allclose(found, variable, rtol=1e-6)
        assert np.abs(found - weights).min() > 1e-3
