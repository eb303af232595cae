"""Reports of `ArchitectureLogger`, on a terminal."""

import os

import tensorflow as tf

from keras_sparsity.board import search_plot
from keras_sparsity.board.written_plan import (
    PLAN,
    RUN,
    as_table,
    print_markdown,
)

_UNITS = {"seconds": (1e3, "ms"), "bytes": (1e-3, "kB")}


def show_plan(log_dir):
    """Prints the latest plan of a log folder."""
    _show_plan(_events(log_dir))


def _show_plan(events):
    (*_, (step, plan)) = _texts(events, PLAN)
    when = f"after {step} steps" if step else "before training"
    print_markdown(f"The plan, {when}:\n\n{plan}")


def show(log_dir):
    """Prints the latest training's plan, last figures and searches.

    Figures are those of the last steps that were logged: a path that had
    messages before alone, or in an earlier training, has none.
    """
    events = _events(log_dir)
    _show_plan(events)
    figures, searches = [], []
    last_step = _last_step(events)
    for tag in sorted(events.Tags()["tensors"]):
        kind, _, name = tag.partition("/")
        if kind in _UNITS:
            last = events.Tensors(tag)[-1]
            if last.step != last_step:
                continue
            value = float(tf.make_ndarray(last.tensor_proto))
            scale, unit = _UNITS[kind]
            figures.append([f"{kind}: {name}", f"{value * scale:,.3f} {unit}"])
        elif kind == "search" and name.endswith("/choice"):
            group = name.removesuffix("/choice")
            choice = _texts(events, tag)[-1][1]
            searches.append(f"Partition search, '{group}': {choice}")
    if figures:
        table = as_table(["per step", ""], figures, "\n".join(searches))
        print_markdown(table)


def _last_step(events):
    """The step of the last figures; None without any."""
    steps = [
        events.Tensors(tag)[-1].step
        for tag in events.Tags()["tensors"]
        if tag.partition("/")[0] in _UNITS
    ]
    return max(steps, default=None)


def _events(log_dir):
    """The events of the training whose plan is the latest."""
    search_plot.check_installed()
    from tensorboard.backend.event_processing import event_accumulator

    folder = os.path.join(log_dir, RUN)
    if not os.path.isdir(folder):
        raise ValueError(
            f"{log_dir!r} has no folder {RUN!r}. Expected: the folder of a "
            "`ks.callbacks.ArchitectureLogger`, or of a plan's `write`."
        )
    trainings = []
    # Each training, and each plan that is written, begins a file.
    for name in (n for n in os.listdir(folder) if "tfevents" in n):
        events = event_accumulator.EventAccumulator(
            os.path.join(folder, name),
            size_guidance={event_accumulator.TENSORS: 0},
        )
        events.Reload()
        if PLAN in events.Tags()["tensors"]:
            trainings.append(events)
    if not trainings:
        raise ValueError(
            f"{log_dir!r} has no plan yet. It is written after the first "
            "`every_steps` steps."
        )
    return max(trainings, key=lambda each: each.Tensors(PLAN)[-1].wall_time)


def _texts(events, tag):
    """List of `(step, text)`."""
    return [
        (event.step, tf.make_ndarray(event.tensor_proto).item().decode())
        for event in events.Tensors(tag)
    ]
