"""A schedule's run, simulated: deadlocks, start times, idle stages."""

import collections
import dataclasses
import heapq
import itertools

from keras_sparsity.stages.schedule import Kind, Task


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The times of a simulated run.

    Attributes:
        starts, ends: for each stage, a dict from `Task` to seconds.
    """

    starts: tuple
    ends: tuple

    @property
    def seconds(self):
        """Time from the first task's start to the last one's end."""
        return max(max(ends.values()) for ends in self.ends)


def simulate(
    schedule,
    forward_seconds=None,
    backward_seconds=None,
    activation_seconds=None,
    gradient_seconds=None,
    update_seconds=None,
    processors=None,
):
    """Runs a schedule in simulated time.

    A stage runs its tasks one after the other. A forward pass waits for the
    activations of the stage before, a backward pass for the gradients of the
    stage behind; both travel while stages compute, one message at a time in
    each direction of a link. Tasks of stages that share a processor run at
    once, each at an equal part of its speed.

    Args:
        forward_seconds, backward_seconds: for each stage, the time of a pass;
            by default one unit.
        activation_seconds, gradient_seconds: for each link between
            neighbours, the time of a message; by default 0.
        update_seconds: for each stage, the time of an update; by default 0.
        processors: for each stage, the number of its processor; by default
            each has its own.

    Without any of these times, messages take the `delays` of the schedule.

    Returns:
        `Timeline`.

    Raises:
        ValueError: if the stages would wait for each other for ever.

    Example:

    >>> from keras_sparsity.stages.schedule import gpipe
    >>> simulate(gpipe(4, 8)).seconds  # 2 (M + N - 1)
    22

    References:
        GPipe (arXiv:1811.06965), 2.3 (the bubble).
    """
    num_stages = schedule.num_stages
    units, links = [1] * num_stages, [0] * (num_stages - 1)
    given = (
        forward_seconds,
        backward_seconds,
        activation_seconds,
        gradient_seconds,
    )
    is_in_units = all(seconds is None for seconds in given)
    run = _Run(
        schedule,
        {
            Kind.FORWARD: forward_seconds or units,
            Kind.BACKWARD: backward_seconds or units,
            Kind.UPDATE: update_seconds or [0] * num_stages,
        },
        {
            Kind.FORWARD: activation_seconds or links,
            Kind.BACKWARD: gradient_seconds or links,
        },
        processors or range(num_stages),
        schedule.delays if is_in_units else (0, 0),
    )
    return run.timeline()


class _Processor:
    """Runs some tasks at once, each at an equal part of its speed."""

    def __init__(self):
        self._now = 0
        self._left = {}  # from a stage to seconds of its task, run alone

    def start(self, stage, seconds, now):
        self._advance(now)
        self._left[stage] = seconds

    def next_end(self):
        """`(when, stage)` of the task that ends first, if none is added."""
        if not self._left:
            return None
        stage = min(self._left, key=self._left.get)
        return self._now + self._left[stage] * len(self._left), stage

    def end(self, stage, now):
        self._advance(now)
        del self._left[stage]

    def _advance(self, now):
        passed = now - self._now
        if len(self._left) > 1:  # else units stay whole numbers
            passed /= len(self._left)
        for stage in self._left:
            self._left[stage] -= passed
        self._now = now


class _Run:
    """One simulation: starts and ends of tasks, in the order of time."""

    def __init__(self, schedule, seconds, message_seconds, processors, delays):
        self._schedule = schedule
        self._delays = dict(
            zip((Kind.FORWARD, Kind.BACKWARD), delays, strict=True)
        )
        self._seconds = seconds
        self._message_seconds = message_seconds
        self._numbers = processors
        self._processors = {number: _Processor() for number in processors}
        stages = range(schedule.num_stages)
        self._next = [0 for _ in stages]
        self._idle = [0 for _ in stages]  # since when
        self._link_free = collections.Counter()
        self._arrivals = [{} for _ in stages]
        # A heap of `(when, whether it is a start, order, stage)`.
        self._events, self._order = [], itertools.count()
        self._waiting = set(stages)  # for a message
        self.starts = tuple({} for _ in stages)
        self.ends = tuple({} for _ in stages)

    def timeline(self):
        for stage in range(self._schedule.num_stages):
            self._look_at(stage)
        while self._events:
            now, is_start, _, stage = heapq.heappop(self._events)
            if is_start:
                self._start(stage, now)
            elif self._processor(stage).next_end() == (now, stage):
                self._end(stage, now)
            # Else another task has come, and it ends later.
        self._check_done()
        return Timeline(self.starts, self.ends)

    def _add(self, when, is_start, stage):
        event = when, is_start, next(self._order), stage
        heapq.heappush(self._events, event)

    def _processor(self, stage):
        return self._processors[self._numbers[stage]]

    def _look_at(self, stage):
        """Makes a stage's next task ready, if its message has been sent."""
        tasks = self._schedule.stages[stage]
        if stage not in self._waiting or self._next[stage] == len(tasks):
            return
        task = tasks[self._next[stage]]
        if self._needed(stage, task) and task not in self._arrivals[stage]:
            return
        self._waiting.remove(stage)
        ready = max(self._idle[stage], self._arrivals[stage].get(task, 0))
        self._add(ready, True, stage)

    def _start(self, stage, now):
        task = self._schedule.stages[stage][self._next[stage]]
        self.starts[stage][task] = now
        seconds = self._seconds[task.kind][stage]
        processor = self._processor(stage)
        processor.start(stage, seconds, now)
        self._add_end(processor)

    def _end(self, stage, now):
        task = self._schedule.stages[stage][self._next[stage]]
        self.ends[stage][task] = self._idle[stage] = now
        processor = self._processor(stage)
        processor.end(stage, now)
        self._add_end(processor)
        self._next[stage] += 1
        self._waiting.add(stage)
        for awake in (*self._sent(stage, task, now), stage):
            self._look_at(awake)

    def _add_end(self, processor):
        found = processor.next_end()
        if found:
            when, stage = found
            self._add(when, False, stage)

    def _needed(self, stage, task):
        """`(stage, Task)` whose message a task waits for, or None."""
        if task.kind is Kind.FORWARD and stage > 0:
            return stage - 1, task
        if task.kind is Kind.BACKWARD:
            if stage + 1 < self._schedule.num_stages:
                return stage + 1, task
            return stage, Task(Kind.FORWARD, task.batch)
        return None

    def _sent(self, stage, task, end):
        """Sends a pass's result; the stage that gets it, in a list."""
        last = self._schedule.num_stages - 1
        if task.kind is Kind.FORWARD and stage == last:
            backward = Task(Kind.BACKWARD, task.batch)
            self._arrivals[stage][backward] = end
            return []
        step = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.UPDATE: 0}[task.kind]
        target = stage + step
        if target in (stage, -1):
            return []
        link = (task.kind, min(stage, target))
        begin = max(end, self._link_free[link])
        arrival = begin + self._message_seconds[task.kind][link[1]]
        self._link_free[link] = arrival
        self._arrivals[target][task] = arrival + self._delays[task.kind]
        return [target]

    def _check_done(self):
        lines = []
        for stage, tasks in enumerate(self._schedule.stages):
            if self._next[stage] < len(tasks):
                task = tasks[self._next[stage]]
                lines.append(
                    f"  {_words(stage, task)}, waits for "
                    f"{_words(*self._needed(stage, task))}"
                )
        if lines:
            listed = "\n".join(lines)
            raise ValueError(
                "The stages of this schedule would wait for each other for "
                f"ever:\n{listed}\nA stage must run the passes that its "
                "neighbours wait for before those that wait for them."
            )


def _words(stage, task):
    return f"stage {stage}, {task.kind.value} pass of batch {task.batch}"
