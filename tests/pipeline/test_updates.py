"""Embeddings in a stage are updated by rows, as in one process."""

import functools
import re

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests import pipeline_functions
from tests.cluster import ClusterError
from tests.conftest import engines
from tests.oracles import DenseGradients
from tests.pipeline import row_functions, test_in_flight, test_steps

_NUM_EXAMPLES = 22
_CUTS = ["rows"]


@pytest.mark.parametrize(
    ("engine", "optimizer", "schedule", "replicas"),
    [
        ("native", "decayed", "1f1b", 1),
        *(
            pytest.param("native", *each, marks=pytest.mark.all_cells)
            for each in [
                ("sgd", "gpipe", 1),
                ("momentum", "gpipe", 1),
                ("clipped", "1f1b", 1),
                ("scaled", "1f1b", 1),
                ("adam", "1f1b", 2),
            ]
        ),
        *(
            pytest.param("horovod", *each, marks=engines("horovod")[0].marks)
            for each in [("adam", "1f1b", 1)]
        ),
    ],
)
def test_as_one_process(cluster, engine, optimizer, schedule, replicas):
    cluster = cluster(engine, 2 * replicas, has_groups=replicas > 1)
    ranks = cluster.run(
        *(row_functions.train, optimizer, _CUTS, schedule),
        *(_NUM_EXAMPLES, replicas),
    )
    test_steps.check(ranks, "tables", optimizer, _NUM_EXAMPLES, replicas)


_ROWS_LINE = "rows line"
_CUT_BEHIND = ["dense_0", "dense_1"]
_USUAL = [
    ("adam", "vanilla", "paper"),
    ("momentum", "stash", "paper"),
    ("sgd", "spectrain", "paper"),
    ("adam", "spectrain", "paper"),
]


@pytest.mark.parametrize(
    ("engine", "cases", "num_stages", "replicas"),
    [
        ("native", _USUAL, 3, 1),
        pytest.param(
            "native",
            [
                each
                for rule in ("sgd", "momentum", "adam")
                for schedule in ("vanilla", "stash", "spectrain")
                if (each := (rule, schedule, "paper")) not in _USUAL
            ]
            + [("momentum", "spectrain", "sequential")],
            *(3, 1),
            marks=pytest.mark.all_cells,
        ),
        pytest.param(*("native", _USUAL, 2, 2), marks=pytest.mark.all_cells),
        pytest.param(
            *("horovod", [("momentum", "stash", "paper")], 2, 1),
            marks=engines("horovod")[0].marks,
        ),
    ],
)
def test_without_a_flush(cluster, engine, cases, num_stages, replicas):
    """As the oracle does, which updates whole tables."""
    # The last mini-batch has one example.
    num_examples = 57
    cuts = _CUT_BEHIND[: num_stages - 1]
    has_groups = num_stages > 2 or replicas > 1
    ranks = cluster(engine, num_stages * replicas, has_groups=has_groups).run(
        *(row_functions.train_in_flight, cases, cuts, num_examples),
        *(_ROWS_LINE, replicas),
    )
    for number, case in enumerate(cases):
        test_in_flight.check(
            *([each[number] for each in ranks], *case, cuts),
            *(num_examples, _ROWS_LINE),
        )


@pytest.mark.parametrize(
    "case",
    [
        ("momentum", "stash", "paper"),
        pytest.param(
            ("sgd", "spectrain", "paper"), marks=pytest.mark.all_cells
        ),
    ],
)
def test_a_table_that_is_also_read_as_a_whole(cluster, case):
    rule, schedule, target = case
    num_examples, model = 25, "tied line"
    ranks = cluster("native", 2).run(
        pipeline_functions.train_in_flight,
        *(rule, ["scores"], schedule, target, num_examples, model),
    )
    test_in_flight.check(ranks, *case, ["scores"], num_examples, model)


def test_a_stage_without_a_loss(cluster):
    """Its averages are its weights, which stay."""
    for stock, found in cluster("native", 2).run(row_functions.fit_one_loss):
        for expected, weights in zip(stock, found, strict=True):
            np.testing.assert_allclose(weights, expected, 1e-5, 1e-6)


def test_a_stage_without_a_loss_knows_no_scale(cluster):
    with pytest.raises(ClusterError, match="each stage needs gradients"):
        cluster("native", 2).run(row_functions.fit_one_loss_scaled)


# Of one stage, in this process.


def _fit(network, **options):
    x, y = pipeline_functions.data("tables", _NUM_EXAMPLES)
    network.fit(
        *(x, y, row_functions.BATCH_SIZE),
        **{"epochs": 3, "shuffle": False, "verbose": 0, **options},
    )


def _in_stages(optimizer, network=None):
    if network is None:
        strategy = ks.PipelineStrategy("gpipe", num_micro_batches=1)
    else:
        strategy = network.distribute_strategy
    with strategy.scope():
        network = network or pipeline_functions.made("tables")
        network.compile(optimizer, ["mse", "mae"])
    return network


def _rules():
    yield keras.optimizers.Adam(0.01)
    yield keras.optimizers.SGD(0.1, momentum=0.9)


