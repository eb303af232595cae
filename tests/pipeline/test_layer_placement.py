"""Heads on all workers and a tail on one train as one process does."""

import numpy as np
import pytest

from tests.conftest import engines
from tests.pipeline import placement_functions


def _distance(values, others):
    return np.sqrt(
        sum(
            np.square(value.astype("float64") - other).sum()
            for value, other in zip(values, others, strict=True)
        )
    )


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize(
    ("name", "size", "num_examples", "options"),
    [
        ("convolutional", 3, 22, {}),
        # The last batch has one example, of two workers.
        ("ids", 3, 17, {}),
        ("convolutional", 2, 22, {}),
        ("ids", 4, 22, {"tail_batches": "by_worker"}),
        ("convolutional", 5, 22, {"num_tail_workers": 2}),
        ("ids", 4, 17, {"num_tail_workers": 2}),
        ("ids", 5, 22, {"num_tail_workers": 2, "tail_batches": "by_worker"}),
    ],
)
def test_as_one_process(
    cluster, engine, name, size, num_examples, options, tmp_path
):
    ranks = cluster(engine, size, has_groups=True).run(
        placement_functions.train, name, num_examples, str(tmp_path), options
    )
    model = placement_functions.compiled(name)
    before = model.get_weights()
    expected = placement_functions.results(model, name, num_examples)
    moved = _distance(expected["weights"], before)
    assert moved > 0.1
    for rank in ranks:
        assert _distance(rank["weights"], expected["weights"]) <= 1e-5 * moved
        for key, values in expected["history"].items():
            np.testing.assert_allclose(rank["history"][key], values, rtol=1e-5)
        np.testing.assert_allclose(
            rank["evaluated"], expected["evaluated"], rtol=1e-5
        )
        np.testing.assert_allclose(
            rank["predicted"], expected["predicted"], rtol=1e-4, atol=1e-5
        )
        for value, other in zip(rank["gone_on"], rank["resumed"], strict=True):
            np.testing.assert_array_equal(value, other)
    total = sum(value.size for value in expected["weights"])
    (tail,) = {rank["num_held"] for rank in ranks if rank["is_tail"]}
    (head,) = {rank["num_held"] for rank in ranks if not rank["is_tail"]}
    assert head + tail == total
    if name == "convolutional":
        # After the last pooling.
        assert ranks[0]["head"] == ("conv", "head", "relu", "pool")


def test_a_model_without_skew_is_refused(cluster):
    for message in cluster("native", 2).run(placement_functions.refused, "ids"):
        assert "gains nothing" in message and "HybridStrategy" in message
