"""The series of Adam's closed form, against single steps in float64."""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.update.closed_form.adam import Adam, Adamax

EPSILON, RATE = 1e-7, 1e-3


def sizes_of_steps(form, last, num_steps):
    steps = np.arange(last, last + num_steps, dtype=np.float64)
    return form.step_size(tf.constant(steps), RATE).numpy()


def stepped(form, w, m, s, sizes):
    for size in sizes:
        m = m * form.beta_1
        s = s * form.shrink
        w = w - size * m / (s + form.epsilon)
    return w


def closed(form, w, slots, sizes, dtype):
    num_steps = min(len(sizes), len(form.kernel))
    sums = sizes[:num_steps] @ form.kernel[:num_steps]
    return form.moved(
        tf.constant(w, dtype),
        {kind: tf.constant(slot, dtype) for kind, slot in slots.items()},
        [tf.constant(total, dtype) for total in sums],
    ).numpy()


def problem(scale):
    rng = np.random.default_rng(0)
    shape = (200, 4)
    w, m, s = (rng.normal(size=shape) for _ in range(3))
    s = np.abs(s) * 10 ** rng.uniform(-2, 0, shape)
    return w * 0.05, m * scale, s * scale


@pytest.mark.parametrize("scale", [1e-1, 1e-4, 1e-7, 1e-9])
@pytest.mark.parametrize("last", [1, 10, 100_000])
@pytest.mark.parametrize("gap", [1, 20, 5000])
@pytest.mark.parametrize("kind", [Adam, Adamax])
def test_is_stepping(kind, gap, last, scale):
    w, m, s = problem(scale)
    for dtype, tolerance, limit in (
        ("float32", 1e-9, 3e-6),
        ("float64", 1e-15, 1e-11),
    ):
        form = kind(0.0, 0.9, 0.999, EPSILON, tolerance)
        sizes = sizes_of_steps(form, last, gap)
        slots = {"_m": m, "_u": s}
        if kind is Adam:
            slots = {"_momentums": m, "_velocities": s**2}
        # Of no weight at all, which would round the movement.
        moved = closed(form, 0 * w, slots, sizes, dtype)
        expected = stepped(form, 0 * w, m, s, sizes)
        error = np.abs(moved - expected).max() / np.abs(expected).max()
        assert error < limit, (dtype, error)


def test_number_of_terms_follows_from_the_factors():
    def num_terms(beta_1, beta_2, tolerance=1e-9):
        form = Adam(0.0, beta_1, beta_2, EPSILON, tolerance)
        return form.kernel.shape[1]

    assert 4 <= num_terms(0.9, 0.999) <= 6
    assert num_terms(0.9, 0.999, 1e-15) > num_terms(0.9, 0.999)
    assert num_terms(0.95, 0.999) > num_terms(0.9, 0.999)
    assert num_terms(0.0, 0.999) == 1
    # The velocity is gone before the momentum is.
    assert num_terms(0.9, 0.9) == 0
    assert num_terms(0.9, 0.5) == 0