def test_compiled_again_with_another_optimizer():
    network, stock = None, pipeline_functions.made("tables")
    for own, other in zip(_rules(), _rules(), strict=True):
        network = _in_stages(own, network)
        _fit(network)
        row_functions.check_rows(network)
        stock.compile(DenseGradients(other), ["mse", "mae"], run_eagerly=True)
        _fit(stock)
    for value, expected in zip(
        network.get_weights(), stock.get_weights(), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_in_stages", [True, False])
def test_compiled_again_with_a_new_loss_scaling(is_in_stages):
    """As Keras's `compile` makes under the policy "mixed_float16"."""
    strategy = ks.HybridStrategy()
    if is_in_stages:
        strategy = ks.PipelineStrategy("gpipe", num_micro_batches=1)
    rule, stock_rule = (keras.optimizers.SGD(0.1, momentum=0.9) for _ in "12")
    with strategy.scope():
        network = pipeline_functions.made("tables")
    stock = pipeline_functions.made("tables")
    stock.compile(DenseGradients(stock_rule), ["mse", "mae"], run_eagerly=True)
    for num_epochs in (2, 1):
        scaling = keras.optimizers.LossScaleOptimizer(rule, initial_scale=8.0)
        with strategy.scope():
            network.compile(scaling, ["mse", "mae"])
        _fit(network, epochs=num_epochs)
        _fit(stock, epochs=num_epochs)
    for value, expected in zip(
        network.get_weights(), stock.get_weights(), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


_STRATEGIES = {
    **{
        name: functools.partial(ks.PipelineStrategy, name)
        for name in ("1f1b", "gpipe", "vanilla", "stash", "spectrain")
    },
    "placement": ks.LayerPlacementStrategy,
}


@pytest.mark.parametrize(
    "name",
    [
        "1f1b",
        "spectrain",
        *(
            pytest.param(name, marks=pytest.mark.all_cells)
            for name in ("gpipe", "vanilla", "stash", "placement")
        ),
    ],
)
def test_trainable_that_changes_after_compile(name):
    """An error until the model is compiled again, then as in stock Keras."""
    network = pipeline_functions.made("dense")
    first, *_, last = (
        each for each in network.layers if each.trainable_variables
    )
    x, y = pipeline_functions.data("dense", 8)
    options = {"batch_size": 8, "verbose": 0}
    last.trainable = False
    with _STRATEGIES[name]().scope():
        network.compile(keras.optimizers.SGD(0.1), "mse")
    before = network.get_weights()
    first.trainable, last.trainable = False, True
    for train in (
        lambda: network.fit(x, y, **options),
        lambda: network.train_on_batch(x, y),
    ):
        with pytest.raises(ValueError) as raised:
            train()
        assert re.search(
            r"frozen weights \['dense_0/kernel', 'dense_0/bias'\], newly "
            r"trained weights \['out/kernel', .*Compile again: `with",
            str(raised.value),
        )
    for value, expected in zip(network.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)
    with network.distribute_strategy.scope():
        network.compile(keras.optimizers.SGD(0.1), "mse")
    network.fit(x, y, **options)
    stock = pipeline_functions.made("dense")
    stock.get_layer("dense_0").trainable = False
    stock.compile(keras.optimizers.SGD(0.1), "mse")
    stock.fit(x, y, **options)
    for value, expected in zip(
        network.get_weights(), stock.get_weights(), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)
    # The step of `fit` is not traced again.
    first.trainable = True
    with pytest.raises(ValueError, match="trained weights.*dense_0/kernel"):
        network.fit(x, y, **options)


def test_averages_of_rows_at_the_end_of_a_training():
    rule, stock_rule = (keras.optimizers.SGD(0.1, use_ema=True) for _ in "12")
    network = _in_stages(rule)
    stock = pipeline_functions.made("tables")
    stock.compile(DenseGradients(stock_rule), ["mse", "mae"], run_eagerly=True)
    for each in (network, stock):
        _fit(each)
    for value, expected in zip(
        network.get_weights(), stock.get_weights(), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


def test_resumed_to_the_bit(tmp_path):
    """From a checkpoint, whose rows are up to date, and from a saved model."""

    def options(name):
        return {
            "callbacks": [
                ks.callbacks.ShardedCheckpoint(str(tmp_path / name), 4)
            ]
        }

    whole = _in_stages(next(_rules()))
    _fit(whole, **options("whole"))
    part = _in_stages(next(_rules()))
    _fit(part, **options("part"), epochs=2)
    part.save(tmp_path / "model.keras")
    again = _in_stages(next(_rules()))
    _fit(again, **options("part"))
    with again.distribute_strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    _fit(loaded, epochs=1)
    row_functions.check_rows(loaded)
    for resumed, atol in ((again, 0), (loaded, 1e-7)):
        for value, expected in zip(
            [*resumed.get_weights(), *_slots(resumed)],
            [*whole.get_weights(), *_slots(whole)],
            strict=True,
        ):
            np.testing.assert_allclose(value, expected, rtol=0, atol=atol)


def _slots(network):
    return [variable.numpy() for variable in network.optimizer.variables]


def test_slots_that_begin_as_weights():
    """As these are at the first step, not in `compile`."""
    kind = getattr(keras.optimizers, "ScheduleFreeAdamW", None)
    if kind is None:
        pytest.skip("this Keras has no ScheduleFreeAdamW")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with ks.PipelineStrategy("1f1b").scope():
        model.compile(kind(1e-6), "mse")
    model.set_weights([np.full((2, 1), 0.3), np.full(1, 0.3)])
    for _ in range(2):
        model.train_on_batch(np.ones((4, 2)), np.ones((4, 1)))
    for value in model.get_weights():
        np.testing.assert_allclose(value, 0.3, atol=1e-4)
