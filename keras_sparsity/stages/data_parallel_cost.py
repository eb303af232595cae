"""The cost of hybrid data parallelism."""

from keras_sparsity import planning
from keras_sparsity.planning import transfer_cost
from keras_sparsity.stages.costs import DATA_PARALLELISM, StrategyCost
from keras_sparsity.stages.machine_links import (
    link_seconds,
    processor_seconds,
    shared_by,
)

# As `HybridStrategy` has it by default.
_BUCKET_BYTES = 8 * 2**20


def data_parallel(facts, cluster, num_examples, engine):
    """The `StrategyCost` of the best architecture of each variable."""
    profile = facts.profile
    plan = planning.plan(list(facts.specs), cluster, engine=engine)
    part = max(1.0, num_examples / cluster.size)
    shared = shared_by(cluster, cluster.size)
    slower = shared / cluster.relative_speed
    passes = [slower * seconds for seconds in profile.pass_seconds(part)]
    updates = slower * sum(profile.update_seconds)
    total = plan.total
    busiest = max(*total.sent_bytes, *total.received_bytes)
    dense = _Sums(facts, plan, cluster, shared)
    of_rows = max(0.0, busiest - dense.link_bytes)
    rows = _of_rows(plan, cluster, shared, of_rows, engine)
    dense_on_links, dense_at_processors = dense.seconds
    spread = {
        choice.variable.name
        for choice in plan.choices
        if choice.architecture in transfer_cost.PARTITIONED
    }
    return StrategyCost(
        way=DATA_PARALLELISM,
        step_seconds=dense.overlapped(passes) + sum(rows) + updates,
        computation_seconds=(
            sum(passes) + dense_at_processors + rows[1] + updates
        ),
        link_seconds=dense_on_links + rows[0],
        busiest_bytes=busiest,
        memory_bytes=(
            facts.state_bytes(
                slice(None), num_owners=cluster.size, spread=spread
            )
            + part * sum(facts.output_bytes),
        ),
        num_replicas=cluster.size,
    )


def _of_rows(plan, cluster, shared, num_bytes, engine):
    """`(time of links, time of processors)` of the rows of all variables.

    Args:
        shared: the number of processes that share a processor.
        num_bytes: bytes on the busiest link, in one direction.
    """
    others = cluster.num_machines - 1
    # Messages after each other: in a ring, and to and from owners.
    hops = {"allreduce": 2 * others, "allgather": others, "ps": 3}
    rows = [choice for choice in plan.choices if choice.variable.is_sparse]
    paths = {choice.architecture for choice in rows}
    num_operations = sum({"ps": 3}.get(path, 1) for path in paths)
    of_process = sum(_process_bytes(each, cluster, engine) for each in rows)
    at_processors = processor_seconds(
        cluster, 2 * of_process, 2 * num_operations
    )
    on_links = 0.0
    if others:
        num_messages = sum(hops[path] for path in paths)
        on_links = link_seconds(cluster, num_bytes, num_messages)
    return on_links, shared * at_processors


def _process_bytes(choice, cluster, engine):
    """Bytes that a process sends, or receives, of one variable's rows."""
    where, num_processes = planning.Cluster(cluster.size), 1
    is_partitioned = choice.architecture in transfer_cost.PARTITIONED
    if is_partitioned and cluster.num_machines > 1:
        # A machine's processes pull and push together.
        where, num_processes = cluster, cluster.processes_per_machine
    cost = planning.engine_bytes(
        choice.variable, choice.architecture, where, engine
    )
    return max(*cost.sent_bytes, *cost.received_bytes) / num_processes


class _Sums:
    """Sums of dense gradients over all processes, bucket by bucket.

    Args:
        shared: the number of processes that share a processor.
    """

    def __init__(self, facts, plan, cluster, shared):
        self._facts, self._cluster, self._shared = facts, cluster, shared
        dense = sum(
            choice.variable.num_bytes()
            for choice in plan.choices
            if not choice.variable.is_sparse
        )
        size = cluster.size
        # Of a process, and, as the ring leaves each machine once, of a link.
        self._ring_bytes = 2 * dense * (size - 1) / size
        sizes = [each.dense_bytes for each in facts.profile.gradients]
        self._of_byte = self._ring_bytes / max(1, sum(sizes))
        self._buckets = _buckets(sizes)

    @property
    def link_bytes(self):
        """Bytes on a machine's link, in one direction."""
        return self._ring_bytes * (self._cluster.num_machines > 1)

    @property
    def seconds(self):
        """`(time of links, time of processors)` of all sums."""
        found = [self._seconds(size) for _, size in self._buckets]
        return tuple(sum(each) for each in zip(*found, strict=True))

    def overlapped(self, passes):
        """Time until all passes are made and all gradients are summed.

        A bucket has the gradients of some calls, from the last one on, and
        travels while earlier ones are computed; its messages take processor
        time from them.

        Args:
            passes: list of the times of the calls' passes.
        """
        share = self._facts.forward_share
        ready, arrived = share * sum(passes), 0.0
        for calls, size in self._buckets:
            ready += (1 - share) * sum(passes[calls])
            on_link, at_processor = self._seconds(size)
            arrived = max(arrived, ready) + on_link + at_processor
            ready += at_processor
        return max(arrived, ready)

    def _seconds(self, size):
        """`(time of links, time of processors)` of a bucket's sum."""
        cluster, sent = self._cluster, size * self._of_byte
        if not sent:
            return 0.0, 0.0
        at_processor = self._shared * processor_seconds(cluster, 2 * sent, 2)
        others = cluster.num_machines - 1
        if not others:
            return 0.0, at_processor
        return link_seconds(cluster, sent, 2 * others), at_processor


def _buckets(sizes):
    """List of pairs of some calls, a slice, and the bytes of their gradients.

    Args:
        sizes: list of the bytes of each call's dense gradients.
    """
    found, end, waiting = [], len(sizes), 0
    for place in reversed(range(len(sizes))):
        if waiting and waiting + sizes[place] > _BUCKET_BYTES:
            found.append((slice(place + 1, end), waiting))
            end, waiting = place + 1, 0
        waiting += sizes[place]
    return [*found, (slice(0, end), waiting)]
