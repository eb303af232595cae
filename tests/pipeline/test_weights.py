"""Weights are on their stage's rank alone, and whole where they are saved."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests import pipeline_functions
from tests.conftest import covering
from tests.pipeline import weight_functions


def test_saved_models_are_whole(cluster, tmp_path):
    ranks = cluster("native", 2).run(pipeline_functions.save, str(tmp_path))
    weights, _, network = pipeline_functions.trained("dense", "adam", 22)
    for name in ("model", "plain_0", "plain_1"):
        loaded = keras.models.load_model(tmp_path / f"{name}.keras")
        _check(loaded.get_weights(), weights.values())
        assert len(loaded.optimizer.variables) == 2 + 2 * len(weights)
        _check(
            [v.numpy() for v in loaded.optimizer.variables],
            [v.numpy() for v in network.optimizer.variables],
        )
    again = pipeline_functions.made("dense")
    again.load_weights(tmp_path / "model.weights.h5")
    for rank, (own, of_other_cut, messages) in enumerate(ranks):
        for values in (own, of_other_cut):
            for value, saved in zip(values, again.get_weights(), strict=True):
                np.testing.assert_array_equal(value, saved)
        name = "out" if rank == 0 else "dense_0"
        by_program, by_part, by_layer = messages
        assert f"'{name}/kernel' are on rank {1 - rank}" in by_program
        assert "`model.get_weights()` gives all" in by_program
        assert "`ks.export(model)` a copy" in by_program
        assert by_part is None
        if rank == 0:
            assert by_layer is None
        else:
            assert "'rows/embeddings' are on rank 0" in by_layer
            assert "Cut it elsewhere (`stages`)" in by_layer


def test_models_made_in_the_scope_are_whole_nowhere(cluster):
    ranks = cluster("native", 2).run(pipeline_functions.made_in_scope)
    for before, own, is_same, trained in ranks:
        assert before == 0 and 0 < own < trained and is_same
    assert sum(own for _, own, *_ in ranks) == ranks[0][-1]


# Of the first stage one, all that calls use, or all.
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("names", "rule"),
    covering(
        [
            (names, rule)
            for names in (
                ("dense_0",),
                ("dense_0", "dense_1"),
                ("dense_0", "dense_1", "unused"),
            )
            for rule in weight_functions.RULES
        ],
        [(("dense_0", "dense_1", "unused"), "averages")],
    ),
)
def test_layers_are_frozen_between_trainings(cluster, tmp_path, names, rule):
    """The same optimizer goes on, and keeps the slots of what is frozen.

    Its rates depend on the number of steps, which a frozen stage counts, too,
    also if it has weights that no call uses.
    """
    ranks = cluster("native", 2).run(
        weight_functions.freeze, names, rule, str(tmp_path)
    )
    alone = weight_functions.frozen(names, rule)
    weights, slots = weight_functions.state_of(alone)
    for (found, found_slots), saved in ranks:
        _check(found, weights)
        _check(saved, weights)
        _check(found_slots, slots)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("schedule", ["1f1b", "spectrain"])
def test_weights_that_no_call_uses(schedule, tmp_path):
    """Of a model within the model; one has gradients of its regularizer."""
    networks = [_partly_used(), _partly_used()]
    strategy = ks.PipelineStrategy(schedule, num_micro_batches=1)
    for network, scope in zip(
        networks, [strategy.scope, contextlib.nullcontext], strict=True
    ):
        with scope():
            network.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        x = np.ones((8, 3))
        network.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
    network, stock = networks
    _check(network.get_weights(), stock.get_weights())
    assert stock.get_layer("inner").get_layer("regularized").losses
    network.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for own in (loaded, ks.export(network)):
        _check(own.get_weights(), stock.get_weights())
        _check(
            [variable.numpy() for variable in own.optimizer.variables],
            [variable.numpy() for variable in stock.optimizer.variables],
        )


def test_loss_scaling_needs_weights_that_a_call_uses():
    network = _partly_used()
    for name in ("hidden", "used"):
        network.get_layer("inner").get_layer(name).trainable = False
    network.get_layer("out").trainable = False
    rule = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with ks.PipelineStrategy("1f1b").scope():
        with pytest.raises(ValueError, match="each stage needs weights to tr"):
            network.compile(rule, "mse")


def _partly_used():
    keras.utils.set_random_seed(3)
    x = keras.Input((3,))
    hidden = keras.layers.Dense(4, name="hidden")(x)
    outputs = [
        keras.layers.Dense(4, name="used")(hidden),
        keras.layers.Dense(4, name="plain")(hidden),
        keras.layers.Dense(4, kernel_regularizer="l2", name="regularized")(
            keras.layers.Dropout(0.5, name="drop")(hidden)
        ),
    ]
    inner = keras.Model(x, outputs, name="inner")
    inputs = keras.Input((3,))
    used, *_ = inner(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(used))


class _Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """Without a `get_config`."""

    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))


class _Rule(keras.optimizers.SGD):
    """With a constructor of its own."""

    def __init__(self, rate):
        super().__init__(rate, momentum=0.9)


_WITHOUT_CONFIG = {
    "schedule": lambda: keras.optimizers.AdamW(_Schedule(), use_ema=True),
    "function": lambda: keras.optimizers.Adam(lambda: 0.1),
    "scaled class": lambda: keras.optimizers.LossScaleOptimizer(_Rule(0.1)),
}


@pytest.mark.filterwarnings("ignore:The object being serialized includes")
@pytest.mark.parametrize(
    "name",
    [
        "scaled class",
        pytest.param("schedule", marks=pytest.mark.all_cells),
        pytest.param("function", marks=pytest.mark.all_cells),
    ],
)
def test_optimizers_that_no_configuration_makes_anew(name, tmp_path):
    scopes = [ks.PipelineStrategy("1f1b").scope, contextlib.nullcontext]
    x, y = pipeline_functions.data("dense", 8)
    networks = []
    for scope in scopes:
        networks.append(pipeline_functions.made("dense"))
        with scope():
            networks[-1].compile(_WITHOUT_CONFIG[name](), "mse")
        networks[-1].fit(x, y, epochs=2, verbose=0)
        networks[-1].save_weights(tmp_path / "model.weights.h5")
    network, stock = networks
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    (stage,) = ks.plan(network, dataset).stages
    assert stage.update_seconds > 0
    slots = [
        [variable.numpy() for variable in each.optimizer.variables]
        for each in (network, ks.export(network))
    ]
    assert len(slots[0]) == len(stock.optimizer.variables)
    _check(slots[1], slots[0])
    # Neither has changed a weight or slot.
    for each in networks:
        each.fit(x, y, verbose=0)
    _check(network.get_weights(), stock.get_weights())


def test_saving_holds_one_variable_at_a_time(cluster, tmp_path):
    """On the rank that does not write the file."""
    (_, total), (held, sent) = cluster("native", 2).run(
        weight_functions.held_while_saving, str(tmp_path)
    )
    # Weights, and two slots of each.
    assert sent == total > 3 * 4 * 233
    # The largest is a kernel of 7 x 7; of the one before, the name is left.
    assert held <= 2 * 4 * 49


def test_weights_that_an_optimizer_does_not_know(cluster):
    for message in cluster("native", 2).run(weight_functions.thaw):
        assert "out/kernel" in message
        assert "Give `compile` a new one" in message


def _check(values, expected):
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-6)


def test_layers_with_constants_of_their_weights(cluster, tmp_path):
    """Keras makes them while it loads, of weights on one rank alone."""
    ranks = cluster("native", 2).run(weight_functions.normalized, str(tmp_path))
    loaded = keras.models.load_model(tmp_path / "normalized.keras")
    x, _ = pipeline_functions.data("dense", 8)
    expected = [*loaded.get_weights(), loaded.predict(x, verbose=0)]
    assert expected[0].min() > 0.1
    for found in ranks:
        for weights, predicted in found:
            _check([*weights, predicted], expected)
