"""Cuts a functional model into stages.

The calls of a model's layers stand in an order in which each comes after those
whose results it takes. A stage is a run of consecutive calls, so every place
between two calls is a cut, unless a layer's weights are used on both sides of
it, or a tensor without a row for each example would cross. Any number may.
"""

import bisect
import collections
import contextlib
import functools
import itertools
import math

from keras_sparsity._tf import checks, keras_functional
from keras_sparsity.stages import forbidden_cuts
from keras_sparsity.stages.example_shapes import UNKNOWN_SIZE, example_shape
from keras_sparsity.stages.part import Part


class Cutter:
    """Finds a model's possible cuts, and cuts it.

    Args:
        model: a functional or sequential `keras.Model` that is built.
        inputs: those of a batch, in the model's structure: sizes that the
            model does not know count as theirs.

    Attributes:
        calls: the model's calls, in order.
        outputs: the model's outputs, a flat list.
        given: dict from the ids of the model's inputs to those of a batch;
            empty without any.

    Raises:
        ValueError: if the model is a subclass or not built.

    Example:

    >>> import keras
    >>> layers = [keras.Input((8,)), keras.layers.Dense(4, name="a"),
    ...           keras.layers.Dense(2, name="b")]
    >>> cutter = Cutter(keras.Sequential(layers))
    >>> [part.names for part in cutter.parts(cutter.after(["a"]))]
    [('a',), ('b',)]

    References:
        PipeDream (arXiv:1806.03377), 3.1.
    """

    def __init__(self, model, inputs=None):
        functional = keras_functional.functional_of(model)
        if functional is None:
            raise ValueError(
                f"The model '{model.name}' cannot be cut into stages. "
                f"Received: a {type(model).__name__}; expected: a functional "
                "or sequential model that is built. Write a subclassed model "
                "as `keras.Model(inputs, outputs)`; give a sequential one a "
                "`keras.Input` first."
            )
        self._functional = functional
        self.calls, self.outputs = keras_functional.flat_calls(functional)
        self._inputs = {id(x): i for i, x in enumerate(functional.inputs)}
        self._shapes = self.given = {}
        if inputs is not None:
            # Inputs and layers may refuse that; sizes stay unknown.
            with contextlib.suppress(Exception):
                given = keras_functional.flat_inputs(functional, inputs)
                self.given = dict(zip(self._inputs, given, strict=True))
                self._shapes = keras_functional.shapes_for(
                    functional, self.calls, inputs
                )

    @functools.cached_property
    def _needed_until(self):
        """Dict from a tensor's id to the place of the last call that needs it.

        Outputs are needed at the end.
        """
        last = {
            id(tensor): place
            for place, call in enumerate(self.calls)
            for tensor in call.inputs
        }
        for tensor in self.outputs:
            last[id(tensor)] = len(self.calls)
        return last

    @functools.cached_property
    def _logits_functions(self):
        """See `Part`."""
        ids = set(map(id, self.outputs))
        found = {
            id(tensor): keras_functional.logits_function(call)
            for call in self.calls
            for tensor in call.outputs
            if id(tensor) in ids
        }
        return {key: each for key, each in found.items() if each is not None}

    @functools.cached_property
    def forbidden(self):
        """Dict from a place where no cut can be to the reason, a text.

        A cut after call i has the place i.
        """
        return forbidden_cuts.reasons(
            self.calls, self.crossing, self.mixed, self._traced
        )

    @functools.cached_property
    def _traced(self):
        return keras_functional.specs_in_a_trace(self._functional, self.calls)

    @functools.cached_property
    def _mixed(self):
        return keras_functional.mixed(
            self._functional, self.calls, self._traced
        )

    @property
    def mixed(self):
        """Dict from tensors' ids to calls' names.

        Of the tensors whose first axis is not that of the examples.
        """
        return self._mixed[0]

    @property
    def pairs(self):
        """Names of the calls that make numbers of pairs of examples."""
        return list(dict.fromkeys(self._mixed[1].values()))

    @property
    def num_examples(self):
        """The number of examples of every batch; None of any number."""
        return self._functional.inputs[0].shape[0]

    def new_variables(self, kind="trainable_variables"):
        """For each call, the variables of its layer that no earlier one has.

        A list of lists; `kind` is the attribute of a layer that has them.
        """
        seen, found = set(), []
        for call in self.calls:
            variables = getattr(call.operation, kind, [])
            found.append([v for v in variables if id(v) not in seen])
            seen.update(map(id, variables))
        return found

    def example_shape(self, tensor):
        """The shape of one example of a symbolic tensor: a list."""
        return example_shape(self._shapes.get(id(tensor), tensor))

    @property
    def unknown_size(self):
        """The number that unknown sizes count as; None if there are none."""
        tensors = [*self._functional.inputs]
        tensors += [tensor for call in self.calls for tensor in call.outputs]
        shapes = [self._shapes.get(id(each), each).shape for each in tensors]
        is_known = all(None not in tuple(shape)[1:] for shape in shapes)
        return None if is_known else UNKNOWN_SIZE

    @property
    def places(self):
        """The places of all possible cuts."""
        between = range(len(self.calls) - 1)
        return [place for place in between if place not in self.forbidden]

    def crossing(self, place):
        """The tensors that cross a cut, in the order of the calls."""
        return [
            tensor
            for call in self.calls[: place + 1]
            for tensor in call.outputs
            if self._needed_until.get(id(tensor), -1) > place
        ]

    def after(self, names):
        """The places of the cuts after layers, by the layers' names.

        Args:
            names: list of names, in the order of the layers' last calls.

        Returns:
            List of places.

        Raises:
            ValueError: if a layer is unknown, out of order or the last, or if
                no cut can be there (`forbidden`).
        """
        last = {call.name: i for i, call in enumerate(self.calls)}
        for name in names:
            checks.one_of("layer name", name, list(last))
        places = [last[name] for name in names]
        if places != sorted({*places}) or places[-1:] == [len(self.calls) - 1]:
            raise ValueError(
                "Cuts must stand in the model's order, each before the last "
                f"layer. Received: {names}; the model's order: "
                f"{sorted(last, key=last.get)}."
            )
        self.check_possible(places)
        return places

    def check_possible(self, places):
        """Raises ValueError if no cut can be at a place (`forbidden`)."""
        for place in places:
            if place in self.forbidden:
                raise ValueError(
                    f"The model cannot be cut after '{self.calls[place].name}'"
                    f": {self.forbidden[place]}"
                )

    def parts(self, places):
        """List of the `Part`s between cuts, by the cuts' places in order."""
        bounds = [-1, *places, len(self.calls) - 1]
        return [
            self._part(begin, end)
            for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
        ]

    def _part(self, before, last):
        calls = self.calls[before + 1 : last + 1]
        received = self.crossing(before)
        is_last = last == len(self.calls) - 1
        sent = self.outputs if is_last else self.crossing(last)
        taken = collections.OrderedDict(
            (id(tensor), tensor) for call in calls for tensor in call.inputs
        )
        # An output of the model may be an input.
        taken.update((id(t), t) for t in sent if id(t) in self._inputs)
        inputs = [t for i, t in taken.items() if i in self._inputs]
        arrived = [i for i, t in enumerate(received) if id(t) in taken]
        arriving = [*inputs, *(received[i] for i in arrived)]
        made = [
            tensor
            for call in calls
            for tensor in call.outputs
            if self._needed_until.get(id(tensor), -1) > last
        ]
        return Part(
            names=tuple(call.name for call in calls),
            inputs=tuple(self._inputs[id(tensor)] for tensor in inputs),
            received=tuple(received),
            sent=tuple(sent),
            taken=tuple(arrived),
            arriving=tuple(arriving),
            made=tuple(made),
            model=keras_functional.part_of(
                self._functional, calls, arriving, made
            ),
            logits_functions=self._logits_functions,
        )


