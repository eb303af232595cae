"""The least bytes and the least time of a step, against figures by hand."""

import dataclasses

import _traffic
import pytest

from tests.benchmarks.figures import RUN, make_figures


def test_bytes():
    figures = make_figures(RUN)
    # 20 rows of each of 2 + 1/64 tables of 64 float32, 3 of 4 elsewhere.
    assert _traffic.row_bytes(figures) == pytest.approx(
        4 * 20 * (64 + 64 + 1) * 4 * 3 / 4
    )
    # Two sets of ids: a kernel and its bias have one.
    assert _traffic.index_bytes(figures) == pytest.approx(2 * 40 * 2 * 3 / 4)
    assert _traffic.dense_bytes(figures) == pytest.approx(4 * 500 * 4 * 3 / 4)
    assert _traffic.row_ratio(figures) == pytest.approx(1)
    with_headers = make_figures(RUN, headers=1.02)
    rows, ids = _traffic.row_bytes(figures), _traffic.index_bytes(figures)
    assert _traffic.row_ratio(with_headers) == pytest.approx(
        (1.02 * (rows + ids) - ids) / rows
    )
    narrow = make_figures(dataclasses.replace(RUN, way="hybrid bfloat16"))
    assert _traffic.row_ratio(narrow) == pytest.approx(0.5)
    elements = 1000 * 129 + 500
    assert _traffic.alpha_model(figures) == pytest.approx(
        (0.02 * 1000 * 129 + 500) / elements
    )


@pytest.mark.parametrize("rate", [0.05, 5000])
def test_bound(rate):
    figures = make_figures(dataclasses.replace(RUN, rate=rate))
    parts = _traffic.step_bound(figures, _traffic.busiest_bytes(figures))
    bytes_per_second = rate * 1e6 / 8
    sent = figures["per_machine"][0]["sent_bytes_per_step"]
    # Of the table that the inputs ask, whose pulls and pushes are 0.75 of the
    # rows that others own; and a ring's of the dense variable that comes first.
    chain = 20 * 64 * 4 * 3 / 4 * 0.75 + 2 * 300 * 4 * 3 / 4
    assert parts["network"] == pytest.approx(sent / bytes_per_second)
    assert parts["chain"] == pytest.approx(chain / bytes_per_second)
    slow, fast = sent / bytes_per_second, 0.9 + chain / bytes_per_second
    assert parts["bound"] == pytest.approx({0.05: slow, 5000: fast}[rate])
    assert (slow > fast) == (rate == 0.05)
