"""All ways to train a model, compared by measurements of it."""

import keras

from keras_sparsity._tf import keras_functional, keras_models
from keras_sparsity.board.strategy_plan import StrategyPlan
from keras_sparsity.data.batches import num_examples
from keras_sparsity.layers import SampledSoftmax
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.stages import measurements
from keras_sparsity.stages.attempts import AttemptError, described
from keras_sparsity.stages.costs import WAYS
from keras_sparsity.stages.cutting import Cutter
from keras_sparsity.stages.strategy_costs import strategy_costs


def can_be_cut(model):
    """Whether a model can be trained in stages.

    A `SampledSoftmax` with the table of an embedding (tied weights) is trained
    where the embedding is. A model of a fixed batch size has no parts of a
    batch.
    """
    functional = keras_functional.functional_of(model)
    is_tied = any(
        isinstance(layer, SampledSoftmax) and layer.table is not None
        for layer in keras_models.all_layers(model)
    )
    if functional is None or is_tied:
        return False
    return all(each.shape[0] is None for each in functional.inputs)


def compared(model, dataset, cluster, engine, specs, communicator):
    """The plan of all ways to train a model; every rank calls it.

    Args:
        dataset: `tf.data.Dataset` of global batches.
        cluster: the `planning.Cluster` to plan for. If it is the running one,
            facts of its links that it lacks are measured.
        specs: list of the trained variables' `planning.VariableSpec`s, as they
            travel.

    Returns:
        `StrategyPlan`, the same on all ranks, with the reasons of ways that
        could not be compared; None if the model cannot be cut,
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
    optimizer = model.optimizer
    if isinstance(optimizer, HybridOptimizer):
        optimizer = optimizer.inner_optimizer
    inputs, *_ = keras.utils.unpack_x_y_sample_weight(batch)
    cutter = Cutter(model, inputs)
    try:
        found = measurements.measured(
            cutter, number, optimizer, cluster, communicator, specs=specs
        )
    except AttemptError as error:
        failures = dict.fromkeys(WAYS, str(error))
        return StrategyPlan((), cluster, number, failures)
    return plan_of(found.facts, cutter, found.cluster, number, engine)


def plan_of(facts, cutter, cluster, num_examples, engine="native"):
    """The `StrategyPlan` of a measured model.

    Args:
        facts, cluster, num_examples, engine: as for `strategy_costs`.
        cutter: the model's `Cutter`.
    """
    failures = {}

    def on_error(way, error):
        failures[way] = described(error)

    costs = strategy_costs(facts, cluster, num_examples, engine, on_error)
    return StrategyPlan(
        costs,
        cluster,
        num_examples,
        failures,
        cutter.unknown_size,
        tuple(facts.profile.names[place] for place in facts.pairs),
    )
