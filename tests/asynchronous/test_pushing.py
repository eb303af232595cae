"""Pushes that run while a worker computes."""

import threading

import pytest

from keras_sparsity.asynchronous import pushing as pushing_module
from keras_sparsity.asynchronous.pushing import Pushing


def test_one_push_is_under_way_at_most():
    pushing, may_end, events = (
        Pushing(overlaps=True, holds=False),
        threading.Event(),
        [],
    )

    def push(batch, version, *values):
        assert may_end.wait(60)
        events.append((batch, version, *values))
        return version + 2

    pushing.begin(push, 7, 10, "gradient")
    assert not pushing.has_ended(7)
    assert events == []
    threading.Timer(0.1, may_end.set).start()
    # It waits for the first one.
    pushing.begin(push, 8, 11)
    assert events[0] == (7, 10, "gradient")
    pushing.wait()
    assert pushing.has_ended(8)
    assert events[1:] == [(8, 11)]
    assert pushing.staleness == {2: 2}
    pushing.close(raises=True)


def test_the_push_of_an_earlier_batch_is_awaited():
    pushing, may_end, ended = Pushing(True, False), threading.Event(), []

    def push(batch, version):
        assert may_end.wait(60)
        ended.append(batch)
        return version

    pushing.begin(push, 1, 0)
    threading.Timer(0.1, may_end.set).start()
    # The step of batch 2 has pushed nothing.
    assert pushing.has_ended(2)
    assert ended == [1]
    pushing.close(raises=True)


def test_without_overlap_a_push_has_ended_when_it_has_begun():
    pushing = Pushing(overlaps=False, holds=True)
    pushing.begin(lambda batch, version: version, 1, 0)
    assert pushing.staleness == {0: 1}
    assert pushing.has_ended(1)
    pushing.close(raises=True)


@pytest.mark.parametrize("told", ["let_go", "wait", None])
def test_a_push_lets_the_next_steps_requests_leave_first(monkeypatch, told):
    seconds = 0.05 if told is None else 60
    monkeypatch.setattr(pushing_module, "_HELD_SECONDS", seconds)
    pushing, ended = Pushing(True, True), threading.Event()

    def push(batch, version):
        ended.set()
        return version

    for batch in range(2):
        ended.clear()
        pushing.begin(push, batch, 0)
        if told is not None:
            assert not ended.wait(0.05)
            getattr(pushing, told)()
        assert ended.wait(20)
    pushing.close(raises=True)


def test_errors_of_pushes():
    def push(batch, version):
        raise KeyError(batch)

    pushing = Pushing(overlaps=True, holds=False)
    pushing.begin(push, 1, 0)
    with pytest.raises(KeyError, match="1"):
        pushing.begin(push, 2, 0)
    pushing.begin(push, 3, 0)
    with pytest.raises(KeyError, match="3"):
        pushing.close(raises=True)
    # Another error is on its way.
    pushing = Pushing(overlaps=True, holds=False)
    pushing.begin(push, 4, 0)
    pushing.close(raises=False)
    assert pushing.staleness == {}
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("keras_sparsity-pu")]
