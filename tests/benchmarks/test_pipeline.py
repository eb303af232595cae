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


def _run(rate, largest_sent_bytes, *turns):
    return {
        "rate_mbit": rate,
        "batch": 64,
        "words_per_second": 7.0,
        "largest_sent_bytes": largest_sent_bytes,
        "turns": turns,
        "stages": [["first"], ["second"]],
        "planned_bytes": 2 * largest_sent_bytes,
        "per_machine": 2 * [{"sent_payload_bytes_per_step": 10}],
    }


def test_a_step_over_the_larger_of_computation_and_transfer():
    runs = [
        # 1 MB takes 0.16 s.
        _run(50.0, 1_000_000, (0.24, 0.1)),
        # 0.04 s: the computation is longer.
        _run(200.0, 1_000_000, (0.11, 0.1)),
        # A rate below 1 Mbit/s keeps its digits.
        _run(0.5, 1_000_000, (16.0, 0.1)),
    ]
    over = pipeline._by_rate(runs)["step_over_bound"]
    assert over == {"50": 1.5, "200": 1.1, "0.5": 1.0}


def test_a_step_over_the_computation_that_was_measured_beside_it():
    # On a machine that is slower in one turn, and disturbed in another.
    turns = (0.11, 0.1), (0.22, 0.2), (0.3, 0.1)
    found = pipeline._by_rate([_run(50.0, 10, *turns)])
    assert found["step_over_bound"] == {"50": 1.1}
    assert found["samples_per_second"] == {"50": round(64 / 0.22, 1)}


def test_no_bound_without_stages():
    found = pipeline._by_rate([_run(50.0, 0) | {"stages": []}])
    assert found["step_over_bound"] == {"50": 0}
    assert found["samples_per_second"] == {"50": 7.0}


def test_the_median_round_counts():
    rounds = [_run(50.0, 0, (seconds, 0.1)) for seconds in (0.4, 0.1, 0.2)]
    assert pipeline._by_rate([*rounds, _run(200.0, 10, (0.4, 0.1))]) == {
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
