"""Where a model is cut: as the user says, or by measured times."""

from keras_sparsity._tf import checks
from keras_sparsity.stages import timing
from keras_sparsity.stages.cutting import balanced


def places(cutter, strategy, profile):
    """The places of the cuts, the same on all ranks.

    Args:
        cutter: `Cutter`.
        strategy: the strategy; its `stages` say where, if it has any.
        profile: see `StagedStrategy.profile`.

    Raises:
        ValueError: if `stages` does not fit the model or the processes.
    """
    size, stages = max(strategy.stages_of_ranks) + 1, strategy.stages
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
    order = list(dict.fromkeys(call.name for call in cutter.calls))
    names = [name for stage in stages for name in stage]
    if sorted(names) != sorted(order) or not all(stages):
        missing = [name for name in order if name not in names]
        unknown = [name for name in names if name not in order]
        raise ValueError(
            "`stages` must have each layer once, and a layer in each stage. "
            f"Received: stages={checks.spell(stages)}; missing: {missing}; "
            f"unknown: {unknown}."
        )
    ends = []
    for stage in stages[:-1]:
        ends.append(max(stage, key=order.index))
    begin = 0
    for stage in stages:
        expected = order[begin : begin + len(stage)]
        begin += len(stage)
        if sorted(stage) != sorted(expected):
            raise ValueError(
                "Stages must stand in the model's order. Received: "
                f"{checks.spell(stage)}; the model's order here: {expected}."
            )
    return ends


def measured_places(cutter, strategy):
    """The cuts with the smallest largest stage, or message if that is larger.

    By rank 0's times and the slowest link.
    """
    communicator, num_stages = strategy.collectives, strategy.num_stages
    if num_stages == 1:
        return []
    of_links = [link.seconds_per_byte() for link in strategy.links if link]
    seconds = None
    if communicator.rank == 0:
        seconds = timing.call_seconds(cutter)
    found = communicator.gather_objects(
        (seconds, max(of_links)), name="pipeline/seconds"
    )
    # Activations and gradients travel in opposite directions, at once.
    slowest = max(each for _, each in found)
    crossing_seconds = {
        place: size * slowest
        for place, size in timing.crossing_bytes(cutter).items()
    }
    seconds, _ = found[0]
    return balanced(seconds, cutter.places, num_stages, crossing_seconds)
