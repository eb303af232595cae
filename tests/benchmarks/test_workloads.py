"""The workloads of `benchmarks/`."""

import argparse
import time
import types

import _network
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.benchmarks.small import SMALL, import_common, make_small


def test_the_least_loss_of_the_text_is_its_entropy():
    common = import_common()
    lm = common.module("lm")
    for follows in (0.0, 0.7):
        args = argparse.Namespace(vocabulary=20, follows=follows, target=None)
        generator = np.random.default_rng(1)
        source = lm.Source(args, generator)
        text = source.text((200, 2_001), generator)
        before, after = text[:, :-1], text[:, 1:]
        # The entropy of the counted pairs: H(pair) - H(word).
        pairs = np.zeros((20, 20))
        np.add.at(pairs, (before.ravel(), after.ravel()), 1 / before.size)
        some = pairs[pairs > 0]
        words = pairs.sum(1)
        words = words[words > 0]
        entropy = (words * np.log(words)).sum() - (some * np.log(some)).sum()
        assert source.least_loss(before, after) == pytest.approx(
            entropy, rel=0.005
        )


def test_training_ends_at_the_target():
    common = import_common()
    from peers import _stock

    for target, steps in ((100.0, 2), (0.0, 6)):
        workload, held_out, args = make_small(
            "lm",
            _stock.KIT,
            1,
            f"--target {target} --every 2 --most-steps 6 --held-out 64",
        )
        assert len(held_out[1]) == 64 and len(workload.y) == 4 * 6
        workload.model.compile(workload.optimizer, workload.loss)
        figures = common.fit(
            workload, held_out, args, 1, _network.Window(), lambda name: None
        )
        found = figures["to_target"]
        assert found["is_reached"] == (target == 100)
        assert found["steps"] == steps
        assert len(found["curve"]) == steps // 2
        logits = workload.model(held_out[0])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        assert figures["loss"] == pytest.approx(
            float(loss(held_out[1], logits)), abs=1e-4
        )


def test_the_least_loss_of_labels_is_their_entropy():
    recommender = import_common().module("recommender")
    generator = np.random.default_rng(1)
    source = recommender.Source([3, 5], generator)
    x = None, generator.integers(0, 3, (50_000, 2, 1))
    labels = source.labels(x, generator)[:, 0]
    kind = x[1][:, 0, 0] * 3 + x[1][:, 1, 0]
    share = (np.bincount(kind, labels) / np.bincount(kind))[kind]
    entropy = -np.log(np.where(labels, share, 1 - share)).mean()
    least = source.least_loss(x, labels[:, np.newaxis])
    assert 0.3 < least == pytest.approx(entropy, rel=0.005)


@pytest.mark.parametrize(
    "name, target", [("lm", None), ("lm", 100.0), ("recommender", 0.0)]
)
def test_asynchronous_workloads_are_measured(name, target):
    common = import_common()
    _asynchronous = common.module("_asynchronous")
    options = "--pause 0.001"
    if target is not None:
        options += f" --target {target} --every 2 --most-steps 6 --held-out 64"
    strategy = ks.HybridStrategy(synchronous=False)
    workload, held_out, args = make_small(
        name, _asynchronous.KIT, strategy.size, options
    )
    with strategy.scope():
        workload.model.compile(workload.optimizer, workload.loss)
    window = _network.Window()
    figures = _asynchronous.fit(
        workload, held_out, args, window, strategy.collectives
    )
    assert np.isfinite(figures["loss"])
    (measured,) = window.figures(1)["windows"]
    assert measured["seconds"] > 0
    num_pushes = sum(strategy.staleness.values())
    if target is None:
        assert measured["steps"] == 1 and num_pushes == 1 + _network.SETTLE + 3
    else:
        # All of an epoch but the very first one.
        assert num_pushes == measured["steps"] + (target == 100)
        steps = 2 if target else 6
        assert figures["to_target"]["steps"] == steps
        found = workload.model.evaluate(*held_out, verbose=0)
        assert figures["loss"] == pytest.approx(found, abs=1e-4)


