"""Functions that the processes of tests of rows in stages run."""

import contextlib
import functools
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf.current_variable import keeper_of
from keras_sparsity.health import watch
from keras_sparsity.update.kept_rows import KeptRows
from tests import pipeline_functions

BATCH_SIZE = pipeline_functions.BATCH_SIZE


def train(optimizer, cuts, schedule, num_examples, replicas=1):
    """As `pipeline_functions.train`, and what a step does with its tables."""
    return pipeline_functions.train(
        *("tables", optimizer, cuts, schedule, num_examples),
        replicas=replicas,
        check=functools.partial(check_rows, keeps=optimizer != "sgd"),
    )


def train_in_flight(cases, cuts, num_examples, model, replicas=1):
    """`pipeline_functions.train_in_flight` of each `(rule, schedule, target)`.

    With a check of what a step does with the tables.
    """
    return [
        pipeline_functions.train_in_flight(
            *(rule, cuts, schedule, target, num_examples, model, replicas),
            check=functools.partial(check_rows, keeps=rule != "sgd"),
        )
        for rule, schedule, target in cases
    ]


def _of_one_loss(scope, rule):
    """The weights after a training of two heads, the first of which has a loss.

    With averages of the weights; the second has rows and a kernel.
    """
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, "tanh")(inputs)
    first = keras.layers.Dense(2, name="first")(hidden)
    # Keras has layers in the order of their distance from the outputs.
    later = keras.layers.ReLU()(keras.layers.ReLU()(first))
    rows = keras.layers.Embedding(8, 2, name="rows")(inputs)
    pooled = keras.layers.GlobalAveragePooling1D()(rows)
    second = keras.layers.Dense(2)(keras.layers.Add()([later, pooled]))
    network = keras.Model(inputs, [first, second])
    with scope:
        network.compile(rule, ["mse", None])
    x, y = pipeline_functions.data("dense", 24)
    x = np.abs(x).round().clip(0, 7)
    network.fit(x, [y, y], 8, shuffle=False, verbose=0)
    return network.get_weights()


def _averaging():
    return keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5)


def fit_one_loss():
    """The weights in one process, and in stages.

    The last stage has the head without a loss.
    """
    strategy = ks.PipelineStrategy("gpipe", stages=["first"])
    return (
        _of_one_loss(contextlib.nullcontext(), _averaging()),
        _of_one_loss(strategy.scope(), _averaging()),
    )


def fit_one_loss_scaled():
    """As a program does that ends with the error of a rank."""
    strategy = ks.PipelineStrategy("gpipe", stages=["first"])
    scaled = keras.optimizers.LossScaleOptimizer(_averaging())
    try:
        _of_one_loss(strategy.scope(), scaled)
    except ValueError as error:
        watch.report_exception(error)
        raise


def check_rows(network, keeps=True):
    """No operation of a step has the size of a table; its rows are kept.

    Args:
        network: a model in stages.
        keeps: whether the optimizer moves rows that are not touched.
    """
    strategy = network.distribute_strategy
    stage = strategy.stages_of_ranks[strategy.rank]
    part = network._keras_sparsity_pipeline.parts[stage].model
    tables = [
        v
        for v in part.trainable_variables
        if v.shape[0] == pipeline_functions.NUM_ROWS
    ]
    assert tables or not strategy.is_flushed
    for table in tables:
        keeper = keeper_of(table.value)
        assert (keeper is not None) == keeps
        if keeps:
            assert keeper.is_replica == (strategy.peers.size > 1)
    found = sizes_of_tables(network)
    assert not found, found


def sizes_of_tables(network):
    """Names of a training step's operations whose results have its rows."""
    strategy = network.distribute_strategy
    name = "tables" if strategy.is_flushed else "rows line"
    x, y = pipeline_functions.data(name, BATCH_SIZE)

    @tf.function
    def step(*data):
        return strategy.run(network.train_step, (data,))

    # Once in many steps all rows are brought up to date.
    with mock.patch.object(KeptRows, "_settle", lambda _: tf.constant(True)):
        graph = step.get_concrete_function(
            *tf.nest.map_structure(tf.constant, (x, y))
        ).graph
    definition = graph.as_graph_def(add_shapes=True)
    nodes = [*definition.node]
    for function in definition.library.function:
        nodes += function.node_def
    return [
        f"{node.op} {node.name}"
        for node in nodes
        # What a step captures is no work.
        if node.op != "Placeholder"
        for shape in node.attr["_output_shapes"].list.shape
        if pipeline_functions.NUM_ROWS in [size.size for size in shape.dim]
    ]


def planned(schedule, replicas):
    """The plan of a model with tables, and whether no weight has changed."""
    strategy = ks.PipelineStrategy(
        schedule, ["rows"], num_micro_batches=2, replicas=replicas
    )
    with strategy.scope():
        model = pipeline_functions.made("tables")
        model.compile("adam", ["mse", "mae"])
    x, y = pipeline_functions.data("tables", BATCH_SIZE)
    before = model.get_weights()
    data = tf.data.Dataset.from_tensors((tuple(x), tuple(y)))
    plan = ks.plan(model, data)
    return plan, all(map(np.array_equal, before, model.get_weights()))
