"""The steps after which a checkpoint is saved."""

import keras

import keras_sparsity as ks
from keras_sparsity.checkpoint import storage
from tests import checkpoint_functions as functions

STEPS = functions.NUM_EXAMPLES // functions.BATCH


def _count_saves(monkeypatch, **arguments):
    """Positions at which a training of 4 epochs of 8 steps saves."""
    positions = []
    monkeypatch.setattr(
        storage,
        "save",
        lambda model, directory, position, *_, **__: positions.append(
            (position["epoch"], position["step"])
        ),
    )
    keras.utils.set_random_seed(5)
    functions.build().fit(
        **functions.fit_arguments("arrays"),
        epochs=functions.EPOCHS,
        verbose=0,
        callbacks=[ks.callbacks.ShardedCheckpoint(**arguments)],
    )
    return positions


def test_when_it_saves(tmp_path, monkeypatch):
    ends = [(epoch, 0) for epoch in range(1, functions.EPOCHS + 1)]
    assert _count_saves(monkeypatch, directory=tmp_path) == ends
    by_steps = _count_saves(monkeypatch, directory=tmp_path, every_steps=5)
    assert by_steps == sorted(
        [*ends, *[(epoch, 5) for epoch in range(functions.EPOCHS)]]
    )
    # A clock that goes on by 10 s each time it is asked.
    times = iter(range(0, 100_000, 10))
    monkeypatch.setattr(
        "keras_sparsity.callbacks.save_times.time.monotonic",
        lambda: next(times),
    )
    always = _count_saves(monkeypatch, directory=tmp_path, every_seconds=1)
    assert len(always) == STEPS * functions.EPOCHS
    rarely = _count_saves(monkeypatch, directory=tmp_path, every_seconds=35)
    assert len(ends) < len(rarely) < len(always)
    never = _count_saves(monkeypatch, directory=tmp_path, every_seconds=9e9)
    assert never == ends
