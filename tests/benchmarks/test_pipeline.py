"""The figures of `benchmarks/pipeline.py`, and what its limits miss."""

import re

import pipeline
import pytest

_DATA_PARALLEL = "data parallel"
_AHEAD = "spectrain, messages ahead"


def _way(over=(), planned=1000, sent=1000, at_50=0.0):
    return {
        "step_over_bound": dict(over),
        "planned_bytes": {"200": planned},
        "sent_bytes": {"200": sent},
        "samples_per_second": {"50": at_50} if at_50 else {},
    }


def _run(rate, words_per_second, largest_sent_bytes, computation_seconds=0.1):
    return {
        "rate_mbit": rate,
        "batch": 64,
        "words_per_second": words_per_second,
        "largest_sent_bytes": largest_sent_bytes,
        "computation_seconds": computation_seconds,
        "stages": [["first"], ["second"]],
        "planned_bytes": 2 * largest_sent_bytes,
        "per_machine": 2 * [{"sent_payload_bytes_per_step": 10}],
    }


def test_a_step_over_the_larger_of_computation_and_transfer():
    runs = [
        # A step of 0.24 s; 1 MB takes 0.16 s.
        _run(50.0, 64 / 0.24, 1_000_000),
        # 0.04 s: the computation of 0.1 s is longer.
        _run(200.0, 64 / 0.11, 1_000_000),
        # A rate below 1 Mbit/s keeps its digits.
        _run(0.5, 64 / 16.0, 1_000_000),
    ]
    over = pipeline._by_rate(runs)["step_over_bound"]
    assert over == {"50": 1.5, "200": 1.1, "0.5": 1.0}


def test_no_bound_without_stages():
    runs = [_run(50.0, 1.0, 0) | {"stages": []}]
    assert pipeline._by_rate(runs)["step_over_bound"] == {"50": 0}


def test_the_median_round_counts():
    rounds = [_run(50.0, 64 / seconds, 0) for seconds in (0.3, 0.1, 0.2)]
    assert pipeline._by_rate([*rounds, _run(200.0, 64 / 0.4, 10)]) == {
        "samples_per_second": {"50": 64 / 0.2, "200": 64 / 0.4},
        "sent_bytes": {"50": 20, "200": 20},
        "planned_bytes": {"50": 0, "200": 20},
        "step_over_bound": {"50": 2.0, "200": 4.0},
        "stages": {rate: [["first"], ["second"]] for rate in ("50", "200")},
    }


@pytest.mark.parametrize(
    ("ways", "num_machines", "expected"),
    [
        ({"spectrain": _way({"50": 1.18, "200": 1.0})}, 2, []),
        (
            {"spectrain": _way({"50": 1.181, "200": 1.3, "1000": 2.0})},
            2,
            ["1.181 times the bound at 50", "1.3 times the bound at 200"],
        ),
        ({"spectrain": _way({"50": 1.3})}, 4, []),  # of two machines alone
        ({"stash": _way({"50": 1.3})}, 2, []),
        # With messages ahead it alone counts.
        (
            {"spectrain": _way({"50": 1.3}), _AHEAD: _way({"50": 1.1})},
            *(2, []),
        ),
        (
            {"spectrain": _way({"50": 1.1}), _AHEAD: _way({"50": 1.3})},
            *(2, ["1.3 times the bound at 50"]),
        ),
    ],
)
def test_bound(ways, num_machines, expected):
    _check(pipeline.missed("attention", ways, num_machines), expected)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (1029, []),
        (971, []),
        (1040, [r"stash: \+4.0% of the planned bytes at 200"]),
        (960, ["stash: -4.0% of the planned bytes at 200"]),
    ],
)
def test_bytes(sent, expected):
    # Those of data parallelism are not planned.
    ways = {"stash": _way(sent=sent), _DATA_PARALLEL: _way(planned=0)}
    _check(pipeline.missed("attention", ways, 4), expected)


@pytest.mark.parametrize(
    ("name", "at_50", "expected"),
    [
        ("recurrent", 8.92, []),
        ("recurrent", 8.9, ["8.90 times data parallelism at 50"]),
        ("fully connected", 8.9, ["8.90 times data parallelism at 50"]),
        ("attention", 8.9, []),
        ("recurrent", None, []),  # not measured at this rate
    ],
)
def test_ratio_to_data_parallelism(name, at_50, expected):
    ways = {"spectrain": _way(at_50=at_50), _DATA_PARALLEL: _way(at_50=1.0)}
    _check(pipeline.missed(name, ways, 4), expected)


def _check(found, expected):
    for sentence, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, sentence)
