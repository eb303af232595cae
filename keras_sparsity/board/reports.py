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
    events = _events(log_dir)
    (*_, (step, plan)) = _texts(events, PLAN)
    when = f"after {step} steps" if step else "before training"
    print_markdown(f"The plan, {when}:\n\n{plan}")


def show(log_dir):
    """Prints the latest plan, the latest figures and the searches."""
    show_plan(log_dir)
    events = _events(log_dir)
    figures, searches = [], []
    for tag in sorted(events.Tags()["tensors"]):
        kind, _, name = tag.partition("/")
        if kind in _UNITS:
            last = events.Tensors(tag)[-1]
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


def _events(log_dir):
    search_plot.check_installed()
    from tensorboard.backend.event_processing import event_accumulator

    folder = os.path.join(log_dir, RUN)
    if not os.path.isdir(folder):
        raise ValueError(
            f"{log_dir!r} has no folder {RUN!r}, which "
            "`ks.callbacks.ArchitectureLogger(log_dir)` writes, and the "
            "`write(log_dir)` of the plan of a model in stages."
        )
    events = event_accumulator.EventAccumulator(
        folder, size_guidance={event_accumulator.TENSORS: 0}
    )
    events.Reload()
    if PLAN not in events.Tags()["tensors"]:
        raise ValueError(
            f"{log_dir!r} has no plan yet. It is written after the first "
            "`every_steps` steps."
        )
    return events


def _texts(events, tag):
    """List of `(step, text)`."""
    return [
        (event.step, tf.make_ndarray(event.tensor_proto).item().decode())
        for event in events.Tensors(tag)
    ]
