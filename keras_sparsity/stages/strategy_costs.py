"""The costs of all ways to train a model on a cluster."""

import dataclasses

from keras_sparsity import planning
from keras_sparsity.planning.specs import check_is
from keras_sparsity.stages.costs import (
    DATA_PARALLELISM,
    LAYER_PLACEMENT,
    PIPELINE,
    StrategyCost,
    does_fit,
    fastest_that_fits,
)
from keras_sparsity.stages.data_parallel_cost import data_parallel
from keras_sparsity.stages.pipeline_costs import PipelineCosts
from keras_sparsity.stages.planned_cuts import PlannedCuts
from keras_sparsity.stages.split_costs import split_costs

_MOST_TAILS = 4
# Deeper pipelines are not looked at: cutting takes the square of it.
_MOST_STAGES = 64
# Nor numbers of ranks that differ, of more processes: finding them takes the
# square of the number of processes, too.
_MOST_SHARED = 12


def strategy_costs(
    facts, cluster, num_examples, engine="native", on_error=None
):
    """The predicted steps of all ways to train a model on a cluster.

    Hybrid data parallelism with the best architecture of each variable; layer
    placement with 1 to 4 tail workers, each with its fastest split; pipelines
    of N stages of R processes each, for all N R = the number of processes, by
    each schedule, with the number of micro-batches that makes it fastest; of
    at most 12 processes also pipelines of all other N, whose stages have
    different numbers of processes, one choice of them for each N. N is at most
    64. Splits and numbers of micro-batches are chosen among those that fit the
    memory of a process; if none does, that of the least memory. The ranks of a
    stage are consecutive. Models with sharded tables are not trained in
    pipelines; layer placement has the tables in its head, and those of a
    `SampledSoftmax` on one tail worker. Of a model that computes with pairs of
    examples, layer placement and pipelines are left out that divide
    mini-batches there.

    Pipelines are simulated, with their messages; without a flush, the time of
    a step is that of a mini-batch more once the pipeline is full. Under data
    parallelism, messages of 8 MB of dense gradients travel during the rest of
    the backward pass. All else is a sum of passes, messages and updates.
    Processes that share a processor take as long as their work together, and
    no step is shorter than the messages of the busiest link.

    Args:
        facts: `ModelFacts`.
        cluster: `planning.Cluster` whose `megabits_per_second` is known.
        num_examples: the number of examples of a mini-batch.
        engine: the engine's name, see `planning.engine_bytes`.
        on_error: function of a way and the error that its costs raised; the
            others are compared. By default the error is raised.

    Returns:
        Tuple of `StrategyCost`, the fastest first, after those that fit those
        that do not.

    Raises:
        ValueError: if the cluster's rate is not known.

    References:
        EuroSys 3.1; RALP (Park et al.), the profiler; GPipe
        (arXiv:1811.06965), 2.3; SpecTrain (arXiv:1809.02839), 3.
    """
    check_is(cluster, planning.Cluster, "cluster")
    if cluster.seconds_per_byte is None:
        raise ValueError(
            "Times of messages need the rate of the links. Received: "
            f"cluster={cluster}. Give the cluster `megabits_per_second`."
        )
    ways = {
        DATA_PARALLELISM: lambda *of_step: [data_parallel(*of_step, engine)]
    }
    if facts.profile.crossing_bytes and cluster.size > 1:
        ways |= {LAYER_PLACEMENT: _all_placed, PIPELINE: _pipelines}
    found = []
    for way, compute in ways.items():
        try:
            found += compute(facts, cluster, num_examples)
        except Exception as error:  # whatever a model leads to
            if on_error is None:
                raise
            on_error(way, error)
    found = [
        dataclasses.replace(cost, fits=does_fit(cost, cluster))
        for cost in found
    ]
    return tuple(sorted(found, key=_order))


def _order(cost):
    return not cost.fits, cost.step_seconds, cost.missed_updates


def _all_placed(facts, cluster, num_examples):
    most = min(1 if facts.has_samples else _MOST_TAILS, cluster.size // 2)
    return [
        cost
        for num_tails in range(1, most + 1)
        for cost in _placed(facts, cluster, num_examples, num_tails)
    ]


def _pipelines(facts, cluster, num_examples):
    if facts.has_tables:
        return []
    most = len(facts.profile.crossing_bytes) + 1
    # Several ranks of a stage would divide mini-batches.
    fewest = cluster.size if facts.pairs else 2
    most = min(cluster.size, most, _MOST_STAGES)
    return [
        cost
        for num_stages in range(fewest, most + 1)
        if not cluster.size % num_stages or cluster.size <= _MOST_SHARED
        for is_flushed in (True, False)
        for cost in PipelineCosts(
            facts, cluster, num_examples, num_stages, is_flushed
        ).of_schedules()
    ]


def _placed(facts, cluster, num_examples, num_tails):
    """List of the cost of the fastest split; empty if none is possible."""
    profile = facts.profile
    num_workers = cluster.size - num_tails
    splits = [
        cost
        for way in ("batch", "columns")
        for cost in split_costs(
            profile,
            num_workers,
            num_tails,
            num_examples,
            cluster,
            tail_split=way,
            pairs=facts.pairs,
        )
    ]
    if not splits:
        return []
    splits.sort(key=lambda cost: cost.seconds)
    placed = (
        _of_split(each, facts, num_workers, num_tails, num_examples)
        for each in splits
    )
    return [fastest_that_fits(placed, cluster)]


def _of_split(split, facts, num_workers, num_tails, num_examples):
    """The `StrategyCost` of a `SplitCost`."""
    front, back = slice(split.place + 1), slice(split.place + 1, None)
    of_worker, of_tail = num_examples / num_workers, num_examples
    if split.tail_split == "batch":
        of_tail = num_examples / num_tails
    made = [sum(facts.output_bytes[calls]) for calls in (front, back)]
    arriving = facts.profile.crossing_bytes[split.place]
    return StrategyCost(
        way=LAYER_PLACEMENT,
        step_seconds=split.seconds,
        computation_seconds=split.seconds - split.link_seconds,
        link_seconds=split.link_seconds,
        busiest_bytes=split.busiest_bytes,
        memory_bytes=(
            facts.state_bytes(front, num_owners=num_workers)
            + of_worker * made[0],
            facts.state_bytes(back) + of_tail * (arriving + made[1]),
        ),
        stages=(facts.profile.names[split.place],),
        cuts=PlannedCuts(facts.profile.names, (split.place,)),
        num_replicas=num_workers,
        num_tails=num_tails,
        tail_split=split.tail_split,
    )
