"""A loss that is multiplied by a fixed factor trains as it does without."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.aggregation_functions import BATCH, RATE, examples, ours, start
from tests.conftest import engines

FACTOR, LIMIT = 8.0, 1.0

# Arguments of the rule, and of the strategy.
CASES = {
    "transformed": ({}, {}),
    "accumulated": ({"gradient_accumulation_steps": 3}, {}),
    "delayed": (
        {},
        {"synchronous": False, "max_staleness": 1, "delay": "fixed"},
    ),
    "compensated": (
        {},
        {
            **{"synchronous": False, "max_staleness": 1, "delay": "fixed"},
            **{"delay_compensation": 5.0, "transform_gradients": None},
        },
    ),
}


class Clipping:
    """Notes the gradients' values when it runs, and clips them."""

    def __init__(self):
        self.seen = []

    def __call__(self, gradients, variables):
        del variables
        tf.numpy_function(
            self._note, [tf.convert_to_tensor(g) for g in gradients], []
        )
        return [clipped(g) for g in gradients]

    def _note(self, *arrays):
        self.seen.append([np.array(array) for array in arrays])


def clipped(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        values = clipped(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.clip_by_value(gradient, -LIMIT, LIMIT)


def fit(case, factor):
    """Gradients that the function sees, weights and the optimizer's state."""
    of_rule, of_strategy = CASES[case]
    clipping = Clipping()
    options = {"transform_gradients": clipping, **of_strategy}
    model = ours(num_partitions=2)
    with ks.HybridStrategy(**options).scope():
        optimizer = keras.optimizers.Adagrad(
            RATE, loss_scale_factor=factor, **of_rule
        )
        model.compile(optimizer, "mse")
    model.fit(*examples(), BATCH, shuffle=False, verbose=0)
    return clipping.seen, model.get_weights(), model.optimizer.state()


def fit_with_and_without(cases):
    return {case: (fit(case, FACTOR), fit(case, None)) for case in cases}


def check(results):
    for case, (scaled, plain) in results.items():
        seen, weights, _ = plain
        if case != "compensated":
            sizes = np.concatenate([np.abs(g).ravel() for g in seen[0]])
            # Clipping changes some of them alone.
            assert sizes[sizes > 0].min() < LIMIT < sizes.max(), case
        for one, other in zip(start(), weights, strict=True):
            assert np.abs(one - other).max() > RATE / 2, case
        tf.nest.assert_same_structure(scaled, plain)
        for one, other in zip(
            tf.nest.flatten(scaled), tf.nest.flatten(plain), strict=True
        ):
            np.testing.assert_allclose(
                one, other, rtol=1e-5, atol=1e-6, err_msg=case
            )


@pytest.mark.parametrize("case", ["transformed", "accumulated"])
def test_a_fixed_factor_changes_nothing_in_one_process(case):
    check(fit_with_and_without([case]))


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_fixed_factor_changes_nothing(cluster, engine):
    cases = ["transformed", "delayed", "compensated"]
    for results in cluster(engine, 2).run(fit_with_and_without, cases):
        check(results)


def test_gradients_that_keras_assigns_are_not_divided():
    found = []
    for wrap in (lambda optimizer: optimizer, ks.HybridOptimizer):
        variables = [keras.Variable([1.0, 2.0]) for _ in range(2)]
        # As the scales of float8 training.
        variables[0].overwrite_with_gradient = True
        optimizer = wrap(keras.optimizers.SGD(1.0, loss_scale_factor=FACTOR))
        gradients = [tf.constant([4.0, 16.0]) for _ in range(2)]
        optimizer.apply(gradients, variables)
        found.append([variable.numpy() for variable in variables])
    stock, ours_ = found
    np.testing.assert_array_equal(stock, [[4, 16], [0.5, 0]])
    np.testing.assert_array_equal(ours_, stock)
