"""Where a model is cut: as the user says, or by measured times."""

import functools

import keras
import numpy as np

from keras_sparsity._tf import checks
from keras_sparsity.stages import timing
from keras_sparsity.stages.attempts import attempted
from keras_sparsity.stages.cutting import shared
from keras_sparsity.stages.profile import gradient_sizes


def places(cutter, strategy, profile):
    """The places of the cuts, the same on all ranks.

    By `strategy.planned_cuts` or `strategy.stages`; an error, if these do not
    fit the model or the processes.
    """
    size, stages = strategy.num_stages, strategy.stages
    if strategy.planned_cuts is not None:
        return strategy.planned_cuts.places_in(cutter)
    if stages is None:
        return strategy.found_places(cutter, profile)
    if stages and isinstance(stages[0], list):
        stages = _ends_of_lists(cutter, stages)
    if len(stages) != size - 1:
        raise ValueError(
            f"{strategy.size} processes train {size} stages, so the model is "
            f"cut {size - 1} times. Received: {checks.spell(strategy.stages)}. "
            "Expected: the name of the last layer of each stage but the last "
            "one's; a list of names for each stage; or None."
        )
    return cutter.after(stages)


def _ends_of_lists(cutter, stages):
    names = [name for stage in stages for name in stage]
    # Operations may be left out: Keras makes some, for masks. Of a layer that
    # is called twice, its last call counts.
    last = {
        call.name: place
        for place, call in enumerate(cutter.calls)
        if isinstance(call.operation, keras.layers.Layer) or call.name in names
    }
    order = sorted(last, key=last.get)
    if sorted(names) != sorted(order) or not all(stages):
        missing = [name for name in order if name not in names]
        unknown = [name for name in names if name not in order]
        repeated = [name for name in order if names.count(name) > 1]
        raise ValueError(
            "`stages` must have each layer once, and a layer in each stage. "
            f"Received: stages={checks.spell(stages)}; missing: {missing}; "
            f"unknown: {unknown}; more than once: {repeated}."
        )
    begin = 0
    for stage in stages:
        expected = order[begin : begin + len(stage)]
        begin += len(stage)
        if sorted(stage) != sorted(expected):
            raise ValueError(
                "Stages must stand in the model's order. Received: "
                f"{checks.spell(stage)}; the model's order here: {expected}."
            )
    return [max(stage, key=order.index) for stage in stages[:-1]]


def measured(cutter, strategy):
    """`cutting.shared` by the times of a mini-batch of 32 examples.

    The same on all ranks; every rank calls it. Calls' times are those of rank
    0, those of messages are of the slowest link.

    Returns:
        Function of the places, and the numbers of ranks.

    Raises:
        AttemptError: on all ranks, if a pass fails on rank 0.
    """
    communicator = strategy.collectives
    speeds = [link.seconds_per_byte() for link in strategy.links if link]

    def measure():
        seconds = again_seconds = None
        if communicator.rank == 0:
            seconds = timing.call_seconds(cutter)
            if not strategy.is_flushed:
                again_seconds = timing.call_seconds(cutter, has_backward=False)
        return seconds, again_seconds, speeds

    found = attempted(communicator, measure, "pipeline/seconds")
    # Activations and gradients travel in opposite directions, at once.
    slowest, handled = np.max(
        [(0.0, 0.0), *(each for *_, of_rank in found for each in of_rank)],
        axis=0,
    )
    seconds, again_seconds, _ = found[0]
    sizes = timing.crossing_bytes(cutter)
    return functools.partial(
        shared,
        seconds,
        crossing_seconds={p: size * slowest for p, size in sizes.items()},
        sum_seconds=[
            each.dense_bytes * slowest for each in gradient_sizes(cutter)
        ],
        again_seconds=again_seconds,
        handling_seconds={p: 2 * size * handled for p, size in sizes.items()},
    )
