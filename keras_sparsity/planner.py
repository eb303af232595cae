"""`ks.plan`: how to train a model, and the strategy that does."""

import dataclasses

from keras_sparsity import collectives
from keras_sparsity.board import measured_plan
from keras_sparsity.board.model_plan import ModelPlan
from keras_sparsity.pipeline.layer_placement import LayerPlacementStrategy
from keras_sparsity.pipeline.strategy import PipelineStrategy
from keras_sparsity.stages.costs import LAYER_PLACEMENT, PIPELINE
from keras_sparsity.strategy import HybridStrategy


def plan(model, dataset, cluster=None, engine=None, num_batches=8):
    """Measures a model without training it, and prints its plan.

    A model in stages (`ks.PipelineStrategy`) gets the time, memory and
    messages of each stage, from passes of the first mini-batch's examples. A
    model with layers on one worker (`ks.LayerPlacementStrategy`) gets the bytes
    and the predicted step of each place where it may be divided. Of any other
    model the sparsity is measured: the gradients of some batches are computed,
    and each variable gets the architecture with the fewest bytes on the
    network, see `ks.planning.plan`. No variable changes.

    For a functional or sequential model all ways to train it are compared, too:
    data parallelism with these architectures, layer placement, and pipelines of
    2 and more stages by each schedule, with replicas or, on at most 12
    processes, with more processes for slower stages. With sharded layers there
    are no pipelines, and layer placement has embeddings in its head and a
    `SampledSoftmax` on its one tail worker. With tied weights (a
    `SampledSoftmax` with `table`) there is data parallelism alone. For a model
    that computes with pairs of examples, ways in stages that divide
    mini-batches there are left out, as `compile` refuses them. Rank 0 measures
    the layers, with unknown sizes as in the first batch. Steps are predicted
    for the running cluster, whose links are measured, or for another one with
    `megabits_per_second`.

    Every rank calls it; rank 0 prints. One process can plan for another
    cluster: each batch is then cut into one part for each of its workers, of
    which at most 16 are looked at.

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
        with layers on one worker. The same on all ranks. A `ModelPlan` has
        the costs of the `variables` and of the `strategies`, the fastest
        first, and `strategy()` makes the fastest one that gives the result
        of one process; `strategy(asynchronous=True)` may be any. Make the
        model anew in its scope.

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
        EuroSys 3.1 (the hybrid architecture); RALP (Park et al.), the
        profiler; PipeDream (arXiv:1806.03377), 3.1.
    """
    found = measured_plan.measured(model, dataset, cluster, engine, num_batches)
    if isinstance(found, ModelPlan):
        found = dataclasses.replace(found, make_strategy=_best_strategy)
    return found


def _best_strategy(plan, asynchronous):
    """The strategy of the fastest way; see `ModelPlan.strategy`."""
    size = collectives.start().size
    if size == plan.cluster.size == 1:
        return HybridStrategy()  # There is nothing to compare.
    if plan.comparison is None:
        raise ValueError(
            "The ways to train this model were not compared: that takes a "
            "functional or sequential model of any batch size without tied "
            "weights (a `SampledSoftmax` with `table`), and several processes "
            "or a cluster with `megabits_per_second`. Received: "
            f"cluster={plan.cluster}. Train another model under "
            "`ks.HybridStrategy`."
        )
    if size != plan.cluster.size:
        raise ValueError(
            f"The plan is for {plan.cluster.size} processes, and there "
            f"are {size}. Received: cluster={plan.cluster}. Call `strategy` "
            "in a program that runs on that cluster."
        )
    return strategy_of(plan.comparison.best(asynchronous))


def strategy_of(cost):
    """Makes the strategy of a `StrategyCost`."""
    if cost.way == LAYER_PLACEMENT:
        strategy = LayerPlacementStrategy(
            list(cost.stages),
            num_tail_workers=cost.num_tails,
            tail_split=cost.tail_split,
        )
    elif cost.way == PIPELINE:
        strategy = PipelineStrategy(
            cost.schedule,
            stages=list(cost.stages),
            num_micro_batches=cost.num_micro_batches,
            replicas=list(cost.ranks_of_stages) or cost.num_replicas,
            messages_ahead=cost.messages_ahead,
        )
    else:
        return HybridStrategy()
    strategy.planned_cuts = cost.cuts
    return strategy
