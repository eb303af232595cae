"""Peers train the same models as the library."""

import _network
import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests.benchmarks.small import SMALL, import_common, make_small
from tests.conftest import engines

# One before, those in which a network adapts, and one that is timed.
_STEPS = 1 + _network.SETTLE + 1


class _Softmax(keras.layers.Dense):
    """Of all classes: samples differ from process to process."""

    def __init__(self, num_classes, num_sampled):
        super().__init__(num_classes)

    def loss(self):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train_both(cases):
    """Weights that ours and Horovod's own way come to, of each case.

    Args:
        cases: List of `(name, optimizer, dense, fp16)`.
    """
    common = import_common()
    from peers import _stock
    from peers import horovod_tape as peer

    strategy = ks.HybridStrategy(architecture="hybrid")

    def start(kit, name, optimizer):
        kit = kit._replace(softmax=_Softmax)
        workload, _, args = make_small(name, kit, strategy.size)
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


@pytest.mark.parametrize("name", list(SMALL))
def test_stock_layers_make_as_many_parameters(name):
    common = import_common()
    from peers import _stock

    sizes = []
    for kit in (common.module("_training").KIT, _stock.KIT):
        workload, _, _ = make_small(name, kit, 1)
        variables = workload.model.trainable_variables
        sizes.append([int(np.prod(v.shape)) for v in variables])
        assert workload.num_parameters() == sum(sizes[-1])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("is_of_rows", [False, True])
def test_sampled_softmax_evaluates_all_classes(is_of_rows):
    common = import_common()
    from peers import _stock

    kit = common.module("_asynchronous").KIT if is_of_rows else _stock.KIT
    softmax = kit.softmax(9, 9)
    hidden = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    labels = np.arange(6).reshape(2, 3)
    logits = softmax(hidden)
    full = softmax.loss()(labels, logits)
    kernel, *bias = softmax.get_weights()
    if is_of_rows:  # a class's bias is the last number of its row
        kernel, *bias = np.split(kernel, [4], axis=1)
    bias = bias[0].reshape(-1)
    np.testing.assert_allclose(logits, hidden @ kernel.T + bias, atol=1e-6)
    log_sum = np.log(np.exp(logits).sum(-1))
    own = np.take_along_axis(logits.numpy(), labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(full, log_sum - own, atol=1e-5)
    # All of nine classes are in the sample; corrections are small.
    sampled = softmax.loss()(labels, softmax(hidden, training=True))
    assert sampled.shape == full.shape
    np.testing.assert_allclose(sampled, full, atol=2.0)
