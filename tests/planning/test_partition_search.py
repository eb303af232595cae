"""The search for a number of partitions: order of samples, fit and choice."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import keras_sparsity as ks
from keras_sparsity.exchange.layout import Layout
from keras_sparsity.planning.partition_search import busiest_rows

# How much slower than the best a choice may be.
TOLERANCE = 1.03


def searched(curve, size, start=1, error=0.0, **options):
    """A sampler at the end of a search in which `P` takes `curve(P)`."""
    sampler = ks.planning.PartitionSampler(size, start, **options)
    while (count := sampler.proposal()) is not None:
        seconds = curve(count)
        sampler.record(count, seconds, error * seconds)
    return sampler


def sampled(sampler):
    return [sample.num_partitions for sample in sampler.samples]


def best_in_range(curve, counts):
    return min(map(curve, range(min(counts), max(counts) + 1)))


def by_owners(theta, size):
    """Seconds of an iteration, by the load of the busiest of `size` owners."""

    def seconds(count):
        load = max(np.bincount(np.arange(count) % size)) / count
        return theta[0] + theta[1] * load + theta[2] * count

    return seconds


def by_pieces(theta):
    """Seconds of an iteration in which owners gain from small partitions."""
    return lambda count: theta[0] + theta[1] / count + theta[2] * count


def rising(count):
    return 1.0 + count


def falling(count):
    return 1 / count


# Order of samples.

ORDERS = {
    # Name: curve, start, options, the first samples.
    "rises at once": (rising, 1, {}, [1, 2, 4]),
    "rises at once, from 4": (rising, 4, {}, [4, 8, 16, 2, 1]),
    "falls for seven samples": (falling, 1, {}, [1, 2, 4, 8, 16, 32, 64]),
    "falls for max_samples": (falling, 3, {"max_samples": 3}, [3, 6, 12]),
    "halves from the start until it rises": (
        lambda count: abs(count - 8) + 1,
        8,
        {},
        [8, 16, 32, 4, 2],
    ),
    "goes on behind one slower sample, which may be chance": (
        {1: 1.0, 2: 1.3, 4: 0.6, 8: 0.9, 16: 1.1}.get,
        1,
        {},
        [1, 2, 4, 8, 16],
    ),
    "goes on behind slightly slower samples": (
        {1: 1.0, 2: 1.04, 4: 1.04, 8: 0.6, 16: 0.9, 32: 1.1}.get,
        1,
        {},
        [1, 2, 4, 8, 16, 32],
    ),
    "doubles to what is allowed": (
        falling,
        1,
        {"allowed": lambda count: count < 9},
        [1, 2, 4, 8],
    ),
    "halves to what is allowed": (
        rising,
        8,
        {"allowed": lambda count: count > 3},
        [8, 16, 32, 4],
    ),
}


@pytest.mark.parametrize(
    ("curve", "start", "options", "expected"), ORDERS.values(), ids=ORDERS
)
def test_order_of_samples(curve, start, options, expected):
    sampler = searched(curve, size=1024, start=start, **options)
    first, rest = np.split(sampled(sampler), [len(expected)])
    assert first.tolist() == expected
    # The fit's best may follow, inside of the range.
    assert all(min(expected) < count < max(expected) for count in rest)


# Fit.


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12])
def test_fit_of_the_owners_load(size):
    """The load is least where every owner has as many partitions."""
    choice = searched(by_owners((1.0, 4.0, 0.004), size), size).choice()
    assert choice.num_partitions == size
    np.testing.assert_allclose(
        choice.theta, [1.0, 4.0, 0.004, 0.0], rtol=1e-6, atol=1e-9
    )


def test_fit_of_owners_that_gain_from_small_partitions():
    curve = by_pieces((1.0, 30.0, 0.05))
    choice = searched(curve, size=2).choice()
    np.testing.assert_allclose(
        choice.theta, [1.0, 0.0, 0.05, 30.0], rtol=1e-6, atol=1e-9
    )
    assert choice.num_partitions == 24  # sqrt(30 / 0.05) = 24.5
    assert choice.predicted_seconds(10) == pytest.approx(curve(10))


@pytest.mark.parametrize("num_rows", [1, 5, 7, 24, 100])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_busiest_owner_is_the_layouts(num_rows, size):
    for count in range(1, 14):
        layout = Layout(num_rows, count, tuple(range(size)))
        expected = max(map(layout.num_stored_rows, layout.owners))
        assert busiest_rows(num_rows, count, size) == expected, count


# Choice.


@pytest.mark.parametrize(
    ("error", "chosen"),
    # Of those sampled, 8 is the fastest; the fit expects 3.4 % less of 3.
    [(0.0, 3), (0.03, 3), (0.04, 8)],
)
def test_fit_wins_over_samples_by_more_than_their_error(error, chosen):
    curve = by_owners((1.0, 0.3, 0.005), 3)
    sampler = ks.planning.PartitionSampler(size=3)
    for count in (1, 2, 4, 8, 16):
        sampler.record(count, curve(count), error * curve(count))
    assert sampler.choice().num_partitions == chosen


# The same ones each time: of 170,000 random ones 4 were off, by up to 3.4 %.
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(
    size=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 48]),
    start=st.integers(1, 16),
    parallel=st.floats(0.01, 100),
    overhead=st.floats(1e-4, 1),
    seed=st.integers(0, 2**32 - 1),
)
# Samples 1, 3 and 7 do not tell what is between them.
@hypothesis.example(size=2, start=14, parallel=2.0, overhead=0.75, seed=0)
def test_choice_is_near_the_best(size, start, parallel, overhead, seed):
    curve = by_owners((1.0, parallel, overhead), size)
    noise = np.random.default_rng(seed)
    sampler = searched(
        lambda count: curve(count) * noise.uniform(0.995, 1.005),
        size,
        start,
        error=0.003,
    )
    counts = sampled(sampler)
    assert len(counts) <= 7
    chosen = sampler.choice().num_partitions
    assert min(counts) <= chosen <= max(counts)
    assert curve(chosen) <= TOLERANCE * best_in_range(curve, counts)


@pytest.mark.parametrize(
    ("noise", "share_of_good"), [(0.01, 0.98), (0.02, 0.93)]
)
def test_choice_under_normal_noise(noise, share_of_good):
    """300 searches on curves of both kinds; some samples are far off."""
    rng = np.random.default_rng(5)
    good = []
    for index in range(300):
        size = int(rng.choice([2, 4, 6, 16]))
        theta = [1.0, *10 ** rng.uniform([-0.5, -3], [1.5, -0.5])]
        curve = by_pieces(theta) if index % 2 else by_owners(theta, size)
        sampler = searched(
            lambda count, curve=curve: curve(count) * rng.normal(1.0, noise),
            size,
            error=noise,
        )
        best = best_in_range(curve, sampled(sampler))
        chosen = sampler.choice().num_partitions
        good.append(curve(chosen) <= TOLERANCE * best)
    assert np.mean(good) >= share_of_good


def test_choice_is_explained_in_one_line():
    choice = searched(by_owners((0.01, 0.1, 0.001), 4), 4).choice()
    text = choice.explained()
    assert "\n" not in text
    assert text.startswith("4 partitions: the fastest sample, 39 ms")
    assert "fit 10 + 100 ceil(P/4)/P + 1 P ms, off by 0.0%" in text
