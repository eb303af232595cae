"""The step after which all ranks end a `fit`."""

import queue
import random
import threading
import time

import pytest

from keras_sparsity.health.stops import LastStep, Stops

NUM_RANKS, NUM_STEPS = 3, 40


class Wires:
    """Messages between ranks and the one that decides, in threads, slowly."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._to_root = queue.SimpleQueue()
        self._inboxes = [queue.SimpleQueue() for _ in range(NUM_RANKS)]
        self.stops = [Stops(self._sender(rank)) for rank in range(NUM_RANKS)]
        receivers = [
            (self._inboxes[r], self._hear(r)) for r in range(NUM_RANKS)
        ]
        last = LastStep()
        for box, hear in [*receivers, (self._to_root, self._decide(last))]:
            told = box, hear
            threading.Thread(target=self._run, args=told, daemon=True).start()

    def _sender(self, rank):
        def send(**message):
            self._to_root.put((rank, message))
            return True

        return send

    def _run(self, box, hear):
        while (message := box.get()) is not None:
            time.sleep(self._random.random() * 2e-3)
            hear(message)

    def _hear(self, rank):
        return lambda message: self.stops[rank].hear(**message)

    def _decide(self, last):
        def tell(**message):
            for box in self._inboxes:
                box.put(message)

        def decide(received):
            rank, message = received
            if message["kind"] == "stop":
                if last.begin(message["fit"]):
                    tell(kind="hold", fit=message["fit"])
                return
            told = message["fit"], message["step"], range(NUM_RANKS)
            step = last.found(rank, *told)
            if step is not None:
                tell(kind="last", fit=message["fit"], step=step)

        return decide

    def close(self):
        for box in [self._to_root, *self._inboxes]:
            box.put(None)


def run_fit(stops, asks, may_lead, seed):
    """The step after which each rank has ended, by rank.

    Args:
        asks: dict from a rank to the step in which it wants to stop.
        may_lead: by how many steps a rank may lead the slowest one.
    """
    begun, changed = [0] * NUM_RANKS, threading.Condition()
    ended = [None] * NUM_RANKS

    def run(rank):
        of_rank = random.Random((seed, rank).__hash__())
        stops[rank].begin()
        for step in range(1, NUM_STEPS + 1):
            with changed:  # as in a collective
                begun[rank] = step
                changed.notify_all()
                is_there = changed.wait_for(
                    lambda s=step: min(begun) >= s - may_lead, timeout=20
                )
            assert is_there
            time.sleep(of_rank.random() * 2e-3)
            is_wanted = step >= asks.get(rank, NUM_STEPS + 1)
            if stops[rank].ends_after(step, is_wanted):
                break
        ended[rank] = step

    threads = [
        threading.Thread(target=run, args=(rank,)) for rank in range(NUM_RANKS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


@pytest.mark.parametrize("may_lead", [0, 4])
@pytest.mark.parametrize(
    "asks", [{1: 5}, {0: 7, 2: 7}, {0: 8, 1: 6, 2: 9}, {0: 1}]
)
def test_all_end_after_the_same_step(asks, may_lead):
    wires = Wires(seed=may_lead)
    for seed in range(3):  # `fit`s
        ended = run_fit(wires.stops, asks, may_lead, seed)
        assert len(set(ended)) == 1
        first = min(asks.values())
        assert first <= ended[0] <= first + 1 + may_lead
    wires.close()


def test_nobody_ends_unasked():
    wires = Wires(seed=0)
    assert run_fit(wires.stops, {}, 1, 0) == [NUM_STEPS] * NUM_RANKS
    wires.close()


def test_without_others():
    stops = Stops(lambda **message: False)
    stops.begin()
    assert not stops.ends_after(1, is_wanted=True)


def test_messages_of_a_fit_that_this_rank_has_not_begun():
    sent = []
    stops = Stops(lambda **message: sent.append(message) or True)
    stops.begin()
    assert not stops.ends_after(5, is_wanted=False)
    stops.hear("hold", fit=2)
    assert sent == [{"kind": "bound", "fit": 2, "step": 1}]
    assert not stops.ends_after(6, is_wanted=False)
    stops.begin()
    # It waits behind its first step, until it is told the last one.
    told = []

    def tell():
        told.append(True)
        stops.hear("last", fit=2, step=2)

    threading.Timer(0.3, tell).start()
    assert not stops.ends_after(1, is_wanted=False)
    assert told
    assert stops.ends_after(2, is_wanted=False)
    stops.hear("hold", fit=3)
    stops.hear("last", fit=3, step=1)
    stops.begin()
    assert stops.ends_after(1, is_wanted=False)


def test_messages_of_an_earlier_fit():
    sent = []
    stops = Stops(lambda **message: sent.append(message) or True)
    stops.begin()
    stops.begin()
    stops.hear("hold", fit=1)
    stops.hear("last", fit=1, step=1)
    assert not stops.ends_after(1, is_wanted=False)
    assert sent == [{"kind": "bound", "fit": 1, "step": 1}]
