"""Timed windows outside of a cluster."""

import json
import time

import _network
import pytest


def test_outside_of_a_cluster_the_time_alone_is_reported(monkeypatch, capsys):
    monkeypatch.delenv(_network.VARIABLE, raising=False)
    window = _network.Window()
    begin = time.perf_counter()
    window.begin()
    time.sleep(0.1)
    window.end(2)
    most = time.perf_counter() - begin
    window.idle()
    window.report(10)
    (figures,) = _network.by_rate(json.loads(capsys.readouterr().out))
    assert 0.1 <= figures["seconds"] <= most + 0.0005  # rounded
    assert figures["words_per_second"] == pytest.approx(
        2 * 10 / figures["seconds"], rel=0.01
    )
    assert "per_machine" not in figures
