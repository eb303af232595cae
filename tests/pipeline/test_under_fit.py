"""Two stages do under `fit` as one process of stock Keras does."""

import functools
import itertools

import numpy as np
import pytest

from tests import pipeline_functions
from tests.cluster import ClusterError
from tests.conftest import covering
from tests.pipeline import fit_functions

_WITHOUT_A_FLUSH = ["vanilla", "stash", "spectrain"]


@functools.cache
def _expected(name):
    return fit_functions.run(name)


def _check(ranks, name, rtol=1e-4, atol=1e-5):
    arrays, history = _expected(name)
    for found, logs in ranks:
        assert logs.keys() == history.keys()
        for key, values in history.items():
            np.testing.assert_allclose(logs[key], values, rtol=max(rtol, 1e-4))
        for value, expected in zip(found, arrays, strict=True):
            np.testing.assert_allclose(value, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("name", "schedule", "num_micro_batches"),
    [
        ("sample_weights", "1f1b", 2),
        *(
            pytest.param(*case, marks=pytest.mark.all_cells)
            for case in [
                ("class_weights", "gpipe", 4),  # Keras makes the above of them
                ("learning_rates", "1f1b", 2),
                ("averages", "1f1b", 2),
                ("more_optimizers", "1f1b", 1),
            ]
        ),
        pytest.param("swaps", "1f1b", 2, marks=pytest.mark.smoke),
        ("single_batches", "gpipe", 2),
        pytest.param("early_outputs", "1f1b", 2, marks=pytest.mark.all_cells),
        # One, as their statistics are those of a micro-batch.
        ("lengths", "1f1b", 1),
        ("shared_statistics", "1f1b", 1),
        ("optimizers", "1f1b", 1),
    ],
)
def test_schedules_with_a_flush(cluster, name, schedule, num_micro_batches):
    ranks = cluster("native", 2).run(
        fit_functions.run, name, schedule, num_micro_batches
    )
    _check(ranks, name)


@pytest.mark.parametrize(
    "name",
    [
        "averages",
        *(
            pytest.param(name, marks=pytest.mark.all_cells)
            for name in [
                *("optimizers", "more_optimizers"),
                *("learning_rates", "single_batches"),
            ]
        ),
    ],
)
def test_layers_on_one_worker(cluster, name):
    """Two workers, and one that has the last layer."""
    ranks = cluster("native", 3).run(fit_functions.run, name, "placed")
    _check(ranks, name)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("one_batch_an_epoch", "stash"),
        ("recurrent_states", "stash"),
        ("early_outputs", "spectrain"),
        *(
            pytest.param(*case, marks=pytest.mark.all_cells)
            for case in [
                ("one_batch_an_epoch", "vanilla"),
                ("one_batch_an_epoch", "spectrain"),
                ("recurrent_states", "spectrain"),
            ]
        ),
    ],
)
def test_schedules_without_a_flush(cluster, name, schedule):
    ranks = cluster("native", 2).run(fit_functions.run, name, schedule, None)
    _check(ranks, name)


@pytest.mark.smoke
def test_layers_computed_again_draw_the_same_noise(cluster):
    """And each step other noise; `training` reaches the layers of layers."""
    ranks = cluster("native", 2).run(fit_functions.run, "noise", "stash")
    _check(ranks, "noise")


@pytest.mark.parametrize("schedule", ["gpipe", *_WITHOUT_A_FLUSH])
def test_weights_that_a_layer_assigns(schedule):
    """As one process, or refused: passes compute with copies."""
    if schedule == "gpipe":
        found = fit_functions.run("spectral_normalization", schedule, 1)
        _check([found], "spectral_normalization")
        return
    with pytest.raises(ValueError, match="assigns '.*kernel'.*or .gpipe"):
        fit_functions.run("spectral_normalization", schedule)


@pytest.mark.parametrize(
    ("name", "operation"),
    [("normal", "StandardNormal"), ("generator", "RngReadAndSkip")],
)
def test_draws_that_cannot_be_repeated_are_refused(cluster, name, operation):
    with pytest.raises(ClusterError, match=f"{operation}.*Use `keras.random`"):
        cluster("native", 2).run(fit_functions.tensorflow_noise, name)


@pytest.mark.parametrize(
    ("engine", "schedule"),
    covering(
        itertools.product(("native", "horovod"), ("1f1b", "stash")),
        [],  # with messages ahead, in `test_messages_ahead.py`
    ),
)
def test_a_dataset_of_unknown_length(cluster, engine, schedule):
    """The step that finds its end sends and receives nothing."""
    known, unknown = (
        cluster(engine, 2).run(
            fit_functions.unknown_number_of_batches, schedule, is_known
        )
        for is_known in (True, False)
    )
    trainings = [
        pair
        for of_rank in zip(known, unknown, strict=True)
        for pair in zip(*of_rank, strict=True)
    ]
    assert len(trainings) == 4
    for (weights, history), (others, other_history) in trainings:
        for name, values in history.items():
            np.testing.assert_allclose(values, other_history[name], rtol=1e-5)
        for value, expected in zip(weights, others, strict=True):
            # They are traced apart, and sums are taken in another order.
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5)


def test_fewer_examples_than_micro_batches(cluster):
    """A dataset's batches may be smaller than `num_micro_batches`."""
    weights, losses, _ = pipeline_functions.trained("branches", "momentum", 2)
    for of_rank in cluster("native", 2).run(
        fit_functions.small_batches, ["1f1b", "stash"]
    ):
        for found, of_epochs in of_rank:
            np.testing.assert_allclose(of_epochs, losses, rtol=1e-4)
            for value, expected in zip(found, weights.values(), strict=True):
                np.testing.assert_allclose(
                    value, expected, rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize(
    "schedule", [pytest.param("1f1b", marks=pytest.mark.all_cells), "spectrain"]
)
def test_mixed_precision(cluster, schedule):
    """Rounds as one process does: the batch is not divided."""
    ranks = cluster("native", 2).run(fit_functions.run, "bfloat16", schedule)
    _check(ranks, "bfloat16", rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("schedule", "last"),
    [
        pytest.param("1f1b", 2, marks=pytest.mark.all_cells),
        ("spectrain", 3),
        ("placed", 2),
    ],
)
def test_nan_ends_all_ranks(cluster, schedule, last):
    """After the batch of NaN; without a flush, whose logs come a batch late."""
    for seen, num_epochs in cluster("native", 2).run(
        fit_functions.ended_by_nan, schedule
    ):
        assert seen == list(range(last + 1))
        assert num_epochs == 1


@pytest.mark.parametrize(
    "schedule", [pytest.param("1f1b", marks=pytest.mark.all_cells), "vanilla"]
)
def test_the_best_batch_is_one_of_known_logs(cluster, schedule, tmp_path):
    for seen, best in cluster("native", 2).run(
        fit_functions.best_batch, schedule, str(tmp_path)
    ):
        num_unknown = 0 if schedule == "1f1b" else 1
        unknown, known = seen[:num_unknown], seen[num_unknown:]
        assert unknown == [0.0] * num_unknown
        assert best == min(known) > 0.1
        assert (tmp_path / f"{best:.2f}.keras").exists()
    assert not (tmp_path / "0.00.keras").exists()


@pytest.mark.parametrize(
    "schedule", [pytest.param("1f1b", marks=pytest.mark.all_cells), "spectrain"]
)
def test_eager_steps_are_those_of_traced_ones(cluster, schedule):
    """No message is waited for before what it depends on is sent."""
    for found, expected in cluster("native", 2).run(
        fit_functions.eager, schedule, timeout=60
    ):
        for value, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-6)
