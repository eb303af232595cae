"""Functions that the processes of tests of rows in stages run."""

from unittest import mock

import tensorflow as tf

from keras_sparsity._tf.current_variable import keeper_of
from keras_sparsity.update.kept_rows import KeptRows
from tests import pipeline_functions

BATCH_SIZE = pipeline_functions.BATCH_SIZE


def train(optimizer, cuts, schedule, num_examples, replicas=1):
    """As `pipeline_functions.train`, and what a step does with its tables."""
    return pipeline_functions.train(
        *("tables", optimizer, cuts, schedule, num_examples),
        replicas=replicas,
        check=check_rows,
    )


def check_rows(network):
    """No operation of a step has the size of a table; its rows are kept."""
    strategy = network.distribute_strategy
    stage = strategy.stages_of_ranks[strategy.rank]
    part = network._keras_sparsity_pipeline.parts[stage].model
    tables = [
        v
        for v in part.trainable_variables
        if v.shape[0] == pipeline_functions.NUM_ROWS
    ]
    assert tables
    for table in tables:
        keeper = keeper_of(table.value)
        assert keeper is not None
        assert keeper.is_replica == (strategy.peers.size > 1)
    found = sizes_of_tables(network)
    assert not found, found


def sizes_of_tables(network):
    """Names of a training step's operations whose results have its rows."""
    x, y = pipeline_functions.data("tables", BATCH_SIZE)
    strategy = network.distribute_strategy

    @tf.function
    def step(*data):
        return strategy.run(network.train_step, (data,))

    # Once in many steps all rows are brought up to date.
    with mock.patch.object(KeptRows, "_settle", lambda _: tf.constant(True)):
        graph = step.get_concrete_function(
            *tf.nest.map_structure(tf.constant, (tuple(x), tuple(y)))
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
