"""The thread by which one rank reports, and ends."""

import multiprocessing
import time
from unittest import mock

import pytest
import tensorflow as tf

from keras_sparsity.health import errors
from keras_sparsity.health.channel import Channel
from keras_sparsity.health.journal import Journal
from keras_sparsity.health.rank_watch import RankWatch

_NOTHING = (lambda *_: None,) * 2


def _next(channel):
    """The next message that is no sign of life."""
    while (message := channel.receive())["kind"] == "alive":
        pass
    return message


def test_an_error_by_which_a_rank_leaves_is_shown_as_it_is(monkeypatch):
    own, far = map(Channel, multiprocessing.Pipe())
    left = RankWatch(1, 2, own, Journal(), _NOTHING, 600.0)
    left.go_on_without([0, 1], None)
    monkeypatch.setattr(errors, "_failure", "the others go on without this")
    shown = left._next_hook = mock.Mock()
    error = tf.errors.UnknownError(None, None, "no such file\nin read")
    left.leave(error)
    left._on_exception(type(error), error, None)
    shown.assert_called_once_with(type(error), error, None)
    messages = [far.receive() for _ in range(2)]
    assert messages[1]["kind"] == "leaving"
    assert "UnknownError" in messages[1]["error"]
    own.close()
    far.close()


@pytest.mark.parametrize(
    ("root", "error", "is_told"),
    [
        (0, SystemExit(0), True),
        (0, ValueError("no luck"), False),  # which its program may catch
        (2, SystemExit(0), False),  # of a server, or before any may be lost
        (None, SystemExit(0), False),  # of a server's new process
    ],
)
def test_without_servers_the_others_are_told_of_an_exit(root, error, is_told):
    own, far = map(Channel, multiprocessing.Pipe())
    RankWatch(1, root, own, Journal(), _NOTHING, 600.0).leave(error)
    assert far.poll(0) == is_told
    if is_told:
        assert far.receive()["kind"] == "leaving"
    own.close()
    far.close()


def test_a_rank_reports_to_the_process_that_decides_since():
    (before, old), (channel, far) = (
        map(Channel, multiprocessing.Pipe()) for _ in range(2)
    )
    moved = RankWatch(1, 0, before, Journal(), _NOTHING, 600.0)
    found = []
    moved._end = found.append
    moved._thread.start()
    assert old.poll(20) and _next(old)["kind"] == "report"
    moved.move(channel)
    assert far.poll(20) and _next(far)["kind"] == "report"
    # Neither it nor its end means anything now.
    old.send(kind="failure", message="no luck")
    old.close()
    time.sleep(0.6)
    assert moved._thread.is_alive()
    moved.stops._send(kind="stop", fit=1)
    assert _next(far) == {"kind": "stop", "fit": 1}
    far.close()
    moved._thread.join(20)
    (message,) = found
    assert "keras_sparsity: the scheduler is gone" in message
