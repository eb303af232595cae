"""The costs of pipelines, by simulation of their schedules."""

import dataclasses
import itertools

import numpy as np

from keras_sparsity.stages import schedule as schedules
from keras_sparsity.stages.costs import (
    PIPELINE,
    StrategyCost,
    fastest_that_fits,
)
from keras_sparsity.stages.cutting import shared
from keras_sparsity.stages.machine_links import (
    link_seconds,
    processor_seconds,
    ring_hops,
    shared_by,
)
from keras_sparsity.stages.planned_cuts import PlannedCuts
from keras_sparsity.stages.simulation import simulate
from keras_sparsity.stages.stage_links import StageLink
from keras_sparsity.stages.turns import Turns

# They take the same time; predicted weights come closest to those of one
# process.
_IN_FLIGHT = ("spectrain", "stash", "vanilla")
_MICRO_BATCHES = (2, 4, 8, 16, 32)


class PipelineCosts:
    """Pipelines of a number of stages, by each schedule of a kind.

    Each stage has as many ranks as the others, if their number is a multiple
    of the number of stages. Else the cuts and the numbers of ranks are those
    that make the slowest stage or message as fast as can be, as
    `ks.PipelineStrategy` has them.

    Args:
        facts, cluster, num_examples: as for `strategy_costs`.
        num_stages: N.
        is_flushed: whether the schedules flush the pipeline. Without a flush,
            all stages but the last one compute their layers again.
    """

    def __init__(self, facts, cluster, num_examples, num_stages, is_flushed):
        self._facts, self._cluster = facts, cluster
        self._num_stages, self._is_flushed = num_stages, is_flushed
        self._shared = shared_by(cluster, cluster.size)
        self._places, self._num_ranks = self._cut(num_examples)
        # A rank without examples computes on a stand-in.
        self._num_examples = max(num_examples, *self._num_ranks)
        # Of a mini-batch, at a rank of each stage.
        self._parts = self._num_examples / np.array(self._num_ranks)
        ends = [*self._places, len(facts.profile.names) - 1]
        begins = [0, *(place + 1 for place in self._places)]
        self._calls = [
            slice(begin, end + 1)
            for begin, end in zip(begins, ends, strict=True)
        ]
        ends = [0, *itertools.accumulate(self._num_ranks)]
        ranks = [range(*bounds) for bounds in itertools.pairwise(ends)]
        self._links = [
            StageLink(*pair, cluster) for pair in itertools.pairwise(ranks)
        ]
        self._hops = [ring_hops(each, cluster) for each in ranks]
        # Ranks of a stage on one processor take as long as all of them; the
        # processor with most of them counts.
        on_processors = [
            np.bincount(np.array(each) // self._shared) for each in ranks
        ]
        self._at_once = np.array([each.max() for each in on_processors])
        self._processors = [int(each.argmax()) for each in on_processors]

    def _cut(self, num_examples):
        """`(list of places, tuple of the numbers of the stages' ranks)`."""
        profile, cluster = self._facts.profile, self._cluster
        number, size = self._num_stages, cluster.size
        # Of a rank on average.
        part = max(1.0, num_examples * number / size)
        travels = {
            place: each * part * cluster.seconds_per_byte
            for place, each in profile.crossing_bytes.items()
        }
        handled = {
            place: processor_seconds(cluster, 2 * each * part, 2)
            for place, each in profile.crossing_bytes.items()
        }
        seconds = [
            each / cluster.relative_speed for each in profile.pass_seconds(part)
        ]
        again_share = 0.0 if self._is_flushed else self._facts.forward_share
        if size % number == 0:
            places, _ = shared(
                seconds,
                list(travels),
                [[1]] * number,
                number,
                travels,
                again_seconds=[again_share * each for each in seconds],
                handling_seconds=handled,
            )
            return places, (size // number,) * number
        # So long they take on a single rank.
        seconds = [each * size / number for each in seconds]
        places, num_ranks = shared(
            seconds,
            list(travels),
            [range(1, size - number + 2)] * number,
            size,
            travels,
            [
                each.dense_bytes * cluster.seconds_per_byte
                for each in profile.gradients
            ],
            [again_share * each for each in seconds],
            {place: each * size / number for place, each in handled.items()},
        )
        return places, tuple(num_ranks)

    def of_schedules(self):
        """A `StrategyCost` of each schedule."""
        if not self._is_flushed:
            yield from self._in_flight()
            return
        least = min(self._parts)
        numbers = [n for n in _MICRO_BATCHES if n <= least] or [1]
        if self._facts.pairs:
            numbers = [1]  # as `compile` refuses parts
        for name, make in schedules.FLUSHED.items():
            tried = [self._flushed(name, make, number) for number in numbers]
            tried.sort(key=lambda cost: cost.step_seconds)
            yield fastest_that_fits(tried, self._cluster)

    def _flushed(self, name, make, number):
        schedule = make(self._num_stages, number)
        forward, both = self._pass_seconds(number)
        # A backward pass but the first adds its gradients to the sums so far.
        both += self._sum_seconds * (1 - 1 / number)
        forward, backward = self._with_messages(forward, both - forward, number)
        seconds = self._simulated(schedule, forward, backward, number)
        held = [schedule.in_flight(k) for k in range(self._num_stages)]
        memory = [
            self._facts.state_bytes(self._calls[k])
            + held[k] * self._held_bytes(k, number)
            for k in range(self._num_stages)
        ]
        work = number * (forward + backward)
        return self._cost(name, seconds, work, memory, 0, number)

    def _in_flight(self):
        forward, both = self._pass_seconds()
        # All but the last stage compute their layers again, see the Planner.
        backward = np.append(both[:-1], both[-1] - forward[-1])
        forward, backward = self._with_messages(forward, backward)
        fastest = np.inf
        for messages_ahead in (False, True):
            turns = Turns(self._num_stages, messages_ahead)
            seconds = self._turn_seconds(turns, forward, backward)
            # More updates are missed for a faster step alone.
            if seconds > 0.999 * fastest:
                continue
            fastest = seconds
            for name in _IN_FLIGHT:
                memory = [
                    self._memory_in_flight(name, k, turns)
                    for k in range(self._num_stages)
                ]
                work, missed = forward + backward, turns.num_ahead(0)
                found = self._cost(name, seconds, work, memory, missed, 1)
                yield dataclasses.replace(found, messages_ahead=messages_ahead)

    def _turn_seconds(self, turns, forward, backward):
        """Time for a mini-batch more, once the pipeline is full."""
        number = 2 * (turns.backward(0) + 1)
        few, many = (
            self._simulated(
                schedules.without_flush(
                    self._num_stages, each, turns.messages_ahead
                ),
                *(forward, backward, 1),
            )
            for each in (number, 2 * number)
        )
        seconds = (many - few) / number
        if turns.messages_ahead:
            # A turn ends when its messages have come.
            for sizes in self._piece_bytes():
                for link, size in enumerate(sizes):
                    seconds = max(seconds, self._link_seconds(link, size))
        return seconds

    def _memory_in_flight(self, name, stage, turns):
        num_ahead = turns.num_ahead(stage)
        copies = {
            "vanilla": 0,
            "stash": num_ahead,
            "spectrain": 1 + self._facts.num_averages,
        }[name]
        # With messages ahead also one that comes before its pass.
        num_waiting = num_ahead + min(1, turns.forward(stage))
        part = self._parts[stage]
        waiting = num_waiting * self._arriving_bytes(stage) * part
        return (
            self._facts.state_bytes(self._calls[stage], copies)
            + waiting
            + self._held_bytes(stage)
        )

    def _arriving_bytes(self, stage):
        """Bytes of an example that a stage receives."""
        if stage == 0:
            return 0
        return self._facts.profile.crossing_bytes[self._places[stage - 1]]

    def _held_bytes(self, stage, number=1):
        """Bytes of the activations of a pass of so many of a mini-batch."""
        made = sum(self._facts.output_bytes[self._calls[stage]])
        part = self._parts[stage] / number
        return part * (self._arriving_bytes(stage) + made)

    def _pass_seconds(self, number=1):
        """Arrays: a forward pass, and one with its backward pass."""
        of_stages = [
            sum(self._facts.profile.pass_seconds(part / number, calls))
            for part, calls in zip(self._parts, self._calls, strict=True)
        ]
        both = np.array(of_stages) / self._cluster.relative_speed
        return self._facts.forward_share * both, both

    @property
    def _sum_seconds(self):
        """Array: the time in which a stage adds the gradients of two passes."""
        sums = self._facts.profile.sum_seconds
        of_stages = [sum(sums[calls]) for calls in self._calls]
        return np.array(of_stages) / self._cluster.relative_speed

    def _with_messages(self, forward, backward, number=1):
        """These times of passes, and those of their messages at a processor.

        A pass sends to one neighbour what it has made of the other's message.
        """
        found = []
        for seconds, sizes in zip(
            (forward, backward), self._piece_bytes(number), strict=True
        ):
            seconds = seconds.copy()
            for k, (link, size) in enumerate(
                zip(self._links, sizes, strict=True)
            ):
                seconds[k : k + 2] += link.processor_seconds(size)
            found.append(seconds)
        return found

    def _piece_bytes(self, number=1):
        """Two lists: of a piece of each link's activations, and gradients."""
        sizes = self._facts.profile.crossing_bytes, self._facts.returned_bytes
        return [
            [
                self._num_examples / link.num_pieces / number * of_way[place]
                for place, link in zip(self._places, self._links, strict=True)
            ]
            for of_way in sizes
        ]

    def _simulated(self, schedule, forward, backward, number):
        activations, gradients = (
            [self._link_seconds(k, size) for k, size in enumerate(sizes)]
            for sizes in self._piece_bytes(number)
        )
        return simulate(
            schedule,
            (self._at_once * forward).tolist(),
            (self._at_once * backward).tolist(),
            activations,
            gradients,
            [self._update_seconds(k) for k in range(self._num_stages)],
            self._processors,
        ).seconds

    def _link_seconds(self, link, piece_bytes):
        # Those of several ranks share a machine's link.
        at_once = self._links[link].most
        if not at_once:
            return 0.0
        return link_seconds(self._cluster, at_once * piece_bytes)

    def _update_seconds(self, stage):
        """Time in which a stage sums its gradients and updates its weights."""
        most = int(self._hops[stage].max())
        seconds = self._computed_update(stage) * self._at_once[stage]
        if most:
            by_ring = most * self._ring_bytes(stage)
            num_messages = 2 * (self._num_ranks[stage] - 1)
            seconds += link_seconds(self._cluster, by_ring, num_messages)
        return float(seconds)

    def _computed_update(self, stage):
        """The processor's part of it."""
        update = sum(self._facts.profile.update_seconds[self._calls[stage]])
        seconds = update / self._cluster.relative_speed
        sent = self._ring_bytes(stage)
        if sent:
            seconds += processor_seconds(self._cluster, 2 * sent, 2)
        return seconds

    def _ring_bytes(self, stage):
        """Bytes that a rank sends to sum a stage's gradients."""
        gradients = self._facts.profile.gradients[self._calls[stage]]
        num_ranks, part = self._num_ranks[stage], self._parts[stage]
        dense = sum(each.dense_bytes for each in gradients)
        rows = sum(each.row_bytes(part) for each in gradients)
        hops = num_ranks - 1
        return 2 * dense * hops / num_ranks + rows * hops

    def _busiest_bytes(self):
        number = self._cluster.num_machines
        sent, received = np.zeros(number), np.zeros(number)
        for link, on, back in zip(
            self._links, *self._piece_bytes(), strict=True
        ):
            sent += link.sent * on + link.received * back
            received += link.received * on + link.sent * back
        for stage, hops in enumerate(self._hops):
            sent += hops * self._ring_bytes(stage)
            received += hops * self._ring_bytes(stage)
        return float(max(sent.max(), received.max()))

    def _busiest_seconds(self, work):
        """Time in which the busiest processor computes.

        Args:
            work: array of the passes' time in a step, of each stage.
        """
        updates = [self._computed_update(k) for k in range(self._num_stages)]
        of_ranks = np.repeat(work + np.array(updates), self._num_ranks)
        firsts = np.arange(0, len(of_ranks), self._shared)
        return float(np.add.reduceat(of_ranks, firsts).max())

    def _cost(self, name, seconds, work, memory, missed, number):
        computes = self._busiest_seconds(work)
        busiest = self._busiest_bytes()
        links = busiest * self._cluster.seconds_per_byte
        names = self._facts.profile.names
        are_equal = len(set(self._num_ranks)) == 1
        return StrategyCost(
            way=PIPELINE,
            step_seconds=float(max(seconds, computes, links)),
            computation_seconds=computes,
            link_seconds=links,
            busiest_bytes=busiest,
            memory_bytes=tuple(float(each) for each in memory),
            missed_updates=missed,
            schedule=name,
            stages=tuple(names[place] for place in self._places),
            cuts=PlannedCuts(names, tuple(self._places)),
            num_replicas=self._num_ranks[0] if are_equal else 1,
            ranks_of_stages=() if are_equal else self._num_ranks,
            num_micro_batches=number,
        )
