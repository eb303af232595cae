"""The series of rules with two moments, against single steps in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.update.closed_form import choice
from keras_sparsity.update.closed_form.adam import Adam, Adamax
from keras_sparsity.update.closed_form.nadam import Nadam
from keras_sparsity.update.step_sums import StepSums

EPSILON, RATE = 1e-7, 1e-3
# As `closed_form_of` asks for; largest error of a movement.
DTYPES = {"float32": (3e-8, 3e-6), "float64": (1e-13, 1e-11)}
FORMS = {
    "adam": (Adam, 0.9, 0.999),
    "adam of a long momentum": (Adam, 0.99, 0.999),
    "adam of a short velocity": (Adam, 0.9, 0.98),
    "adamax": (Adamax, 0.9, 0.999),
    "nadam": (Nadam, 0.9, 0.999),
}
SCALES = 1e-1, 1e-4, 1e-7, 1e-9


class Rule:
    """What step sums ask of a Keras optimizer."""

    learning_rate = np.float64(RATE)
    iterations = 0
    _u_product = 1.0


def stepped(kind, beta_1, beta_2, m, s, iterations, num_steps):
    """Movement of zero gradients, and the product of Nadam's momentums."""
    w, product, bias = 0 * m, 0.9**iterations, np.sqrt
    if kind is Adamax:
        bias = float
    for step in range(iterations + 1, iterations + num_steps + 1):
        u = beta_1 * (1 - 0.5 * 0.96**step)
        # Keras rounds this one to float32.
        following = beta_1 * (1 - 0.5 * float(np.float32(0.96)) ** (step + 1))
        product *= u
        m = m * beta_1
        s = s * bias(beta_2)
        c = 1 if kind is Adamax else np.sqrt(1 - beta_2**step)
        if kind is Nadam:
            mean = m * following / (1 - product * following)
        else:
            mean = m / (1 - beta_1**step)
        if kind is Adam:
            w = w - RATE * c * mean / (s + EPSILON)
        else:
            w = w - RATE * mean / (s / c + EPSILON)
    return w


def closed(form, slots, iterations, num_steps, dtype):
    """The movement of rows, and of others that had a gradient later."""
    sums, rule = StepSums(form, 1), Rule()
    product = 0.9**iterations

    @tf.function
    def step(iterations, product):
        rule.iterations, rule._u_product = iterations, product
        sums.extend(sums.next_step(rule))

    for done in range(iterations, iterations + num_steps):
        step(*(tf.constant(n, tf.float64) for n in (done, product)))
        product *= form.beta_1 * (1 - 0.5 * 0.96 ** (done + 1))
    shape = len(slots[0]), 1
    gap = sums.gap(tf.zeros(shape[0], tf.int32), sums.now, dtype)
    m, s = (tf.constant(slot, dtype) for slot in slots)
    named = {"_m": m, "_u": s, "_momentums": m, "_velocities": s**2}
    return form.moved(0 * m, named, gap.sums).numpy()


def problem():
    """Moments of all scales, and s down to a hundredth of it."""
    rng = np.random.default_rng(0)
    m, s = rng.normal(size=(2, len(SCALES), 200))
    s = np.abs(s) * 10 ** rng.uniform(-2, 0, s.shape)
    scales = np.array(SCALES)[:, None]
    return m * scales, s * scales


@pytest.mark.parametrize("name", FORMS)
def test_is_stepping(name):
    kind, *betas = FORMS[name]
    betas = [float(np.float32(beta)) for beta in betas]
    m, s = problem()
    for dtype, (tolerance, limit) in DTYPES.items():
        more = (betas[0],) if kind is Nadam else ()
        form = kind(0.0, *betas, EPSILON, tolerance, *more)
        for iterations, num_steps in ((1, 30), (1, 1), (10, 20), (10**5, 900)):
            moved = closed(form, (m, s), iterations, num_steps, dtype)
            expected = stepped(kind, *betas, m, s, iterations, num_steps)
            error = np.abs(moved - expected).max(axis=1)
            error /= np.abs(expected).max(axis=1)
            # Nadam's first steps, see there.
            is_first = kind is Nadam and iterations < 10
            many = {"float32": 1e-5, "float64": 1e-8}[dtype]
            assert error.max() < (many if is_first else limit), (
                dtype,
                iterations,
                error,
            )


def test_number_of_terms_follows_from_the_factors():
    def num_terms(beta_1, beta_2, tolerance=3e-8):
        form = Adam(0.0, beta_1, beta_2, EPSILON, tolerance)
        return form.kernel.shape[1]

    assert num_terms(0.9, 0.999) == 3
    assert num_terms(0.9, 0.999, 1e-13) > num_terms(0.9, 0.999)
    assert num_terms(0.99, 0.999) > num_terms(0.9, 0.999)
    assert num_terms(0.9, 0.95) > num_terms(0.9, 0.99)
    assert num_terms(0.0, 0.999) == 1
    # The velocity is gone before the momentum is.
    assert num_terms(0.9, 0.9) == 0
    assert num_terms(0.9, 0.5) == 0
    assert num_terms(0.5, 0.25) == 0  # as fast


def test_the_most_steps_that_are_summed_up(monkeypatch):
    variable = keras.Variable(np.zeros((4, 2)), dtype="float32")
    rule = keras.optimizers.Adam()
    rule.build([variable])
    num_steps = choice.closed_form_of(rule, variable).kernel.shape[0]
    monkeypatch.setattr(choice, "_MOST_STEPS", num_steps)
    assert choice.closed_form_of(rule, variable) is not None
    monkeypatch.setattr(choice, "_MOST_STEPS", num_steps - 1)
    assert choice.closed_form_of(rule, variable) is None