def shared(
    seconds,
    places,
    num_ranks,
    size,
    crossing_seconds=None,
    sum_seconds=None,
    again_seconds=None,
    handling_seconds=None,
):
    """The cuts, and the ranks of each stage, with the smallest largest stage.

    The ranks of a stage share each mini-batch: with m of them its passes take
    the m-th part of the time, and its gradients are summed,

        seconds / m + 2 (m - 1) / m sum_seconds

    Args:
        seconds: list of the calls' times.
        places: possible cuts.
        num_ranks: for each of N stages, the possible numbers of its ranks.
        size: the number of all ranks.
        crossing_seconds: dict from a place to the time in which the tensors
            that cross it travel, while stages compute; by default 0.
        sum_seconds: list of the times in which the gradients of the calls'
            weights travel once; by default 0.
        again_seconds: list of the times that the calls take besides in all
            stages but the last one, which compute them again for their backward
            passes; by default 0.
        handling_seconds: dict from a place to the processor time in which a
            stage sends the tensors that cross it and receives their gradients;
            by default 0.

    Returns:
        `(list of N - 1 places, list of the numbers of ranks)`. Of equal ones,
        the earliest cuts.

    Raises:
        ValueError: if there are not enough places.

    Example:

    >>> shared([3.0, 1.0, 1.0, 1.0], [0, 1, 2], [[1]] * 2, size=2)
    ([0], [1, 1])
    >>> shared([1.0, 9.0, 1.0], [0, 1], [[1, 2]] * 2, size=3)
    ([0], [1, 2])
    >>> shared([1.0, 9.0, 1.0], [0, 1], [[1, 2]] * 2, size=3,
    ...        handling_seconds={0: 6.0, 1: 0.0})
    ([1], [2, 1])

    References:
        PipeDream (arXiv:1806.03377), 3.1 (its dynamic program). That hides
        sums behind computation; here they come after it.
    """
    num_stages = len(num_ranks)
    if len(places) < num_stages - 1:
        raise ValueError(
            f"A model with {len(places)} possible cuts cannot be cut into "
            f"{num_stages} stages. Use at most {len(places) + 1}, or a model "
            "of more layers."
        )
    none = [0.0] * len(seconds)
    computed, summed, again = (
        [0.0, *itertools.accumulate(each or none)]
        for each in (seconds, sum_seconds, again_seconds)
    )
    last = len(seconds) - 1

    def cost(cut, end, number):
        """The time of the calls behind a cut, up to another."""
        work = computed[end + 1] - computed[cut + 1]
        if end < last:
            work += again[end + 1] - again[cut + 1]
        sums = 2 * (number - 1) * (summed[end + 1] - summed[cut + 1])
        return (work + sums) / number

    messages = crossing_seconds or {}, handling_seconds or {}
    given = cost, *messages, sorted(places), last, size
    most = math.inf
    few, left = divmod(size, num_stages)
    even = [[few + (stage < left)] for stage in range(num_stages)]
    pairs = zip(even, num_ranks, strict=True)
    if all(len(allowed) > 1 and of[0] in allowed for of, allowed in pairs):
        # It is found soon, and leaves few others to look at.
        most, *_ = _fastest(*given, even)
    _, cuts, ranks = _fastest(*given, num_ranks, most)
    return cuts, ranks


