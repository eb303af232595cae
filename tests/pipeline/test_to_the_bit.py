"""Schedules without a flush train as the oracle does, to the bit.

On one thread, and without TensorFlow's graph optimizer, which rounds otherwise.
"""

import itertools

import numpy as np
import pytest

from tests.cluster import Cluster
from tests.pipeline import bit_functions

_WAYS = [
    ("vanilla", "paper"),
    ("stash", "paper"),
    ("spectrain", "paper"),
    ("spectrain", "sequential"),
]
# `(model, rule, schedule, target, messages ahead, weights of examples)`.
_USUAL = [
    ("line", "adam", "vanilla", "paper", False, True),
    ("handed", "momentum", "stash", "paper", False, False),
    ("mixed", "momentum", "spectrain", "sequential", False, False),
    ("handed", "adam", "spectrain", "paper", True, False),
]
_OTHERS = [
    case
    for model, rule, way, is_ahead in itertools.product(
        ("line", "handed", "mixed"),
        ("sgd", "momentum", "adam"),
        *(_WAYS, (False, True)),
    )
    if (case := (model, rule, *way, is_ahead, model == "line")) not in _USUAL
]


@pytest.fixture(scope="module")
def one_thread():
    """Three processes that compute with a thread each."""
    cluster = Cluster(
        *(3, "native"),
        env={"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"},
    )
    yield cluster
    cluster.stop()


def _check(cluster, case, atol):
    # The last mini-batch has 3 examples; there are more than are in flight.
    num_examples = 91 if case[4] else 43
    ranks = cluster.run(bit_functions.trained, *case, num_examples)
    weights, history = bit_functions.expected(*case, num_examples)
    for found, logs in ranks:
        for value, expected in zip(found, weights, strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=atol)
        assert logs == ranks[0][1]
    for name, values in history.items():
        np.testing.assert_allclose(ranks[0][1][name], values, rtol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        *_USUAL,
        *(pytest.param(case, marks=pytest.mark.all_cells) for case in _OTHERS),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_three_stages(one_thread, case):
    """Statistics, masks, an LSTM, what is handed on, mixed precision."""
    _check(one_thread, case, atol=0)


@pytest.mark.parametrize(
    "case",
    [
        ("line32", "momentum", *way, is_ahead, True)
        for way in _WAYS
        for is_ahead in (False, True)
    ],
    ids=lambda case: "-".join(map(str, case)),
)
@pytest.mark.all_cells
def test_32_bits(cluster, case):
    """On many threads."""
    _check(cluster("native", 3, has_groups=True), case, atol=1e-6)


def test_the_schedules_differ_by_more():
    """Than `test_32_bits` lets them."""
    ends = [
        bit_functions.expected("line32", "momentum", *way, False, True, 27)[0]
        for way in _WAYS
    ]
    for one, other in itertools.combinations(ends, 2):
        distances = [
            np.abs(a - b).max() for a, b in zip(one, other, strict=True)
        ]
        assert max(distances) > 1e-3
