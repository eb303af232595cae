"""The plan of a model that is measured without training it."""

import contextlib

import keras
import tensorflow as tf

from keras_sparsity import planning, sparsity
from keras_sparsity._tf import checks
from keras_sparsity.board.model_plan import ModelPlan, VariablePlan
from keras_sparsity.data.batches import split_batch
from keras_sparsity.machines import settings
from keras_sparsity.placement import choice
from keras_sparsity.placement.traffic import as_sent, running_cluster
from keras_sparsity.sparsity import touches
from keras_sparsity.tables.table_variable import TableVariable, pieces_of
from keras_sparsity.update.aggregate import Aggregation

# The name of a model's method that makes its `PipelinePlan`, of a dataset.
OF_STAGES = "_keras_sparsity_plan_of_stages"


def plan(model, dataset, cluster=None, engine=None, num_batches=8):
    """Measures a model without training it, and prints its plan.

    Of a model in stages (`ks.PipelineStrategy`): the time, memory and messages
    of each stage, by passes of the first mini-batch's examples. Of a model with
    layers on one worker (`ks.LayerPlacementStrategy`): the bytes and the
    predicted step of each place where it may be divided. Of any other
    one, its sparsity: the gradients of some batches are computed, and each
    variable gets the architecture with the fewest bytes on the network, see
    `ks.planning.plan`. No variable changes.

    Every rank calls it; rank 0 prints. One process can plan for another
    cluster: each batch is then cut into one part for each of its workers.

    Args:
        model: a compiled model.
        dataset: `tf.data.Dataset` of global batches, as `fit` takes them.
        cluster: the `ks.planning.Cluster` to plan for, by default that of the
            running processes. Processes of a single machine count as machines
            of one process each, because their messages are not free.
        engine: "native" or "horovod"; by default the running one, in one
            process "native".
        num_batches: number of batches to measure.

    Returns:
        `ModelPlan`; `PipelinePlan` of a model in stages, `SplitPlan` of one
        with layers on one worker. The same on all ranks.

    Raises:
        ValueError: if an argument has another type, or the cluster is of
            another size than the running one, or is given for a model in
            stages.

    Example:

    >>> import keras, numpy as np, tensorflow as tf, keras_sparsity as ks
    >>> model = keras.Sequential([
    ...     keras.Input((2,), dtype="int32"),
    ...     ks.layers.ShardedEmbedding(1000, 4, name="words"),
    ...     keras.layers.Flatten(),
    ...     keras.layers.Dense(1, use_bias=False, name="out"),
    ... ])
    >>> model.compile("sgd", "mse")
    >>> data = tf.data.Dataset.from_tensor_slices(
    ...     (np.arange(24).reshape(12, 2), np.zeros((12, 1)))).batch(4)
    >>> cluster = ks.planning.Cluster(num_machines=4)
    >>> found = ks.plan(model, data, cluster, engine="horovod")
    ... # doctest: +ELLIPSIS
    <BLANKLINE>
    ...
    >>> [(v.architecture, v.sparsity.alpha) for v in found.variables]
    [('ps', 0.002), ('allreduce', None)]

    References:
        EuroSys 3.1 (the hybrid architecture).
    """
    num_batches = _checked(model, dataset, num_batches)
    if hasattr(model, OF_STAGES):
        return _of_stages(model, dataset, cluster, engine)
    placements = choice.of_model(model)
    communicator = placements.communicator
    cluster = _checked_cluster(cluster, communicator)
    if engine is not None:  # before the batches are looked at
        checks.one_of("engine", engine, settings.ENGINES)
    else:
        engine = "native" if communicator.size == 1 else communicator.engine
    with touches.apart(model.trainable_variables):
        _look_at(model, dataset.take(num_batches), cluster, placements)
        measured = sparsity.measured(model)
    chosen = planning.plan(
        [as_sent(facts.spec(), placements.options) for facts in measured],
        cluster,
        engine=engine,
    )
    plans = [
        VariablePlan(
            facts,
            one.architecture,
            planning.transfer_cost.num_partitions(one.variable, cluster),
            one.costs,
        )
        for facts, one in zip(measured, chosen.choices, strict=True)
    ]
    found = ModelPlan(tuple(plans), cluster, engine)
    if communicator.rank == 0:
        found.print()
    return found


def _of_stages(model, dataset, cluster, engine):
    if cluster is not None or engine is not None:
        raise ValueError(
            "The plan of a model in stages is that of the running processes. "
            f"Received: cluster={cluster}, engine={engine!r}. Leave them out."
        )
    found = getattr(model, OF_STAGES)(dataset)
    if model.distribute_strategy.rank == 0:
        found.print()
    return found


def _checked(model, dataset, num_batches):
    """The number of batches, after a check of all three arguments."""
    checks.check(
        isinstance(model, keras.Model) and getattr(model, "compiled", False),
        "model",
        model,
        "a compiled `keras.Model`: its loss says what has a gradient",
    )
    checks.check(
        isinstance(dataset, tf.data.Dataset),
        "dataset",
        dataset,
        "a `tf.data.Dataset` of global batches, as `fit` takes them",
    )
    return checks.dimension("num_batches", num_batches)


def _checked_cluster(cluster, communicator):
    """The cluster to plan for."""
    if cluster is None:
        return running_cluster(communicator)
    planning.specs.check_is(cluster, planning.Cluster, "cluster")
    if communicator.size not in (1, cluster.size):
        raise ValueError(
            f"The plan is for {cluster.size} processes, and there are "
            f"{communicator.size}. Received: cluster={cluster}. Call "
            "`ks.plan` in one process to plan for another cluster."
        )
    return cluster


def _look_at(model, dataset, cluster, placements):
    """Aggregates the gradients of some batches, and throws them away."""
    communicator = placements.communicator
    variables = model.trainable_variables
    aggregation = Aggregation(variables, [pieces_of(v) for v in variables])

    def look(batch):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.compute_loss(x, y, outputs, sample_weight)
        grads = tape.gradient(loss, variables)
        found = [
            (gradient, variable)
            for gradient, variable in zip(grads, variables, strict=True)
            if gradient is not None
        ]
        aggregation.aggregate(
            *zip(*found, strict=True), placements, lambda variable: False
        )

    run = model.distribute_strategy.run if communicator.size > 1 else _call
    step = tf.function(lambda batch: run(look, args=(batch,)))
    # Those of this rank, of one for each worker there is to be.
    parts = [(communicator.rank, communicator.size)]
    if communicator.size == 1:
        parts = [(part, cluster.size) for part in range(cluster.size)]
    with _left_as_it_was(model):
        for batch in dataset:
            for part in parts:
                step(split_batch(batch, *part))


def _call(function, args):
    return function(*args)


@contextlib.contextmanager
def _left_as_it_was(model):
    """Restores the state that a forward pass in training changes."""
    state = [
        variable
        for variable in model.non_trainable_variables + model.metrics_variables
        if not isinstance(variable, TableVariable)
    ]
    before = [keras.ops.convert_to_numpy(variable) for variable in state]
    try:
        yield
    finally:
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)
