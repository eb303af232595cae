"""Which ranks may be lost, and are awaited."""

import time
from multiprocessing import connection

import pytest

from keras_sparsity.health.channel import Channel
from keras_sparsity.health.coordinator import Coordinator
from keras_sparsity.health.report import Report
from keras_sparsity.health.returning import Returning
from tests.health.test_coordinator import wait_for, wait_until_heard


def test_only_a_rank_that_may_come_back_is_awaited():
    returning = Returning()
    assert not returning.lose(1)
    returning.allow([1])
    assert not returning.lose(2)
    assert returning.lose(1)
    assert returning.awaits(1) and not returning.awaits(2)
    rank, seconds = returning.waited()
    assert rank == 1 and seconds >= 0
    assert returning.take(1) and not returning.take(1)
    assert returning.waited() is None


def test_none_may_be_lost_after_the_end():
    returning = Returning()
    returning.allow([1, 2])
    returning.lose(1)
    assert not returning.end()
    assert returning.lose(2)
    returning.take(1)
    assert not returning.end()
    returning.take(2)
    assert returning.end()
    assert not returning.lose(1)


@pytest.fixture
def awaited():
    """Rank 0 decides and is a server, as rank 2, which is lost and awaited.

    Yields:
        The coordinator, the ends of ranks 0 and 1, and `new()`, which admits
        a new process of rank 2 and gives its end.
    """
    ends, channels = [], {}

    def pipe():
        own, far = map(Channel, connection.Pipe())
        ends.append((own, far))
        return own, far

    (server, channels[0]), (worker, channels[1]), (lost, channels[2]) = (
        pipe() for _ in range(3)
    )
    coordinator = Coordinator(channels, 600.0, root=0)
    coordinator.start()
    server.send(kind="spare", ranks=[1])
    coordinator._returning.allow([2])
    wait_until_heard(server, 500.0, server)
    lost.close()
    for end in (server, worker):
        message = wait_for(end, "without")
        assert message["rank"] == 2 and "is gone" in message["problem"]

    def new():
        own, far = pipe()
        coordinator.admit(2, far)
        wait_until_heard(own, 400.0 + len(ends), server)
        return own

    yield coordinator, server, worker, new
    for own, _ in ends:
        own.close()
    coordinator.join()
    for _, far in ends:
        far.close()


def test_an_awaited_rank_comes_back(awaited):
    coordinator, server, worker, new = awaited
    new().close()  # Its first new process dies, too.
    deadline = time.monotonic() + 20
    while 2 not in coordinator._lost and time.monotonic() < deadline:
        time.sleep(0.01)
    end = new()
    assert not coordinator._returning.end()
    end.send(kind="joined")
    for other in (server, worker):
        assert wait_for(other, "back")["rank"] == 2
    assert coordinator._returning.end()
    for other in (server, worker, end):
        other.send(kind="report", **Report("ended").to_json())
    for other in (server, worker, end):
        wait_for(other, "farewell")


def test_the_others_do_not_end_without_an_awaited_rank(awaited):
    *_, worker, new = awaited
    end = new()
    end.send(kind="raised", error="ValueError: no luck")
    message = wait_for(worker, "failure", Report())["message"]
    assert "rank 2 raised ValueError: no luck" in message


def test_nobody_waits_for_a_rank_forever(awaited, monkeypatch):
    coordinator, server, worker, _ = awaited
    monkeypatch.setattr(coordinator._returning, "waited", lambda: (2, 601.0))
    for end in (server, worker):
        message = wait_for(end, "failure")["message"]
        assert "rank 2 is lost, and no new process" in message


def test_at_other_times_its_death_ends_all(awaited):
    coordinator, server, worker, new = awaited
    end = new()
    end.send(kind="joined")
    wait_for(server, "back")
    assert coordinator._returning.end()
    end.close()
    message = wait_for(worker, "failure", Report())["message"]
    assert "the process of rank 2 is gone" in message