def _fastest(
    cost, crossing, handling, places, last, size, num_ranks, most=math.inf
):
    """`(seconds of the slowest stage or message, cuts, ranks)`, see `shared`.

    Args:
        cost: function of a cut, the next one and the number of ranks between
            them, to seconds that grow with the next cut.
        crossing, handling, size, num_ranks: as for `shared`.
        places: sorted list of the possible cuts.
        last: the last call.
        most: seconds that the result does not exceed, if known.
    """
    # For each cut, and number of ranks up to it: the bottleneck of the stages
    # so far, their ends, and their ranks.
    best = {(-1, 0): (0.0, [], [])}
    ends = [places] * (len(num_ranks) - 1) + [[last]]
    for allowed, ends_here in zip(num_ranks, ends, strict=True):
        found = {}
        for (cut, used), (slowest, cuts, ranks) in best.items():
            so_far = max(slowest, crossing.get(cut, 0))
            if so_far > most:
                continue
            behind = ends_here[bisect.bisect(ends_here, cut) :]
            for number in (n for n in allowed if used + n <= size):
                for end in behind:
                    seconds = cost(cut, end, number)
                    if seconds > most:
                        break
                    handled = handling.get(cut, 0) + handling.get(end, 0)
                    seconds += handled / number
                    key = end, used + number
                    option = (
                        max(so_far, seconds),
                        [*cuts, end],
                        [*ranks, number],
                    )
                    found[key] = min(option, found.get(key, option))
        best = found
    slowest, [*cuts, _], ranks = best[last, size]
    return slowest, cuts, ranks
