"""Values that a checkpoint's index keeps."""

import os

import pytest

from keras_sparsity.checkpoint import index

MOST_LEVELS = 28


def nested(levels, wrap):
    value = 3
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap", [lambda value: [value], lambda value: {"a": value}]
)
def test_how_deep_values_may_be_nested(wrap):
    kept = nested(MOST_LEVELS, wrap)
    assert index.plain(kept, "it") == kept
    with pytest.raises(ValueError, match="cannot keep it.*nested too deeply"):
        index.plain(nested(MOST_LEVELS + 1, wrap), "it")


def test_an_index_is_whole_when_it_goes_to_disk(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        os, "fsync", lambda file: sizes.append(os.fstat(file).st_size)
    )
    index.write(tmp_path, {"num_processes": 2})
    assert sizes == [(tmp_path / index.INDEX).stat().st_size]


RECORD = {"section": "model", "name": "it", "dtype": "float32", "shape": [4]}


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ({}, {"shape": [4.0]}, "shape=.4.0"),
        ({"each_rank": True}, {"each_rank": 1}, "each_rank=1"),
        ({"ranks": [0, 2]}, {"ranks": [3]}, "ranks=.3"),
        (
            {"num_partitions": 2, "owners": [1, 0]},
            {"num_partitions": 2},
            "no 'owners'",
        ),
    ],
)
def test_facts_of_a_variable(right, wrong, message):
    index._check_record({**RECORD, **right}, 3)
    with pytest.raises(ValueError, match=f"it has {message}"):
        index._check_record({**RECORD, **wrong}, 3)
