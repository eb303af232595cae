"""The costs of pipelines, by simulation of their schedules."""

import dataclasses

import numpy as np

from keras_sparsity.stages import schedule as schedules
from keras_sparsity.stages.costs import PIPELINE, StrategyCost
from keras_sparsity.stages.cutting import balanced
from keras_sparsity.stages.machine_links import (
    crossings,
    link_seconds,
    processor_seconds,
    ring_hops,
    shared_by,
)
from keras_sparsity.stages.simulation import simulate
from keras_sparsity.stages.turns import Turns

_FLUSHED = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_forward_one_backward,
}
# They take the same time; predicted weights come closest to those of one
# process.
_IN_FLIGHT = ("spectrain", "stash", "vanilla")
_MICRO_BATCHES = (2, 4, 8, 16, 32)


class PipelineCosts:
    """Pipelines of a number of stages, by each schedule.

    Args:
        facts, cluster, num_examples: as for `strategy_costs`.
        num_stages: N.
    """

    def __init__(self, facts, cluster, num_examples, num_stages):
        self._facts, self._cluster = facts, cluster
        self._num_stages = num_stages
        self._num_replicas = cluster.size // num_stages
        self._shared = shared_by(cluster, cluster.size)
        self._part = max(1.0, num_examples / self._num_replicas)
        profile = facts.profile
        travels = {
            place: size * self._part * cluster.seconds_per_byte
            for place, size in profile.crossing_bytes.items()
        }
        self._places = balanced(
            [
                seconds / cluster.relative_speed
                for seconds in profile.pass_seconds(self._part)
            ],
            list(travels),
            num_stages,
            travels,
        )
        ends = [*self._places, len(profile.names) - 1]
        begins = [0, *(place + 1 for place in self._places)]
        self._calls = [
            slice(begin, end + 1)
            for begin, end in zip(begins, ends, strict=True)
        ]
        self._links = [
            crossings(self._ranks(k), self._ranks(k + 1), cluster)
            for k in range(num_stages - 1)
        ]
        self._hops = [
            ring_hops(self._ranks(k), cluster) for k in range(num_stages)
        ]

    def _ranks(self, stage):
        first = stage * self._num_replicas
        return range(first, first + self._num_replicas)

    def of_schedules(self):
        """A `StrategyCost` of each schedule."""
        numbers = [n for n in _MICRO_BATCHES if n <= self._part] or [1]
        for name, make in _FLUSHED.items():
            tried = [self._flushed(name, make, number) for number in numbers]
            yield min(tried, key=lambda cost: cost.step_seconds)
        yield from self._in_flight()

    def _flushed(self, name, make, number):
        schedule = make(self._num_stages, number)
        part = self._part / number
        forward, both = self._pass_seconds(part)
        # A backward pass but the first adds its gradients to the sums so far.
        both += self._sum_seconds * (1 - 1 / number)
        forward, backward = self._with_messages(forward, both - forward, part)
        seconds = self._simulated(schedule, forward, backward, number)
        held = [schedule.in_flight(k) for k in range(self._num_stages)]
        memory = [
            self._facts.state_bytes(self._calls[k])
            + held[k] * self._held_bytes(k, part)
            for k in range(self._num_stages)
        ]
        work = number * (forward + backward)
        return self._cost(name, seconds, work, memory, 0, number)

    def _in_flight(self):
        forward, both = self._pass_seconds(self._part)
        # All but the last stage compute their layers again, see the Planner.
        backward = np.append(both[:-1], both[-1] - forward[-1])
        forward, backward = self._with_messages(forward, backward, self._part)
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
            # A turn ends when its activations have come.
            sizes, _ = self._message_bytes(self._part)
            for link, size in enumerate(sizes):
                sent = forward[link] + self._link_seconds(link, size)
                seconds = max(seconds, sent)
        return seconds

    def _memory_in_flight(self, name, stage, turns):
        num_ahead = turns.num_ahead(stage)
        copies = {
            "vanilla": 0,
            "stash": num_ahead,
            "spectrain": 1 + self._facts.num_averages,
        }[name]
        # Also those that have come before their pass.
        num_waiting = num_ahead + turns.forward(stage)
        waiting = num_waiting * self._arriving_bytes(stage) * self._part
        return (
            self._facts.state_bytes(self._calls[stage], copies)
            + waiting
            + self._held_bytes(stage, self._part)
        )

    def _arriving_bytes(self, stage):
        """Bytes of an example that a stage receives."""
        if stage == 0:
            return 0
        return self._facts.profile.crossing_bytes[self._places[stage - 1]]

    def _held_bytes(self, stage, num_examples):
        """Bytes of the activations of a pass."""
        made = sum(self._facts.output_bytes[self._calls[stage]])
        return num_examples * (self._arriving_bytes(stage) + made)

    def _pass_seconds(self, num_examples):
        """Arrays: a forward pass, and one with its backward pass."""
        of_stages = [
            sum(self._facts.profile.pass_seconds(num_examples, calls))
            for calls in self._calls
        ]
        both = np.array(of_stages) / self._cluster.relative_speed
        return self._facts.forward_share * both, both

    @property
    def _sum_seconds(self):
        """Array: the time in which a stage adds the gradients of two passes."""
        sums = self._facts.profile.sum_seconds
        of_stages = [sum(sums[calls]) for calls in self._calls]
        return np.array(of_stages) / self._cluster.relative_speed

    def _with_messages(self, forward, backward, num_examples):
        """These times of passes, and those of their messages at a processor.

        A pass sends to one neighbour what it has made of the other's message.
        """
        found = []
        for seconds, sizes in zip(
            (forward, backward), self._message_bytes(num_examples), strict=True
        ):
            messages = [processor_seconds(self._cluster, n) for n in sizes]
            # From the stage before, and to the one behind.
            found.append(seconds + [0, *messages] + [*messages, 0])
        return found

    def _message_bytes(self, num_examples):
        """Two lists: of each link's activations, and of their gradients."""
        sizes = self._facts.profile.crossing_bytes, self._facts.returned_bytes
        return [
            [num_examples * of_way[place] for place in self._places]
            for of_way in sizes
        ]

    def _simulated(self, schedule, forward, backward, number):
        shared = self._shared
        # Replicas of a stage on one processor take as long as all of them.
        at_once = min(shared, self._num_replicas)
        by_processor = max(shared, self._num_replicas)
        activations, gradients = (
            [self._link_seconds(k, size) for k, size in enumerate(sizes)]
            for sizes in self._message_bytes(self._part / number)
        )
        return simulate(
            schedule,
            (at_once * forward).tolist(),
            (at_once * backward).tolist(),
            activations,
            gradients,
            [self._update_seconds(k) for k in range(self._num_stages)],
            [
                self._ranks(k)[0] // by_processor
                for k in range(self._num_stages)
            ],
        ).seconds

    def _link_seconds(self, link, num_bytes):
        # Those of several replicas share a machine's link.
        at_once = int(self._links[link][0].max())
        if not at_once:
            return 0.0
        return link_seconds(self._cluster, at_once * num_bytes)

    def _update_seconds(self, stage):
        """Time in which a stage sums its gradients and updates its weights."""
        hops = self._num_replicas - 1
        most = int(self._hops[stage].max())
        seconds = self._computed_update(stage)
        seconds *= min(self._shared, self._num_replicas)
        if most:
            by_ring = most * self._ring_bytes(stage)
            seconds += link_seconds(self._cluster, by_ring, 2 * hops)
        return seconds

    def _computed_update(self, stage):
        """The processor's part of it."""
        update = sum(self._facts.profile.update_seconds[self._calls[stage]])
        seconds = update / self._cluster.relative_speed
        sent = self._ring_bytes(stage)
        if sent:
            seconds += processor_seconds(self._cluster, 2 * sent, 2)
        return seconds

    def _ring_bytes(self, stage):
        """Bytes that a replica sends to sum a stage's gradients."""
        gradients = self._facts.profile.gradients[self._calls[stage]]
        hops = self._num_replicas - 1
        dense = sum(each.dense_bytes for each in gradients)
        rows = sum(each.row_bytes(self._part) for each in gradients)
        return 2 * dense * hops / self._num_replicas + rows * hops

    def _busiest_bytes(self):
        facts, number = self._facts, self._cluster.num_machines
        sent, received = np.zeros(number), np.zeros(number)
        for place, (out, into) in zip(self._places, self._links, strict=True):
            on = self._part * facts.profile.crossing_bytes[place]
            back = self._part * facts.returned_bytes[place]
            sent += out * on + into * back
            received += into * on + out * back
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
        of_ranks = np.repeat(work + np.array(updates), self._num_replicas)
        firsts = np.arange(0, len(of_ranks), self._shared)
        return float(np.add.reduceat(of_ranks, firsts).max())

    def _cost(self, name, seconds, work, memory, missed, number):
        computes = self._busiest_seconds(work)
        busiest = self._busiest_bytes()
        links = busiest * self._cluster.seconds_per_byte
        names = self._facts.profile.names
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
            num_replicas=self._num_replicas,
            num_micro_batches=number,
        )
