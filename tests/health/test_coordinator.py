"""Rank 0 asks all ranks, decides, and informs all of them."""

import contextlib
from multiprocessing import connection

import pytest

from keras_sparsity.health.channel import Channel
from keras_sparsity.health.coordinator import Coordinator
from keras_sparsity.health.report import Call, Report


@pytest.fixture
def ranks():
    """`ranks(size, timeout)` starts a coordinator; gives the ranks' ends."""
    with contextlib.ExitStack() as stack:

        def start(size, timeout=600.0):
            pipes = [connection.Pipe() for _ in range(size)]
            ends = [Channel(own) for own, _ in pipes]
            far = {rank: Channel(end) for rank, (_, end) in enumerate(pipes)}
            coordinator = Coordinator(far, timeout)
            coordinator.start()
            # Undone from below: the coordinator's thread ends when it has
            # heard the ranks' ends, and only then its own may be closed.
            for end in far.values():
                stack.callback(end.close)
            stack.callback(coordinator.join)
            for end in ends:
                stack.callback(end.close)
            return ends

        yield start


def wait_for(end, kind, answer=None):
    """The next message of this kind; answers each `ask` with a report."""
    while True:
        assert end.poll(20), f"no {kind}"
        message = end.receive()
        if message["kind"] == kind:
            return message
        if message["kind"] == "ask" and answer is not None:
            end.send(kind="report", **answer.to_json())


def test_all_ranks_end_together(ranks):
    ends = ranks(3)
    for end in ends:
        end.send(kind="report", **Report("ended").to_json())
    for end in ends:
        wait_for(end, "farewell")


def test_an_exception_is_the_cause(ranks):
    first, second = ranks(2)
    first.send(kind="trouble", error="connection closed")
    second.send(kind="raised", error="ValueError: no luck")
    for end in (first, second):
        message = wait_for(end, "failure", Report())["message"]
        assert message.startswith("keras_sparsity: rank 1 raised ValueError")
        assert "rank 0: in no collective" in message


def test_a_lost_rank_is_named(ranks):
    first, second = ranks(2)
    second.close()
    message = wait_for(first, "failure", Report())["message"]
    assert "the process of rank 1 is gone" in message


def test_different_calls_are_named(ranks):
    ends = ranks(2)
    reports = [
        Report("blocked", (Call("all_reduce", name),), stalled_seconds=5.0)
        for name in ("a", "b")
    ]
    for end, report in zip(ends, reports, strict=True):
        end.send(kind="report", **report.to_json())
    for end, report in zip(ends, reports, strict=True):
        end.send(kind="report", **report.to_json())
        wait_for(end, "ask")
        end.send(kind="report", **report.to_json())
    for end, report in zip(ends, reports, strict=True):
        message = wait_for(end, "failure", report)["message"]
        assert "the ranks call different collectives" in message


def test_a_new_timeout_goes_to_all(ranks):
    ends = ranks(2)
    ends[1].send(kind="timeout", seconds=20.0)
    for end in ends:
        assert wait_for(end, "timeout", Report())["seconds"] == 20.0


def test_the_others_go_on_without_spare_ranks(ranks):
    first, second, server = ranks(3)
    server.send(kind="spare", ranks=[0, 1])
    wait_for(server, "alive")  # Rank 2 was heard.
    first.send(kind="trouble", error="its session failed")
    first.send(kind="raised", error="ValueError: no luck")
    assert "go on without" in wait_for(first, "failure")["message"]
    for end in (second, server):
        message = wait_for(end, "without", Report())
        assert message["rank"] == 0
        assert "rank 0 raised ValueError" in message["problem"]
    # Without the last of them, nobody would train.
    second.close()
    message = wait_for(server, "failure", Report())["message"]
    assert "the process of rank 1 is gone" in message


def test_all_that_are_left_end_together(ranks):
    first, second, server = ranks(3)
    server.send(kind="spare", ranks=[0, 1])
    wait_for(server, "alive")
    for end in (second, server):
        end.send(kind="report", **Report("ended").to_json())
    first.close()
    for end in (second, server):
        wait_for(end, "farewell")
