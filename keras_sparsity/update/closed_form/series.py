"""Series of 1 / (s q + epsilon) in a row's s, for the q of many steps."""

import functools

import numpy as np
from numpy.polynomial import chebyshev

from keras_sparsity.update.closed_form.base import num_steps_of, powers

# Coefficients of more powers would be rounding alone. 16 are enough for
# beta_1 = 0.9, beta_2 = 0.95 in float32.
_MOST_TERMS = 24
_ROOTS = (1, 2, 4, 8)
_NUM_NODES = 256
# Largest sum of the coefficients' sizes in terms of the result, which is how
# much the polynomial adds to rounding.
_MOST_CANCELLATION = 8.0


def num_steps(beta_1, shrink, tolerance):
    r"""Steps after which :math:`\beta_1^i / shrink^i` is too small to count."""
    return num_steps_of(beta_1 / shrink, tolerance / 10)


@functools.lru_cache(maxsize=64)
def of_steps(beta_1, shrink, tolerance):
    r"""Polynomials of :math:`\beta_1^i (s + \epsilon) / (s q_i + \epsilon)`.

    Here :math:`q_i = shrink^i`. The variable is
    :math:`x = 2 z^{1 / root} - 1`, in which
    :math:`z = \epsilon / (s + \epsilon)` lies between 0 and 1, so that the
    function is :math:`\beta_1^i / (q_i + (1 - q_i) z)`. Its Chebyshev series
    needs half as many terms as its powers. Where q decays nearly as fast as
    the moment, poles lie close to z = 0, and a root leads away from them.

    Args:
        beta_1: factor of the moment m in each step.
        shrink: factor of s.
        tolerance: relative error.

    Returns:
        `(kernel, root)`: float64 array `(num_steps, num_terms)` of coefficients
        of the powers of x, and 1, 2, 4 or 8. No terms: there is no such series.
    """
    if not beta_1:
        return np.zeros((1, 1)), 1
    if beta_1 >= shrink:
        return np.zeros((1, 0)), 1
    count = num_steps(beta_1, shrink, tolerance)
    weights, q = powers(beta_1, count), powers(shrink, count)
    best = np.zeros((count, 0)), 1
    for root in _ROOTS:
        kernel = _polynomials(weights, q, root, tolerance)
        num_terms = kernel.shape[1]
        if num_terms and not 0 < best[0].shape[1] <= num_terms + root:
            best = kernel, root
    return best


def _polynomials(weights, q, root, tolerance):
    # Cosines of multiples of the nodes' angles, which stay below a turn.
    orders = np.arange(_NUM_NODES)
    turns = np.outer(orders, 2 * orders + 1) % (4 * _NUM_NODES)
    cosines = np.cos(np.pi / (2 * _NUM_NODES) * turns)
    z = ((cosines[1] + 1) / 2) ** root
    values = weights / (q + (1 - q) * z)
    series = values @ cosines.T * 2 / _NUM_NODES
    series[:, 0] /= 2
    # The rest that is left out, by the number of terms; z = 1 sums least.
    left = np.abs(series).sum(axis=0)[::-1].cumsum()[::-1]
    is_enough = left <= tolerance * weights.sum()
    num_terms = np.argmax(is_enough) if is_enough.any() else 0
    if num_terms > _MOST_TERMS:
        return series[:, :0]
    kernel = series[:, :num_terms] @ to_powers(num_terms)
    size = np.abs(kernel.sum(axis=0)).sum()
    is_stable = size <= _MOST_CANCELLATION * weights.sum()
    return kernel if is_stable else kernel[:, :0]


def to_powers(num_terms):
    """Matrix from coefficients of Chebyshev polynomials to those of powers."""
    matrix = np.zeros((num_terms, num_terms))
    for row, one in zip(matrix, np.eye(num_terms), strict=True):
        coefficients = chebyshev.cheb2poly(one)
        row[: len(coefficients)] = coefficients
    return matrix


def value(coefficients, x):
    """A polynomial: tensors of its coefficients, that of 1 first."""
    total = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total
