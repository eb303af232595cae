"""A model and the links of its cluster, measured by all ranks together."""

import dataclasses
import functools

import numpy as np

from keras_sparsity.collectives import speeds
from keras_sparsity.planning.specs import Cluster
from keras_sparsity.stages import model_facts, timing
from keras_sparsity.stages.attempts import attempted
from keras_sparsity.stages.costs import ModelFacts
from keras_sparsity.stages.machine_links import shared_by

# In Mbit/s: the rate of links whose bytes take no time that can be measured.
UNMEASURED_RATE = 8e6


@dataclasses.dataclass(frozen=True)
class Measured:
    """The facts by which the step of a model on a cluster is predicted.

    Attributes:
        facts: `ModelFacts`, of a model as its processes compute it.
        cluster: `planning.Cluster`.
    """

    facts: ModelFacts
    cluster: Cluster

    def with_columns(self, columns):
        """The same with other `Profile.columns`."""
        profile = dataclasses.replace(self.facts.profile, columns=columns)
        facts = dataclasses.replace(self.facts, profile=profile)
        return dataclasses.replace(self, facts=facts)


class Measurable:
    """A model that is measured when its times are first asked for.

    Args:
        measure: function that gives its `Measured`; every rank calls it.
    """

    def __init__(self, cutter, measure):
        self.cutter, self._measure = cutter, measure

    @functools.cached_property
    def measured(self):
        return self._measure()


def measured(cutter, num_examples, optimizer, cluster, communicator, **options):
    """Measures a model on rank 0, and the links; every rank calls it.

    Args:
        cutter, num_examples, optimizer, **options: as for
            `model_facts.measured`.
        cluster: the `planning.Cluster`. If it is the running one, facts of its
            links that it lacks are measured.

    Returns:
        `Measured`, the same on all ranks.

    Raises:
        AttemptError: on all ranks, if a pass fails on one.
    """
    if communicator.size > 1:
        cluster = _with_links(cluster, communicator)
    measure = functools.partial(
        model_facts.measured, cutter, num_examples, optimizer, **options
    )
    # Rank 0's, from which all ranks choose alike.
    is_first = communicator.rank == 0
    facts, *_ = attempted(
        communicator, measure if is_first else None, "plan/facts"
    )
    if communicator.size > 1 and shared_by(cluster, cluster.size) > 1:
        number = facts.profile.num_examples
        facts = facts.crowded(_crowding(cutter, number, communicator))
    return Measured(facts, cluster)


def _crowding(cutter, num_examples, communicator):
    """Processor time of passes on all processes at once, over that on one.

    Processes of a machine share its memory and caches. The part of a processor
    that each of them has does not count here: costs count it.
    """

    passes, alone = [], None

    def keep(function, tensors):
        passes.extend([timing.traced(function, tensors), tensors])

    # Behind it all ranks have made a pass: no later one fails.
    attempted(
        communicator,
        lambda: timing.whole_seconds(cutter, num_examples, measure=keep),
        "plan/alone",
    )
    if communicator.rank == 0:
        alone = timing.processor_seconds(*passes)
    communicator.barrier("plan/together")
    found = communicator.gather_objects(
        (alone, timing.processor_seconds(*passes)), name="plan/crowding"
    )
    return float(np.mean([together for _, together in found])) / found[0][0]


def _with_links(cluster, communicator):
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
        is_measured = link.seconds_per_byte * UNMEASURED_RATE > 8e-6
        measured["megabits_per_second"] = (
            8e-6 / link.seconds_per_byte if is_measured else UNMEASURED_RATE
        )
        measured["latency_seconds"] = link.latency_seconds or None
    if cluster.message_seconds is None:
        measured["message_seconds"] = processor.latency_seconds or None
    if cluster.message_seconds_per_byte is None:
        per_byte = processor.seconds_per_byte or None
        measured["message_seconds_per_byte"] = per_byte
    return dataclasses.replace(cluster, **measured)
