"""Numbers of batches that are asked for early."""

import types
from concurrent import futures

from keras_sparsity.asynchronous import taking
from keras_sparsity.asynchronous.batches import NONE
from keras_sparsity.asynchronous.pushing import Pushing


class _Training:
    """Of steps and answers that take so many seconds of a clock of its own."""

    def __init__(self, monkeypatch, overlaps):
        self.worker = types.SimpleNamespace(pushing=Pushing(overlaps, False))
        self.store, self.now, self.told = self, 0.0, []
        self.answers, self.seconds = iter([3, 4, 5, 6, NONE, NONE]), 1.0
        monkeypatch.setattr(
            taking, "time", types.SimpleNamespace(monotonic=lambda: self.now)
        )

    def take(self, record):
        self.now += self.seconds
        self.told.append(record)
        return next(self.answers), set()

    def record(self):
        return "now"

    def note_step(self):
        pass

    def record_of_noted(self, staleness):
        return dict(staleness)


def test_a_number_that_takes_long_is_asked_for_early(monkeypatch):
    training = _Training(monkeypatch, overlaps=True)
    pushing = training.worker.pushing
    numbers = taking.Taking(training)
    # The first step of an epoch may take long.
    assert numbers.next() == (3, set())
    training.now += 2
    assert numbers.next() == (4, set())
    futures.wait([pushing.behind(lambda _: None)])
    assert training.told == ["now", "now", {}]
    # The push of a batch is told with the number after the next.
    pushing.begin(lambda batch, version: version + 3, 4, 0)
    training.now += 2
    assert numbers.next() == (5, set())
    futures.wait([pushing.behind(lambda _: None)])
    assert training.told[2:] == [{}, {3: 1}]
    # An answer takes a second of a step of 12.
    training.now += 10
    assert numbers.next() == (6, set())
    assert numbers.next() == (NONE, set())
    assert training.told[2:] == [{}, {3: 1}, "now"]
    # Behind the last batch it asks anew each time.
    assert numbers.next() == (NONE, set())
    assert training.told[4:] == ["now", "now"]
    pushing.close(raises=True)


def test_a_worker_without_others_asks_for_no_number_early(monkeypatch):
    training = _Training(monkeypatch, overlaps=False)
    numbers = taking.Taking(training)
    assert [numbers.next()[0] for _ in range(3)] == [3, 4, 5]
    assert training.told == ["now"] * 3
    training.worker.pushing.close(raises=True)
