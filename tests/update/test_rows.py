"""Rows and pieces in the place of an optimizer's variables."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf import keras_optimizers
from keras_sparsity.update import rows


def variables(*shapes):
    return [keras.Variable(np.ones(shape, "float32")) for shape in shapes]


def test_pieces_are_decayed_as_what_they_replace():
    old = variables((4, 2), (3, 2), (5,))
    rule = keras.optimizers.AdamW(0.1)
    rule.exclude_from_weight_decay(var_list=old[:1])
    rule.build(old)
    replaced, made = [], []
    for variable, shapes in zip(
        old, (((2, 2), (2, 2)), ((3, 2),)), strict=False
    ):
        pieces = variables(*shapes)
        kinds = rows.slots_of(rule, [variable])
        slots = {kind: variables(*shapes) for kind in kinds}
        replaced.append(([variable], pieces, slots))
        made.append(pieces)
    rows.replace_variables(rule, replaced)
    not_decayed, decayed = made
    found = keras_optimizers.built_variables(rule)
    for one, other in zip(found, [*not_decayed, *decayed, old[2]], strict=True):
        assert one is other
    for variable in found:
        is_decayed = keras_optimizers.uses_weight_decay(rule, variable)
        assert is_decayed == all(variable is not v for v in not_decayed)


def test_rows_stand_in_for_their_variable_alone():
    variable, other = variables((4, 2), (3,))
    rule = keras.optimizers.SGD(0.5, momentum=0.9)
    rule.build([variable, other])
    ids = tf.constant([2, 0])
    copy, stand_ins = rows.stand_in_for(rule, [(variable, ids, None)])
    assert copy.iterations is rule.iterations
    assert stand_ins.keys() == {id(variable)}
    stand_in = stand_ins[id(variable)]
    copy.apply([tf.ones([2, 2]), tf.ones([3])], [stand_in, other])
    stand_in.write_back()
    np.testing.assert_array_equal(variable, [[0.5] * 2, [1] * 2] * 2)
    np.testing.assert_array_equal(other, [0.5] * 3)
    assert rule.iterations == 1


def trained(layer, strategy=None):
    """Weights after steps in which a layer is not decayed, by its name."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            *(keras.Input((3,), dtype="int32"), layer(5_000, 16, name="words")),
            *(keras.layers.Flatten(), keras.layers.Dense(1)),
        ]
    )
    rule = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    rule.exclude_from_weight_decay(var_names=["words"])
    with strategy.scope() if strategy else contextlib.nullcontext():
        model.compile(rule, "mse")
    x, y = np.arange(24).reshape(8, 3), np.ones((8, 1))
    model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


def trained_by_rows():
    strategy = ks.HybridStrategy(architecture="ps")
    return [
        trained(layer, strategy)
        for layer in (keras.layers.Embedding, ks.layers.ShardedEmbedding)
    ]


def test_a_layers_name_leaves_its_table_out_of_decay(cluster):
    expected = trained(keras.layers.Embedding)
    for ways in (trained_by_rows(), *cluster("native", 2).run(trained_by_rows)):
        for found in ways:
            for value, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(value, other, atol=1e-6)


def untouched_rows(is_built):
    """Rows without a gradient, after a step that decays one table of five.

    Args:
        is_built: whether the rule is built before `compile`.
    """
    inputs = keras.Input((2,), dtype="int32")
    layers = [
        keras.layers.Embedding(9, 2, "ones"),  # whose variable becomes a table
        ks.layers.ShardedEmbedding(9, 2, "ones", architecture="allgather"),
        *(ks.layers.ShardedEmbedding(9, 2, "ones") for _ in range(3)),
    ]
    outputs = keras.layers.Add()([layer(inputs) for layer in layers])
    model = keras.Model(inputs, outputs)
    rule = keras.optimizers.SGD(0.1, weight_decay=0.5)
    rule.exclude_from_weight_decay(
        var_list=[layer.embeddings for layer in layers[:-1]]
    )
    if is_built:
        rule.build(model.trainable_variables)
    with ks.HybridStrategy(architecture="ps").scope():
        model.compile(rule, "mse", run_eagerly=True)
    spread, gathered, repartitioned = (layer.table for layer in layers[1:4])
    ks.moves.move(model, {spread: "ps", gathered: "allreduce"})
    ks.moves.repartition(model, {repartitioned: 3})
    model.fit(np.zeros((2, 2)), np.zeros((2, 2, 2)), verbose=0)
    return [layer.get_weights()[0][8, 0] for layer in layers]


@pytest.mark.parametrize("is_built", [False, True])
def test_variables_that_become_others_stay_out_of_decay(cluster, is_built):
    several = cluster("native", 2).run(untouched_rows, is_built)
    for found in (untouched_rows(is_built), *several):
        np.testing.assert_allclose(found, [1] * 4 + [0.95], rtol=1e-6)
