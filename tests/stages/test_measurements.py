"""A model and its links, measured by all ranks together."""

import types

import keras

from keras_sparsity.stages import measurements, timing
from keras_sparsity.stages.cutting import Cutter


def test_passes_on_all_processes_at_once(monkeypatch):
    events, seconds = [], iter([2.0, 3.0])

    def processor_seconds(run, tensors):
        events.append("passes")
        assert run(*tensors) is not None
        return next(seconds)

    monkeypatch.setattr(timing, "processor_seconds", processor_seconds)

    def gather_objects(own, name):
        events.append(name)
        # The other process takes 5 s, and no pass fails.
        return [own, (None, 5.0 if name == "plan/crowding" else None)]

    communicator = types.SimpleNamespace(
        rank=0,
        barrier=events.append,
        gather_objects=gather_objects,
    )
    layers = [keras.Input((8,)), keras.layers.Dense(4)]
    cutter = Cutter(keras.Sequential(layers))
    found = measurements._crowding(cutter, 4, communicator)
    assert found == (3.0 + 5.0) / 2 / 2.0
    assert events == [
        *("plan/alone", "passes", "plan/together", "passes"),
        "plan/crowding",
    ]
