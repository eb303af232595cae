"""Changes of the input that an interrupted epoch cannot go on with."""

import pytest

from keras_sparsity.checkpoint import input_facts
from tests import checkpoint_functions as functions
from tests.checkpoint.test_found import found_at

FACTS = {
    "batch_size": None,
    "num_batches": 8,
    "split_by": None,
    "num_workers": 2,
}


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, {}, None),
        ({}, {"num_workers": 1}, None),
        ({"num_batches": None}, {}, None),
        ({}, {"num_batches": 16}, "has 16 batches in an epoch, and had 8"),
        (
            {"batch_size": 3},
            {"batch_size": 4},
            "has 4 examples in a batch, and had 3",
        ),
        ({"split_by": "files"}, {"split_by": "files"}, None),
        (
            {"split_by": "files"},
            {"split_by": "files", "num_workers": 4, "num_batches": 9},
            "split by files for 4 processes, and was split by files for 2",
        ),
        (
            {"split_by": "elements"},
            {"num_workers": 1},
            "split by batches for 1 process, and was split by elements for 2",
        ),
    ],
)
def test_changes_are_told(caplog, before, now, told):
    input_facts.tell_of_changes({**FACTS, **before}, {**FACTS, **now})
    messages = [record.message for record in caplog.records]
    assert len(messages) == (told is not None)
    assert all(told in message for message in messages)


def test_earlier_versions_kept_none(caplog):
    input_facts.tell_of_changes({}, {**FACTS, "split_by": "files"})
    assert not caplog.records


@pytest.mark.parametrize(
    ("epoch", "step", "is_told"),
    [(1, 3, True), (1, 0, False), (2, 3, False)],  # of two epochs
)
def test_within_an_epoch(caplog, epoch, step, is_told):
    found = found_at(epoch, step)
    found.position["input"] = FACTS
    found.tell_of_input({**FACTS, "num_batches": 4})
    assert ("has 4 batches" in caplog.text) == is_told


def test_another_batch_size(tmp_path, caplog, monkeypatch):
    functions.train(tmp_path, interrupt_after=4, epochs=1)
    monkeypatch.setattr(functions, "BATCH", 4)
    functions.train(tmp_path, epochs=1)
    assert "has 16 batches in an epoch, and had 8 before" in caplog.text
