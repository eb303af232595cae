"""All ways to train a model, compared by measurements of it."""

import dataclasses

import numpy as np

from keras_sparsity._tf import keras_functional, keras_models
from keras_sparsity.board.strategy_plan import StrategyPlan
from keras_sparsity.collectives import speeds
from keras_sparsity.data.batches import num_examples
from keras_sparsity.layers import SampledSoftmax
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.stages import model_facts, timing
from keras_sparsity.stages.cutting import Cutter
from keras_sparsity.stages.machine_links import shared_by
from keras_sparsity.stages.strategy_costs import strategy_costs


def can_be_cut(model):
    """Whether a model can be trained in stages.

    Classes of a `SampledSoftmax` are on all processes, so it cannot be cut; and
    a model of a fixed batch size has no parts of a batch.
    """
    functional = keras_functional.functional_of(model)
    layers = keras_models.all_layers(model)
    if functional is None or any(isinstance(x, SampledSoftmax) for x in layers):
        return False
    return all(each.shape[0] is None for each in functional.inputs)


def compared(model, dataset, cluster, engine, specs, communicator):
    """The plan of all ways to train a model; every rank calls it.

    Args:
        model: a compiled model.
        dataset: `tf.data.Dataset` of global batches.
        cluster: the `planning.Cluster` to plan for. If it is the running one,
            facts of its links that it lacks are measured.
        engine: the engine's name.
        specs: list of the trained variables' `planning.VariableSpec`s, as they
            travel.
        communicator: `Collectives` of all ranks.

    Returns:
        `StrategyPlan`, the same on all ranks; None if the model cannot be cut,
        the rate of links is not known, or there is no batch.
    """
    if cluster.size == 1 or not can_be_cut(model):
        return None
    if communicator.size == 1 and cluster.megabits_per_second is None:
        return None
    batch = next(iter(dataset), None)
    if batch is None:
        return None
    number = int(num_examples(batch))
    if communicator.size > 1:
        cluster = _as_measured(cluster, communicator)
    facts, cutter = None, Cutter(model)
    if communicator.rank == 0:
        optimizer = model.optimizer
        if isinstance(optimizer, HybridOptimizer):
            optimizer = optimizer.inner_optimizer
        facts = model_facts.measured(cutter, number, optimizer, specs)
    # Rank 0's, from which all ranks choose alike.
    facts = communicator.gather_objects(facts, name="plan/facts")[0]
    if communicator.size > 1:
        number_measured = facts.profile.num_examples
        facts = facts.crowded(_crowding(cutter, number_measured, communicator))
    costs = strategy_costs(facts, cluster, number, engine)
    return StrategyPlan(costs, cluster, number)


def _crowding(cutter, num_examples, communicator):
    """Processor time of passes on all processes at once, over that on one.

    Processes of a machine share its memory and caches. The part of a processor
    that each of them has does not count here: costs count it.
    """

    def measure(function, tensors):
        run, alone = timing.traced(function, tensors), None
        communicator.barrier("plan/alone")
        if communicator.rank == 0:
            alone = timing.processor_seconds(run, tensors)
        communicator.barrier("plan/together")
        return alone, timing.processor_seconds(run, tensors)

    found = communicator.gather_objects(
        timing.whole_seconds(cutter, num_examples, measure=measure),
        name="plan/crowding",
    )
    return float(np.mean([together for _, together in found])) / found[0][0]


def _as_measured(cluster, communicator):
    """A running cluster, with what is measured of its messages."""
    if communicator.cross_size == 1 and not cluster.processes_per_processor:
        # As many machines, for its messages; computation is shared.
        cluster = dataclasses.replace(
            cluster, processes_per_processor=communicator.size
        )
    if None not in (
        cluster.megabits_per_second,
        cluster.message_seconds,
        cluster.message_seconds_per_byte,
    ):
        return cluster
    link, processor = speeds.measure_messages(
        communicator, shared_by(cluster, cluster.size)
    )
    measured = {}
    if cluster.megabits_per_second is None:
        # Of a network too fast to measure, some rate.
        measured["megabits_per_second"] = 8e-6 / max(
            link.seconds_per_byte, 1e-12
        )
        measured["latency_seconds"] = link.latency_seconds or None
    if cluster.message_seconds is None:
        measured["message_seconds"] = processor.latency_seconds or None
    if cluster.message_seconds_per_byte is None:
        per_byte = processor.seconds_per_byte or None
        measured["message_seconds_per_byte"] = per_byte
    return dataclasses.replace(cluster, **measured)
