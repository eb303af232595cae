"""What stock Keras accepts of a compiled model, over several processes."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.conftest import engines

pytestmark = pytest.mark.smoke


def examples():
    x = np.random.default_rng(0).integers(0, 10, (16, 4))
    return x, np.linspace(-1, 1, 16, dtype="float32")[:, None]


class Script:
    """The same calls under a strategy and, without one, in stock Keras."""

    def __init__(self, strategy=None):
        self.strategy = strategy
        is_stock = strategy is None
        layers = keras.layers if is_stock else ks.layers
        self.kind = layers.Embedding if is_stock else layers.ShardedEmbedding

    def build(self):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,), dtype="int32")
        rows = keras.layers.Flatten()(self.kind(10, 3, name="table")(inputs))
        hidden = keras.layers.Dense(3, "tanh", name="hidden")(rows)
        return keras.Model(inputs, keras.layers.Dense(1, name="out")(hidden))

    def compile(self, model, optimizer=None, **options):
        optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.5)
        if self.strategy is None:
            model.compile(optimizer, "mse", **options)
        else:
            with self.strategy.scope():
                model.compile(optimizer, "mse", **options)
        return model

    def made(self, copying, model):
        """A copy, made in the scope if there is one."""
        if self.strategy is None:
            return copying(model)
        with self.strategy.scope():
            return copying(model)

    def fit(self, model, epochs=1):
        x, y = examples()
        history = model.fit(
            x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0
        )
        return history.history["loss"]


def _pickled(model):
    return pickle.loads(pickle.dumps(model))


def accepted(script):
    """The losses of each way to make models, compile them and train."""
    found = {}
    model = script.compile(script.build())
    losses = script.fit(model)
    for name, copying in (
        ("pickle", _pickled),
        ("deepcopy", copy.deepcopy),
    ):
        untrained = script.compile(script.build())
        of_untrained = script.fit(script.made(copying, untrained))
        found[name] = of_untrained + script.fit(script.made(copying, model))
    found["after copies"] = losses + script.fit(model)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    script.compile(clone)
    found["clone"] = script.fit(clone) + script.fit(model)
    found["layer"] = _pickled(model.get_layer("table")).get_weights()[0]
    script.compile(model)
    again = script.fit(model)
    script.compile(model, keras.optimizers.SGD(0.3))
    found["compiled again"] = again + script.fit(model)
    keras.utils.clear_session()
    found["cleared"] = script.fit(script.compile(script.build()))
    return found


def of_ranks(architecture):
    strategy = ks.HybridStrategy(architecture=architecture)
    script = Script(strategy)
    found = accepted(script)
    model = script.compile(script.build())
    copied = copy.deepcopy(model)
    with pytest.raises(ValueError, match="strategy.scope.*compile"):
        script.fit(copied)
    return found


def _places():
    """`make test` takes one; its smoke tests both, on the native engine."""
    for engine in engines():
        for architecture in ("hybrid", "auto"):
            is_usual = (*engine.values, architecture) == ("horovod", "hybrid")
            marks = [*engine.marks, *[pytest.mark.all_cells] * (not is_usual)]
            yield pytest.param(*engine.values, architecture, marks=marks)


# Stock Keras's, of a copy of an untrained model.
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize(("engine", "architecture"), list(_places()))
def test_models_are_copied_and_compiled_again(cluster, engine, architecture):
    expected = accepted(Script())
    for found in cluster(engine, 2).run(of_ranks, architecture):
        assert found.keys() == expected.keys()
        for name, values in found.items():
            np.testing.assert_allclose(
                values, expected[name], rtol=1e-5, atol=1e-6, err_msg=name
            )


class Own(keras.Model):
    """A step that calls `optimizer.apply(gradients, variables)`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"value": loss}


def apply(script):
    functional = script.build()
    model = Own(functional.input, functional.output)
    x, y = examples()
    history = script.compile(model).fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0
    )
    return [*history.history["value"], *model.get_weights()]


def apply_on_ranks():
    return apply(Script(ks.HybridStrategy()))


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_step_applies_its_gradients(cluster, engine):
    expected = apply(Script())
    for found in cluster(engine, 2).run(apply_on_ranks):
        for value, stock in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, stock, rtol=1e-5, atol=1e-6)


def compiled_with_the_same():
    """Weights and slots, of models that are compiled once and twice.

    Each with the Keras optimizer that it was compiled with first.
    """
    found = []
    for again in (False, True):
        keras.utils.set_random_seed(1)
        rule = keras.optimizers.Adam(0.05)
        layer = ks.layers.ShardedEmbedding(12, 2)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), layer])
        strategy = ks.HybridStrategy(architecture="hybrid")
        for number in range(2):
            if again or number == 0:
                with strategy.scope():
                    model.compile(rule, "mse")
            x = np.arange(12).reshape(4, 3)
            model.fit(x, np.ones((4, 3, 2)), epochs=2, verbose=0, shuffle=False)
        found.append([*model.get_weights(), *model.optimizer.state()])
    return found


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_model_is_compiled_again_with_the_same_optimizer(cluster, engine):
    for once, twice in cluster(engine, 2).run(compiled_with_the_same):
        for one, other in zip(once, twice, strict=True):
            np.testing.assert_array_equal(one, other)
