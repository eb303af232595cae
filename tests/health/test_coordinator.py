"""Rank 0 asks all ranks, decides, and informs all of them."""

import contextlib
import queue
import time
from multiprocessing import connection

import pytest

from keras_sparsity.health.channel import Channel
from keras_sparsity.health.coordinator import Coordinator
from keras_sparsity.health.report import Call, Report, from_lists
from keras_sparsity.health.returning import Returning


@pytest.fixture
def ranks():
    """`ranks(size, timeout)` starts a coordinator; gives the ranks' ends."""
    with contextlib.ExitStack() as stack:

        def start(size, timeout=600.0, root=0):
            pipes = [connection.Pipe() for _ in range(size)]
            ends = [Channel(own) for own, _ in pipes]
            far = {rank: Channel(end) for rank, (_, end) in enumerate(pipes)}
            coordinator = Coordinator(far, timeout, root)
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


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("kind", ["farewell", "failure"])
def test_its_own_process_is_told_last(ranks, root, kind, monkeypatch):
    told, send = [], Channel.send

    def noted(channel, **message):
        told.append((message["kind"], channel))
        return send(channel, **message)

    ends = ranks(3, root=root)
    monkeypatch.setattr(Channel, "send", noted)
    for end in ends:
        if kind == "farewell":
            end.send(kind="report", **Report("ended").to_json())
        else:
            end.send(kind="raised", error="ValueError: no luck")
    for end in ends:
        wait_for(end, kind)
    *_, last = [channel for name, channel in told if name == kind]
    # At the other end of the pipe.
    monkeypatch.undo()
    last.send(kind="mark")
    wait_for(ends[root], "mark")


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
        Report(
            *("blocked", (Call("all_reduce", name),)),
            stalled_seconds=5.0,
            begun=(1,),
        )
        for name in ("a", "b")
    ]
    for end, report in zip(ends, reports, strict=True):
        end.send(kind="report", **report.to_json())
    for end, report in zip(ends, reports, strict=True):
        asked = from_lists(wait_for(end, "ask")["calls"])
        report.left = tuple((call, 0) for call in asked)
        end.send(kind="report", **report.to_json())
    for end, report in zip(ends, reports, strict=True):
        message = wait_for(end, "failure", report)["message"]
        assert "the ranks call different collectives" in message


def test_a_rank_that_has_left_a_slow_call_is_asked_about_it(ranks):
    ends = ranks(2)
    calls = [Call("broadcast", name, "float32", (3,)) for name in ("a", "b")]
    reports = [
        Report("blocked", (call,), stalled_seconds=5.0, begun=(1,))
        for call in calls
    ]
    for end, report in zip(ends, reports, strict=True):
        end.send(kind="report", **report.to_json())
    left = (calls[0].without_shape(), 1), (calls[1].without_shape(), 0)
    for end, report in zip(ends, reports, strict=True):
        asked = from_lists(wait_for(end, "ask")["calls"])
        assert set(asked) == {call for call, _ in left}
        # One that was on its way is no answer.
        end.send(kind="report", **report.to_json())
    reports[0].left = tuple((call, 0) for call, _ in left)
    reports[1].left = left
    for end, report in zip(ends, reports, strict=True):
        end.send(kind="report", **report.to_json())
    # All reports were heard, and then judged.
    for seconds in (50.0, 51.0):
        for end in ends:
            end.send(kind="timeout", seconds=seconds)
        while ends[0].receive() != {"kind": "timeout", "seconds": seconds}:
            pass
    for end in ends:
        end.send(kind="report", **Report("ended").to_json())
    for end in ends:
        wait_for(end, "farewell")


