"""The commands `keras-sparsity plan` and `report`: what they print."""

import functools
import os

from keras_sparsity._tf.requirements import check_requirements
from keras_sparsity.launch.option_types import (
    fraction,
    positive_integer,
    positive_number,
)
from keras_sparsity.planning.specs import MOST_PROCESSES

COMMANDS = {
    "plan": "print how each variable travels, or how to train a saved model",
    "report": "print the plan, its costs, and the searches' results",
}
_count = functools.partial(positive_integer, most=MOST_PROCESSES)
# Options of `plan` for a saved model: type, name of the value, description.
_DESCRIBED = {
    "--machines": (
        _count,
        "N",
        "number of machines; required for a saved model",
    ),
    "--processes-per-machine": (
        _count,
        "L",
        "processes of each; by default 1",
    ),
    "--rate": (
        positive_number,
        "MBIT",
        "Mbit/s of a machine's link in each direction; required for a saved "
        "model",
    ),
    "--latency": (
        positive_number,
        "MS",
        "time of an empty message on a link, in milliseconds (0.1: a fast "
        "local network); by default not counted",
    ),
    "--message": (
        positive_number,
        "MS",
        "processor time to send or to receive a message, in milliseconds "
        "(measured: 0.3 to 0.4); by default not counted",
    ),
    "--message-byte": (
        positive_number,
        "NS",
        "processor time for each byte of a message, in nanoseconds (measured: "
        "about 1); by default not counted",
    ),
    "--memory": (
        positive_number,
        "GB",
        "memory of a process, in 10^9 bytes; by default not compared",
    ),
    "--speed": (
        positive_number,
        "FACTOR",
        "computation of a machine, relative to this one; by default 1",
    ),
    "--batch-size": (
        positive_integer,
        "B",
        "examples of a step over all processes; by default 32 for each",
    ),
    "--alpha": (
        fraction,
        "A",
        "fraction of the rows of each Embedding that a process touches in a "
        "step; by default as if all ids that it looks up differed",
    ),
}
_MORE = (
    " For a saved model and a cluster of --machines with links of --rate, the "
    "predicted steps of all ways to train it, by passes that are measured "
    "here.",
    "",
)


def add_to(commands):
    """Adds the parsers of the commands to those of `keras-sparsity`."""
    plan, report = (
        commands.add_parser(
            name,
            help=shown,
            description=f"{shown.capitalize()}. LOG_DIR is a folder of "
            f"`ks.callbacks.ArchitectureLogger`.{more}",
        )
        for (name, shown), more in zip(COMMANDS.items(), _MORE, strict=True)
    )
    report.add_argument("source", metavar="LOG_DIR")
    plan.add_argument("source", metavar="LOG_DIR | MODEL.keras")
    for name, (kind, metavar, description) in _DESCRIBED.items():
        plan.add_argument(name, type=kind, metavar=metavar, help=description)


def show(options):
    """Prints; raises ValueError for options that do not go together."""
    given = [
        name
        for name in _DESCRIBED
        if getattr(options, name[2:].replace("-", "_"), None) is not None
    ]
    is_model = _is_model(options)
    if given and not is_model:
        raise ValueError(
            f"{', '.join(given)} are for a saved model. Received: the folder "
            f"{options.source!r}. Name a file, MODEL.keras."
        )
    is_described = {"--machines", "--rate"} <= set(given)
    if is_model and not is_described:
        raise ValueError(
            "The plan of a saved model needs --machines and --rate. "
            f"Received: {', '.join(given) or 'neither'}."
        )
    if is_described:
        _check_size(options)
    # These import TensorFlow, which takes seconds.
    check_requirements()
    if is_described:
        _show_described(options)
        return
    from keras_sparsity.board import reports

    shows = {"plan": reports.show_plan, "report": reports.show}
    shows[options.command](options.source)


def _is_model(options):
    """Whether the source is a file, and no folder.

    Raises ValueError if it is neither, or a file for `report`.
    """
    source = options.source
    if not os.path.exists(source):
        raise ValueError(
            f"There is no file or folder {source!r}. Expected: the folder of "
            "an ArchitectureLogger, or for `plan` a saved model."
        )
    is_file = not os.path.isdir(source)
    if is_file and options.command == "report":
        raise ValueError(
            "`report` takes the folder of an ArchitectureLogger. Received: the "
            f"file {source!r}."
        )
    return is_file


def _check_size(options):
    """Raises ValueError if the processes are too many."""
    size = options.machines * (options.processes_per_machine or 1)
    if size > MOST_PROCESSES:
        raise ValueError(
            "--machines times --processes-per-machine must be at most "
            f"{MOST_PROCESSES:,}. Received: {size:,} processes."
        )


def _show_described(options):
    from keras_sparsity.board.described_plan import described
    from keras_sparsity.planning import Cluster

    def scaled(value, factor):
        return None if value is None else value * factor

    cluster = Cluster(
        options.machines,
        options.processes_per_machine or 1,  # a positive integer, if given
        megabits_per_second=options.rate,
        latency_seconds=scaled(options.latency, 1e-3),
        message_seconds=scaled(options.message, 1e-3),
        message_seconds_per_byte=scaled(options.message_byte, 1e-9),
        relative_speed=options.speed or 1.0,
        memory_bytes=scaled(options.memory, 1e9),
    )
    described(
        options.source, cluster, options.batch_size, options.alpha
    ).print()
