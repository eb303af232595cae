"""The workloads of `benchmarks/`, and that peers train the same models."""

import argparse
import os
import sys

import _network
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.conftest import engines

_BENCHMARKS = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "benchmarks"
)
# One before, those in which a network adapts, and one that is timed.
_STEPS = 1 + _network.SETTLE + 1
_SMALL = {
    "recommender": "--tables 3 --smallest 5 --largest 40 --dim 4 --hot 2",
    "lm": "--vocabulary 30 --dim 4 --units 4 --time 3 --sampled 8",
    "nmt": "--vocabulary 30 --dim 4 --units 4 --time 3 --sampled 8",
}


class _Softmax(keras.layers.Dense):
    """Of all classes: samples differ from process to process."""

    def __init__(self, num_classes, num_sampled):
        super().__init__(num_classes)

    def loss(self):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _common():
    if _BENCHMARKS not in sys.path:
        sys.path.append(_BENCHMARKS)
    from workloads import _common

    return _common


def _made(name, kit, size, options=""):
    """A small workload, its held-out examples and its arguments."""
    common = _common()
    options = f"{_SMALL[name]} --batch 4 --warm-up 1 {options}".split()
    options += ["--steps", "1"]
    module = common.module(name)
    args = common.parse(module, argparse.ArgumentParser(), options)
    return *common.made(module, kit, args, size), args


def train_both(cases):
    """Weights that ours and Horovod's own way come to, of each case.

    Args:
        cases: List of `(name, optimizer, dense, fp16)`.
    """
    common = _common()
    from peers import _stock
    from peers import horovod as peer

    strategy = ks.HybridStrategy(architecture="hybrid")

    def start(kit, name, optimizer):
        kit = kit._replace(softmax=_Softmax)
        workload, _, args = _made(name, kit, strategy.size)
        workload = workload._replace(optimizer=keras.optimizers.get(optimizer))
        workload.optimizer.learning_rate = 0.1
        generator = np.random.default_rng(3)
        weights = workload.model.get_weights()
        workload.model.set_weights(
            [generator.normal(size=w.shape) * 0.5 for w in weights]
        )
        return workload, args

    ours = {}
    for name, optimizer in dict.fromkeys(case[:2] for case in cases):
        kit = common.module("_training").KIT
        workload, args = start(kit, name, optimizer)
        with strategy.scope():
            workload.model.compile(
                workload.optimizer, workload.loss, run_eagerly=True
            )
        common.fit(
            workload,
            None,
            args,
            strategy.size,
            _network.Window(),
            strategy.collectives.barrier,
        )
        ours[name, optimizer] = workload.model.get_weights()
    theirs = []
    for name, optimizer, dense, fp16 in cases:
        workload, args = start(_stock.KIT, name, optimizer)
        trainer = peer.Trainer(workload, args.batch, dense, fp16)
        trainer.train(_STEPS)
        theirs.append(workload.model.get_weights())
    return [
        (ours[case[:2]], weights)
        for case, weights in zip(cases, theirs, strict=True)
    ]


# A peer of the benchmarks: nothing of the library hangs on it.
@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines("horovod"))
def test_horovods_own_way_trains_the_same(cluster, engine):
    cases = [
        ("recommender", "adagrad", True, False),
        ("recommender", "sgd", False, False),
        ("lm", "sgd", True, True),
        ("recommender", "adagrad", False, False),
    ]
    for results in cluster(engine, 2).run(train_both, cases):
        dense, sparse, rounded, one_by_one = (
            max(np.abs(a - b).max() for a, b in zip(*pair, strict=True))
            for pair in results
        )
        assert dense < 1e-5
        # Sums in another order, of which the gradients here are large.
        assert sparse < 1e-3
        assert 1e-6 < rounded < 1e-2
        # Keras takes rows that are there twice one by one: see the peer.
        assert one_by_one > 1e-3


@pytest.mark.parametrize("name", list(_SMALL))
def test_stock_layers_make_as_many_parameters(name):
    common = _common()
    from peers import _stock

    sizes = []
    for kit in (common.module("_training").KIT, _stock.KIT):
        workload, _, _ = _made(name, kit, 1)
        variables = workload.model.trainable_variables
        sizes.append([int(np.prod(v.shape)) for v in variables])
        assert workload.num_parameters() == sum(sizes[-1])
    assert sizes[0] == sizes[1]


def test_stock_sampled_softmax_evaluates_all_classes():
    _common()
    from peers import _stock

    softmax = _stock.KIT.softmax(9, 9)
    hidden = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    labels = np.arange(6).reshape(2, 3)
    logits = softmax(hidden)
    full = softmax.loss()(labels, logits)
    kernel, bias = softmax.get_weights()
    np.testing.assert_allclose(logits, hidden @ kernel.T + bias, atol=1e-6)
    log_sum = np.log(np.exp(logits).sum(-1))
    own = np.take_along_axis(logits.numpy(), labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(full, log_sum - own, atol=1e-5)
    # All of nine classes are in the sample; corrections are small.
    sampled = softmax.loss()(labels, softmax(hidden, training=True))
    assert sampled.shape == full.shape
    np.testing.assert_allclose(sampled, full, atol=2.0)


def test_what_can_be_learnt_of_the_text_is_known():
    common = _common()
    lm = common.module("lm")
    for follows in (0.0, 0.7):
        args = argparse.Namespace(vocabulary=20, follows=follows, target=None)
        generator = np.random.default_rng(1)
        source = lm.Source(args, generator)
        text = source.text((200, 2_001), generator)
        before, after = text[:, :-1], text[:, 1:]
        # What the counted pairs have: H(pair) - H(word).
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
    common = _common()
    from peers import _stock

    for target, steps in ((100.0, 2), (0.0, 6)):
        workload, held_out, args = _made(
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


def test_sizes_are_defaults():
    common = _common()
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


@pytest.mark.parametrize("name", list(_SMALL))
def test_the_large_one_is_larger(name):
    common = _common()
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


def clip_both():
    """Weights of training with the norm found by owners, and by workers."""
    _common()
    from workloads import _training

    weights = []
    for way in ("owners", "workers", None):
        keras.utils.set_random_seed(3)
        workload, _, args = _made("lm", _training.KIT, 2)
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


def test_a_search_that_finds_nothing_new_is_a_miss():
    _common()
    import partition_search

    shapes = {name: {"best": 2} for name in partition_search.SHAPES}
    assert list(partition_search.missed_together(shapes))
    shapes["wide"]["best"] = 32
    assert not list(partition_search.missed_together(shapes))


def test_examples_begin_again():
    common = _common()
    x, y = np.arange(5), np.arange(5) * 10
    found = common.examples(x, y, 4, 3)
    np.testing.assert_array_equal(found, [[4, 0, 1], [40, 0, 10]])
    batches = list(common.dataset((x, x), y, 3, 3))
    np.testing.assert_array_equal(batches[1][0][1], [3, 4, 0])
    np.testing.assert_array_equal(batches[2][1], [10, 20, 30])
    assert tf.data.experimental.cardinality(common.dataset(x, y, 3, 3)) == len(
        batches
    )
