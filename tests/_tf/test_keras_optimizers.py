"""Each private name that is used, so that a new version says which broke."""

import keras
import pytest
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers

pytestmark = pytest.mark.smoke


def test_optimizers():
    variables = [keras.Variable(tf.ones([n])) for n in (2, 3)]
    optimizer = keras.optimizers.AdamW(gradient_accumulation_steps=2)
    optimizer.exclude_from_weight_decay(var_list=variables[:1])
    keras_optimizers.exclude_from_weight_decay_too(
        optimizer, variables[0], variables[1:]
    )
    optimizer.build(variables)
    assert len(keras_optimizers.built_variables(optimizer)) == 2
    assert keras_optimizers.variable_index(optimizer, variables[1]) == 1
    keras_optimizers.check_knows(optimizer, variables)
    with pytest.raises(ValueError, match="Unknown variable"):
        keras_optimizers.check_knows(optimizer, [keras.Variable(tf.ones([2]))])
    assert not optimizer._use_weight_decay(variables[1])
    strategy = tf.distribute.get_strategy()
    seen = []

    def clip(grads):
        seen.append(grads)
        return grads

    keras_optimizers.take_aggregated_gradients(optimizer, clip, strategy)
    grads = [tf.ones([2]), tf.ones([3])]
    for _ in range(2):
        optimizer.apply(grads, variables)
    assert len(seen) == 1
    assert int(keras_optimizers.iterations(optimizer)) == 2


def test_names_that_are_not_decayed():
    layer = keras.layers.Embedding(3, 2, name="words")
    keras.Sequential([keras.Input((4,)), layer])
    (variable,) = layer.weights
    name = keras_optimizers.tensorflow_name(variable)
    assert name == variable.value.name
    for word, is_decayed in (("words", False), ("dense", True)):
        optimizer = keras.optimizers.AdamW()
        optimizer.exclude_from_weight_decay(var_names=[word])
        optimizer.build([variable])
        found = keras_optimizers.uses_weight_decay(optimizer, variable)
        assert found == is_decayed


@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        (
            keras.optimizers.Adam(amsgrad=True),
            "MOMENTUMS VELOCITIES LARGEST_VELOCITIES",
        ),
        (keras.optimizers.Adamax(), "ADAMAX_MOMENTS ADAMAX_NORMS"),
        (
            keras.optimizers.RMSprop(momentum=0.9, centered=True),
            "MOMENTUMS VELOCITIES AVERAGE_GRADIENTS",
        ),
        (
            keras.optimizers.Adadelta(),
            "ACCUMULATED_GRADIENTS ACCUMULATED_CHANGES",
        ),
        (keras.optimizers.Adagrad(), "ACCUMULATORS"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_kinds_of_slots(rule, kinds):
    rule.build([keras.Variable(tf.ones([2]))])
    for kind in kinds.split():
        (slot,) = getattr(rule, getattr(keras_optimizers, kind))
        assert slot.shape == (2,)


def test_unbuilt_without_a_configuration():
    """A rate for each layer, and no `get_config`."""

    class Rates(keras.optimizers.SGD):
        def __init__(self, rates):
            super().__init__(0.5)
            self.rates = rates
            self.kept = {"own": [keras.Variable(1.0)]}

    rates = {keras.layers.Dense(1): 1.0, keras.layers.Dense(1): 2.0}
    made = keras_optimizers.unbuilt(Rates(rates))
    assert made.rates == rates and float(made.learning_rate) == 0.5
    assert not hasattr(made, "kept")


def test_rebuild_optimizer():
    variables = [keras.Variable(tf.ones([n])) for n in (2, 3)]
    inner = keras.optimizers.AdamW()
    inner.exclude_from_weight_decay(var_list=variables[:1])
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    optimizer.build(variables)
    assert keras_optimizers.excluded_from_weight_decay(inner) == [0]
    own = keras_optimizers.own_variables(inner)
    others = [keras.Variable(tf.ones([n])) for n in (4, 5, 6)]
    slots = [keras.Variable(tf.zeros([n])) for n in (4, 5, 6)]
    keras_optimizers.rebuild_optimizer(
        inner, others, own[:2] + slots, {"_momentums": slots}
    )
    keras_optimizers.exclude_from_weight_decay(inner, others[1:2])
    assert keras_optimizers.built_variables(inner) == others
    assert [keras_optimizers.variable_index(inner, v) for v in others] == [
        0,
        1,
        2,
    ]
    assert inner._momentums == slots
    assert inner.variables == own[:2] + slots
    assert [inner._use_weight_decay(v) for v in others] == [True, False, True]
    added = inner.add_variable_from_reference(others[0], "more")
    assert inner.variables[-1] is added


def test_without_missing_gradients():
    variables = [keras.Variable(1.0), keras.Variable(2.0)]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        grads, kept = keras_optimizers.without_missing_gradients(
            keras.optimizers.SGD(), [None, tf.ones([])], variables
        )
    assert len(grads) == len(kept) == 1
    assert kept[0] is variables[1]


def test_a_copy_gets_its_number_of_updates_from_a_tensor():
    optimizer = keras.optimizers.Adam()
    keras_optimizers.set_iterations(optimizer, tf.constant(7, tf.int64))
    assert int(optimizer.iterations + 1) == 8
