"""Values that a checkpoint's index keeps."""

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
