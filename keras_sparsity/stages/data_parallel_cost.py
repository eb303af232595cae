"""The cost of hybrid data parallelism."""

from keras_sparsity import planning
from keras_sparsity.stages.costs import DATA_PARALLELISM, StrategyCost
from keras_sparsity.stages.machine_links import shared_by

# As `HybridStrategy` has it by default.
_BUCKET_BYTES = 8 * 2**20


def data_parallel(facts, cluster, num_examples, engine):
    """The step with the best architecture of each variable.

    Args:
        facts, cluster, num_examples, engine: as for `strategy_costs`.

    Returns:
        `StrategyCost`.
    """
    profile = facts.profile
    plan = planning.plan(list(facts.specs), cluster, engine=engine)
    part = max(1.0, num_examples / cluster.size)
    slower = shared_by(cluster, cluster.size) / cluster.relative_speed
    passes = [
        slower * profile.time_share(part) * seconds
        for seconds in profile.seconds
    ]
    updates = slower * sum(profile.update_seconds)
    total = plan.total
    busiest = max(*total.sent_bytes, *total.received_bytes)
    dense, rows = _link_seconds(plan, cluster, busiest)
    spread = {
        choice.variable.name
        for choice in plan.choices
        if choice.architecture == "ps"
    }
    return StrategyCost(
        way=DATA_PARALLELISM,
        step_seconds=_overlapped(facts, passes, dense) + rows + updates,
        computation_seconds=sum(passes) + updates,
        link_seconds=dense + rows,
        busiest_bytes=busiest,
        memory_bytes=(
            facts.state_bytes(
                slice(None), num_owners=cluster.size, spread=spread
            )
            + part * sum(facts.output_bytes),
        ),
        num_replicas=cluster.size,
    )


def _link_seconds(plan, cluster, busiest):
    """Time in which dense gradients travel, and that of all rows."""
    # In a ring all machines send the same.
    dense_bytes = sum(
        choice.costs[choice.architecture].sent_bytes[0]
        for choice in plan.choices
        if not choice.variable.is_sparse
    )
    others = cluster.num_machines - 1
    # Messages after each other: in a ring, and to and from owners.
    hops = {"allreduce": 2 * others, "allgather": others, "ps": 3}
    paths = {
        choice.architecture
        for choice in plan.choices
        if choice.variable.is_sparse
    }
    latency = cluster.latency_seconds or 0 if others else 0
    return (
        dense_bytes * cluster.seconds_per_byte
        + latency * hops["allreduce"] * bool(dense_bytes),
        (busiest - dense_bytes) * cluster.seconds_per_byte
        + latency * sum(hops[path] for path in paths),
    )


def _overlapped(facts, passes, dense_seconds):
    """Time until all passes are made and all dense gradients are summed.

    A message is full with the gradients of some calls, from the last one on,
    and travels while earlier ones are computed.

    Args:
        facts: `ModelFacts`.
        passes: list of the times of the calls' passes.
        dense_seconds: time in which all dense gradients travel.
    """
    sizes = [each.dense_bytes for each in facts.profile.gradients]
    of_byte = dense_seconds / max(1, sum(sizes))
    ready = facts.forward_share * sum(passes)
    arrived = waiting = 0.0
    for size, seconds in reversed(list(zip(sizes, passes, strict=True))):
        if waiting and waiting + size > _BUCKET_BYTES:
            arrived = max(arrived, ready) + waiting * of_byte
            waiting = 0.0
        ready += (1 - facts.forward_share) * seconds
        waiting += size
    return max(arrived, ready) + waiting * of_byte
