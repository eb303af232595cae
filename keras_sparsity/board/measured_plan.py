"""The plan of a model that is measured without training it."""

import contextlib
import dataclasses

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity import planning, sparsity
from keras_sparsity._tf import checks, keras_models
from keras_sparsity.board import comparison
from keras_sparsity.board.model_plan import ModelPlan, VariablePlan
from keras_sparsity.data import marks
from keras_sparsity.data.batches import bounds, num_examples, split_batch
from keras_sparsity.machines import settings
from keras_sparsity.placement import choice
from keras_sparsity.placement.traffic import as_sent, running_cluster
from keras_sparsity.sparsity import touches
from keras_sparsity.tables.table_variable import (
    TableVariable,
    partitions_of,
    pieces_of,
)
from keras_sparsity.update.step import Aggregation

# The name of a model's method that makes its plan, of a mini-batch.
OF_STAGES = "_keras_sparsity_plan_of_stages"
# For another cluster, so many of its workers' parts of a batch are looked at.
_MOST_PARTS = 16


def measured(model, dataset, cluster, engine, num_batches):
    """The plan of a model, printed by rank 0; see `ks.plan`."""
    num_batches = _checked(model, dataset, num_batches)
    if not model.built:
        for batch in dataset.take(1):
            one = split_batch(batch, 0, num_examples(batch))
            model(keras.utils.unpack_x_y_sample_weight(one)[0])
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
        found = sparsity.measured(model)
    specs = [
        as_sent(
            facts.spec(partitions_of(variable)),
            placements.options,
            communicator,
        )
        for facts, variable in zip(
            found, model.trainable_variables, strict=True
        )
    ]
    together = running_cluster(communicator).processes_per_machine
    if together != cluster.processes_per_machine:
        # The rows that other machines' processes touch together are not known.
        specs = [dataclasses.replace(s, alpha_machine=None) for s in specs]
    chosen = planning.plan(specs, cluster, engine=engine)
    plans = [
        VariablePlan(
            facts,
            one.architecture,
            planning.transfer_cost.num_partitions(one.variable, cluster),
            one.costs,
        )
        for facts, one in zip(found, chosen.choices, strict=True)
    ]
    compared = comparison.compared(
        model, dataset, cluster, engine, specs, communicator
    )
    plan = ModelPlan(tuple(plans), cluster, engine, compared)
    if communicator.rank == 0:
        plan.print()
    return plan


def _of_stages(model, dataset, cluster, engine):
    if cluster is not None or engine is not None:
        raise ValueError(
            "The plan of a model in stages is that of the running processes. "
            f"Received: cluster={cluster}, engine={engine!r}. Leave them out."
        )
    batch = next(iter(dataset), None)
    checks.check(
        batch is not None, "dataset", dataset, "a dataset with a batch"
    )
    found = getattr(model, OF_STAGES)(batch)
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
        "a `tf.data.Dataset` of global batches, as `fit` takes them; "
        + marks.OF_ARRAYS,
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
    checks.check(variables, "model", model, "a model with variables to train")
    aggregation = Aggregation(variables, [pieces_of(v) for v in variables])

    def look(batch):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            _check_has_loss(model)
            loss = model.compute_loss(x, y, outputs, sample_weight)
        grads = tape.gradient(loss, variables)
        found = [
            (gradient, variable)
            for gradient, variable in zip(grads, variables, strict=True)
            if gradient is not None
        ]
        checks.check(found, "model", model, "a loss of trained variables")
        aggregation.aggregate(
            *zip(*found, strict=True), placements, lambda variable: False
        )

    run = model.distribute_strategy.run if communicator.size > 1 else _call
    step = tf.function(lambda batch: run(look, args=(batch,)), autograph=False)
    parts = 0
    with _left_as_it_was(model):
        for batch in dataset:
            for part in _parts(batch, cluster, communicator):
                step(split_batch(batch, *part))
                parts += 1
    if not parts:
        raise ValueError(
            "The plan needs a batch with an example for each process. "
            f"Received: batches of fewer than {communicator.num_workers} "
            "examples, or none. Give `ks.plan` the global batches of `fit`."
        )


def _check_has_loss(model):
    """Raises ValueError if nothing but a step's own code has a loss."""
    is_own = keras_models.overrides(model, "compute_loss")
    if not is_own and getattr(model, "loss", None) is None and not model.losses:
        raise ValueError(
            "`ks.plan` takes the gradients of the loss of `compile`, "
            f"`compute_loss` or `add_loss`. Received: a {type(model).__name__} "
            "without one, as of models whose `train_step` has its own. Move "
            "that loss into `compute_loss`, or give `compile` one alike."
        )


def _parts(batch, cluster, communicator):
    """This rank's part, of one for each worker there is to be.

    None of a batch that leaves some of the running workers without examples:
    every rank sees the whole batch, so that all leave it out.
    """
    number = int(num_examples(batch))
    if communicator.size > 1:
        size = communicator.num_workers
        return [(communicator.rank, size)] if number >= size else []
    size = cluster.size
    few = np.unique(np.linspace(0, size - 1, min(size, _MOST_PARTS), dtype=int))
    parts = [(int(part), size) for part in few]
    # Of more workers than examples, some have none.
    filled = [part for part in parts if len(range(*bounds(number, *part)))]
    return filled or [(0, 1)]


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