def test_a_rank_that_has_ended_may_answer_late(ranks):
    ends = ranks(2)
    call = Call("broadcast", "a")
    blocked = Report(
        *("blocked", (call,)),
        stalled_seconds=5.0,
        begun=(1,),
        left=((call, 0),),
    )
    ended = Report("ended", stalled_seconds=5.0)
    for end, report in zip(ends, (blocked, ended), strict=True):
        end.send(kind="report", **report.to_json())
    ended.left = ((call, 1),)
    for end in ends:
        wait_for(end, "ask")
    ends[0].send(kind="report", **blocked.to_json())
    until = time.monotonic() + 2
    while ends[0].poll(max(0, until - time.monotonic())):
        assert ends[0].receive()["kind"] == "alive"
    ends[1].send(kind="report", **ended.to_json())
    ends[0].send(kind="report", **Report("ended").to_json())
    for end in ends:
        wait_for(end, "farewell", ended)


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


@pytest.mark.parametrize("num_leave", [1, 2])
def test_a_rank_that_leaves_alone_is_lost(ranks, num_leave):
    *workers, server = ranks(3)
    server.send(kind="spare", ranks=[0, 1])
    wait_until_heard(server, 500.0, server)
    for end in workers[:num_leave]:
        end.send(kind="leaving", error="SystemExit, by sys.exit(0)")
    if num_leave == 1:
        message = wait_for(workers[0], "failure")["message"]
        assert "go on without this: rank 0 left `fit` by SystemExit" in message
        for end in (workers[1], server):
            assert wait_for(end, "without")["rank"] == 0
        workers = workers[1:]
    else:
        for end in workers:
            wait_for(end, "all_leave")
    for end in (*workers, server):
        end.send(kind="report", **Report("ended").to_json())
    for end in (*workers, server):
        wait_for(end, "farewell")


@pytest.mark.parametrize("num_leave", [1, 2])
def test_without_servers_a_rank_that_leaves_alone_ends_all(ranks, num_leave):
    ends = ranks(2)
    for end in ends[:num_leave]:
        end.send(kind="leaving", error="SystemExit, by sys.exit(0)")
    if num_leave == 1:
        for end in ends:
            message = wait_for(end, "failure", Report())["message"]
            assert "rank 0 left `fit` by SystemExit" in message
        return
    for end in ends:
        wait_for(end, "all_leave")
        end.send(kind="report", **Report("ended").to_json())
    for end in ends:
        wait_for(end, "farewell")


@pytest.mark.parametrize("is_lost", [False, True])
def test_after_a_loss_the_others_wait_anew(ranks, is_lost):
    first, second, server = ranks(3)
    server.send(kind="spare", ranks=[0, 1])
    wait_until_heard(server, 500.0, server)
    if is_lost:
        first.close()
        wait_for(server, "without")
    call = Call("a wait for", "other workers", ranks=(1,))
    still = {end: Report(stalled_seconds=700.0) for end in (first, server)}
    still[second] = Report(
        *("blocked", (call,)), stalled_seconds=700.0, begun=(1,)
    )
    for end, report in still.items():
        end.send(kind="report", **report.to_json())
    kinds = []
    # All reports were heard, and then judged.
    for seconds, end in enumerate((server, second, second), 50):
        end.send(kind="timeout", seconds=float(seconds))
        while (message := server.receive()) != {
            "kind": "timeout",
            "seconds": float(seconds),
        }:
            kinds.append(message["kind"])
    assert ("ask" in kinds) is not is_lost


def test_all_that_are_left_end_together(ranks):
    first, second, server = ranks(3)
    server.send(kind="spare", ranks=[0, 1])
    wait_until_heard(server, 500.0, server)
    for end in (second, server):
        end.send(kind="report", **Report("ended").to_json())
    first.close()
    for end in (second, server):
        wait_for(end, "farewell")


def wait_until_heard(end, seconds, other):
    """What an end has sent was heard; others' answers show it."""
    end.send(kind="timeout", seconds=seconds)
    while wait_for(other, "timeout")["seconds"] != seconds:
        pass


