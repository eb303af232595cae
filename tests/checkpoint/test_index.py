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