def test_a_worker_without_a_batch_has_the_time_of_others():
    _asynchronous = import_common().module("_asynchronous")
    collectives = types.SimpleNamespace(
        gather_objects=lambda value, name: [value, ended],
        barrier=lambda name: None,
    )
    seconds = []
    curve = types.SimpleNamespace(
        add=lambda *point: seconds.append(point[:2]) or False
    )
    target = _asynchronous._Target(_network.Window(), 2, collectives, curve)
    for epoch in range(2):
        target.on_epoch_begin(epoch)
        ended = time.perf_counter() + 100
        target.on_epoch_end(epoch, {"val_loss": 1.0})
    assert [num_timed for _, num_timed in seconds] == [1, 2]
    assert all(found >= 100 for found, _ in seconds)


def test_sizes_are_defaults():
    common = import_common()
    lm = common.module("lm")

    def parse(options):
        return common.parse(lm, argparse.ArgumentParser(), options.split())

    assert parse("").vocabulary == 20_000
    large = parse("--size large --dim 8")
    assert (large.vocabulary, large.dim) == (200_000, 8)
    for wrong in (
        "--warm-up 0",
        "--steps 0",
        "--steps 2,3",
        "--target 1 --every 1",
        "--target 1 --every 9 --most-steps 8",
        "--target 1 --held-out 65",
    ):
        with pytest.raises(SystemExit):
            parse(wrong)


@pytest.mark.parametrize("name", list(SMALL))
def test_the_large_one_is_larger(name):
    common = import_common()
    from peers import _stock

    module, found = common.module(name), []
    for size in ("small", "large"):
        options = argparse.ArgumentParser()
        args = common.parse(module, options, ["--size", size])
        made = module.make(_stock.KIT, args, 4, np.random.default_rng(0))
        # Of a table, and of the output's kernel, which is one the other way.
        tables = [
            int(np.prod(v.shape))
            for v in made.model.trainable_variables
            if "embedding" in v.path or max(v.shape) >= 1_000
        ]
        found.append((made.num_parameters(), sum(tables), max(tables)))
    for small, large in zip(*found, strict=True):
        assert small < large


def test_the_subclassed_recommender_computes_the_same():
    common = import_common()
    from peers import _stock

    options = [*SMALL["recommender"].split(), "--batch", "4"]
    outputs = []
    for name in ("recommender", "subclassed_recommender"):
        module = common.module(name)
        args = common.parse(module, argparse.ArgumentParser(), options)
        made = module.make(_stock.KIT, args, 4, np.random.default_rng(0))
        made.model(made.x)  # builds it
        for variable in made.model.variables:
            draws = np.random.default_rng(variable.shape[0])
            variable.assign(draws.normal(size=variable.shape) / 4)
        outputs.append(keras.ops.convert_to_numpy(made.model(made.x)))
    np.testing.assert_allclose(*outputs, rtol=1e-6)
    assert np.ptp(outputs[0]) > 1e-3


def clip_both():
    """Weights of training with the norm found by owners, and by workers."""
    _training = import_common().module("_training")
    weights = []
    for way in ("owners", "workers", None):
        keras.utils.set_random_seed(3)
        workload, _, args = make_small("lm", _training.KIT, 2)
        strategy = ks.HybridStrategy(
            architecture="hybrid",
            transform_gradients=(
                _training.clip_by_workers if way == "workers" else None
            ),
        )
        if way == "owners":
            workload.optimizer.global_clipnorm = _training.NORM
        with strategy.scope():
            workload.model.compile(
                workload.optimizer, workload.loss, run_eagerly=True
            )
        workload.model.fit(workload.x, workload.y, 8, shuffle=False, verbose=0)
        weights.append(workload.model.get_weights())
    return weights


def test_owners_and_workers_clip_the_same(cluster):
    for owners, workers, neither in cluster("native", 2).run(clip_both):
        for mine, other in zip(owners, workers, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
        assert any(
            np.abs(mine - other).max() > 1e-3
            for mine, other in zip(owners, neither, strict=True)
        )


def test_examples_begin_again():
    common = import_common()
    x, y = np.arange(5), np.arange(5) * 10
    found = common.examples(x, y, 4, 3)
    np.testing.assert_array_equal(found, [[4, 0, 1], [40, 0, 10]])
    batches = list(common.dataset((x, x), y, 3, 3))
    np.testing.assert_array_equal(batches[1][0][1], [3, 4, 0])
    np.testing.assert_array_equal(batches[2][1], [10, 20, 30])
    assert tf.data.experimental.cardinality(common.dataset(x, y, 3, 3)) == len(
        batches
    )