@pytest.fixture
def joined():
    """Three ranks, the first a server, of which the last one joins anew."""
    pipes = [connection.Pipe() for _ in range(4)]
    *ends, new = [Channel(own) for own, _ in pipes]
    *far, far_new = [Channel(end) for _, end in pipes]
    coordinator = Coordinator(dict(enumerate(far)), 600.0, root=0)
    coordinator.start()
    ends[0].send(kind="spare", ranks=[1, 2])
    wait_until_heard(ends[0], 500.0, ends[0])
    ends[2].close()
    assert wait_for(ends[0], "without")["rank"] == 2
    coordinator.admit(2, far_new)
    # Its `go_on_without` names all workers, too.
    new.send(kind="spare", ranks=[1, 2])
    wait_until_heard(new, 400.0, ends[0])
    yield ends[0], ends[1], new
    for end in (ends[0], ends[1], new):
        end.close()
    coordinator.join()
    for end in (*far, far_new):
        end.close()


def test_the_others_do_not_wait_for_one_that_has_not_joined(joined):
    for end in joined[:2]:
        end.send(kind="report", **Report("ended").to_json())
    for end in joined:
        wait_for(end, "farewell")


def test_the_others_calls_do_not_need_one_that_has_not_joined(joined):
    server, worker, new = joined
    new.send(kind="report", **Report("ended", stalled_seconds=5.0).to_json())
    calls = (Call("all_reduce", name="a"),)
    blocked = Report("blocked", calls, stalled_seconds=5.0, begun=(1,))
    for end in (server, worker):
        end.send(kind="report", **blocked.to_json())
    kinds = []
    # All reports were heard, and then judged.
    for seconds, end in enumerate((new, server, worker, worker), 50):
        end.send(kind="timeout", seconds=float(seconds))
        while (message := server.receive()) != {
            "kind": "timeout",
            "seconds": float(seconds),
        }:
            kinds.append(message["kind"])
    assert not {"ask", "failure"} & set(kinds)
    for end in (server, worker):
        end.send(kind="report", **Report("ended").to_json())
    for end in joined:
        wait_for(end, "farewell")


def test_one_that_has_not_joined_does_not_go_on_alone(joined):
    server, worker, new = joined
    worker.close()
    for end in (server, new):
        assert "rank 1" in wait_for(end, "failure", Report())["message"]


def test_one_that_has_joined_goes_on_alone(joined):
    server, worker, new = joined
    new.send(kind="joined")
    wait_until_heard(new, 300.0, server)
    worker.close()
    for end in (server, new):
        assert wait_for(end, "without")["rank"] == 1
    for end in (server, new):
        end.send(kind="report", **Report("ended").to_json())
    for end in (server, new):
        wait_for(end, "farewell")


def test_a_process_that_decides_no_more_declares_nothing():
    pipes = [connection.Pipe() for _ in range(2)]
    (own, end), far = (
        [Channel(each) for each in ends] for ends in zip(*pipes, strict=True)
    )
    coordinator = Coordinator(dict(enumerate(far)), 600.0, root=None)
    coordinator.start()
    coordinator.retire()
    coordinator.join()
    end.close()
    assert not own.poll(0)
    for each in (own, *far):
        each.close()


def test_its_own_process_hears_of_changes():
    pipes = [connection.Pipe() for _ in range(3)]
    ends, far = (
        [Channel(each) for each in ends] for ends in zip(*pipes, strict=True)
    )
    changes, returning = queue.SimpleQueue(), Returning()
    coordinator = Coordinator(
        dict(enumerate(far)),
        600.0,
        root=None,
        returning=returning,
        on_change=lambda *change: changes.put(change),
    )
    coordinator.start()
    returning.allow([2])
    ends[2].close()
    assert changes.get(timeout=20) == (2, True)
    own, new = map(Channel, connection.Pipe())
    coordinator.admit(2, new)
    own.send(kind="joined")
    assert changes.get(timeout=20) == (2, False)
    for end in (ends[0], ends[1], own):
        end.close()
    coordinator.join()
    for end in (*far, new):
        end.close()
