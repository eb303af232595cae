"""`memory_bytes` refuses what `ks.plan` says is more."""

import pytest

from keras_sparsity.pipeline.memory import passing_bytes
from keras_sparsity.stages.turns import Turns
from tests.pipeline import memory_functions


@pytest.mark.parametrize(
    ("schedule", "model"),
    [
        ("1f1b", "nested"),
        pytest.param("stash", "masks", marks=pytest.mark.all_cells),
    ],
)
def test_limit(cluster, schedule, model):
    ranks = cluster("native", 2).run(memory_functions.limited, schedule, model)
    for of_stages, trained, messages in ranks:
        # `tests/pipeline/test_plan.py` compares them with sums by hand.
        assert of_stages == ranks[0][0]
        most = max(of_stages)
        number = of_stages.index(most)
        assert trained
        in_step, at_compile = messages
        assert f"Stage {number}, of the layers" in in_step
        assert f"holds {most:,} bytes in a step of 8 examples" in in_step
        assert f"memory_bytes={most - 1:,}" in in_step
        assert "bytes without the activations" in at_compile
        assert "memory_bytes=100" in at_compile


def test_inputs_wait_longer_than_messages():
    """Those that have been read wait for the messages of their mini-batch."""
    turns = Turns(3, messages_ahead=True)
    read, received, made = 10, 100, 1_000
    of_last = passing_bytes(None, 2, turns, 4, read, received, made)
    # Read four turns before; of one micro-batch at a time.
    assert of_last == 4 * (5 * read + 2 * received) + made
    of_middle = passing_bytes(None, 1, turns, 4, read, received, made)
    # Four more wait for their backward passes.
    assert of_middle == 4 * (7 * read + 6 * received + made)
