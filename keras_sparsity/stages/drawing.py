"""A schedule as a picture in text, drawn from its task lists."""

from keras_sparsity.stages.schedule import Kind
from keras_sparsity.stages.simulation import simulate

_LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}


def drawn(schedule):
    """A line for each stage, a column for each unit of time.

    A pass takes one unit; messages and updates take none.

    Args:
        schedule: `Schedule`.

    Returns:
        A string: `F2` is the forward pass of batch 2, `B2` its backward pass.

    Raises:
        ValueError: if the schedule deadlocks.

    Example:

    >>> from keras_sparsity.stages.schedule import gpipe
    >>> print(drawn(gpipe(2, 2)))
    stage 0  F0 F1 .. .. B0 B1
    stage 1  .. F0 F1 B0 B1 ..

    References:
        SpecTrain (arXiv:1809.02839), figure 2; GPipe (arXiv:1811.06965),
        figure 2.
    """
    timeline = simulate(schedule)
    width = len(f"F{schedule.num_batches - 1}")
    lines = []
    for stage, starts in enumerate(timeline.starts):
        cells = ["." * width] * timeline.seconds
        for task, start in starts.items():
            if task.kind in _LETTERS:
                name = f"{_LETTERS[task.kind]}{task.batch}"
                cells[start] = name.ljust(width)
        lines.append(f"stage {stage}  {' '.join(cells)}".rstrip())
    return "\n".join(lines)
