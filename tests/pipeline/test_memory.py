"""`memory_bytes` refuses what `ks.plan` says is more."""

import pytest

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
