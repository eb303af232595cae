"""The command `keras-sparsity`."""

import argparse
import os
import re
import sys
import tempfile

from keras_sparsity._tf.requirements import check_requirements
from keras_sparsity.launch import environment, hosts
from keras_sparsity.launch.program import RESTARTS_VARIABLE, Program
from keras_sparsity.launch.remote import SSH_VARIABLE, HostError, ssh_command
from keras_sparsity.machines import firewall
from keras_sparsity.machines.settings import (
    TIMEOUT_VARIABLE,
    checked_timeout,
    seed,
)

_SHOWN = {
    "plan": "print how each variable travels, or how to train a saved model",
    "report": "print the plan, its costs, and the searches' results",
}
# Options of `plan` for a saved model: type, name of the value, description.
_DESCRIBED = {
    "--machines": (int, "N", "number of machines"),
    "--processes-per-machine": (int, "L", "processes of each; by default 1"),
    "--rate": (float, "MBIT", "Mbit/s of a machine's link in each direction"),
    "--latency": (float, "MS", "milliseconds of an empty message"),
    "--message": (float, "MS", "milliseconds of a processor that sends it"),
    "--message-byte": (float, "NS", "nanoseconds of it for each byte"),
    "--memory": (float, "GB", "memory of a process"),
    "--speed": (
        float,
        "FACTOR",
        "computation of a machine, relative to this one; by default 1",
    ),
    "--batch-size": (
        int,
        "B",
        "examples of a step over all processes; by default 32 for each",
    ),
    "--alpha": (
        float,
        "A",
        "fraction of the rows of each Embedding that a process touches in a "
        "step; by default that of rows without duplicates",
    ),
}
_MORE = (
    " For a saved model and a cluster of --machines with links of --rate, the "
    "predicted steps of all ways to train it, by passes that are measured "
    "here.",
    "",
)
# Options of `run`: type, name of the value, description.
_OPTIONS = {
    "--servers": (
        int,
        "S",
        "with -n: as many further processes on this machine, dedicated "
        "servers, which own the rows of sharded tables and compute nothing; "
        "on hosts: a:2+1",
    ),
    "--engine": (
        str,
        "NAME",
        "native (the default: TensorFlow's own collectives) or horovod",
    ),
    "--log-dir": (
        str,
        "D",
        "folder for the output of the ranks other than 0 (rank-1.log, ..., "
        "after a restart rank-1.restart-1.log, ...); by default a temporary "
        "one, kept on failure",
    ),
    "--timeout": (
        float,
        "SECONDS",
        "end everything after so long, with each rank's position",
    ),
    "--rank-timeout": (
        float,
        "SECONDS",
        "end everything when a rank has kept the others waiting for so long, "
        f"by default ${TIMEOUT_VARIABLE} or 600; HybridStrategy(timeout=...) "
        "in the script takes precedence",
    ),
    "--max-restarts": (
        int,
        "K",
        "when a rank fails, restart all of them, up to K times; the script, "
        "which must resume by itself (from a checkpoint), gets the same "
        "arguments and random seed, and the number of restarts in "
        f"${RESTARTS_VARIABLE}; a worker without which asynchronous training "
        "goes on is restarted alone, up to K times, and joins the others",
    ),
    "--python": (
        str,
        "PATH",
        "Python on the hosts, by default at the same path as here",
    ),
    "--ssh": (
        str,
        "COMMAND",
        f"ssh client and options, by default ${SSH_VARIABLE} or ssh",
    ),
}


def main(argv=None):
    """Runs the command `keras-sparsity`.

    Args:
        argv: List of arguments; by default those of this process.

    Returns:
        The exit code.

    Raises:
        SystemExit: For wrong usage, and for `--help`.

    Example:

    >>> main(["run", "-n", "1", "train.py"])  # doctest: +SKIP
    0

    References:
        Horovod's `horovodrun`.
    """
    parser, run = _parsers()
    options = parser.parse_args(argv)
    try:
        if options.command in _SHOWN:
            _show(options)
            return 0
        try:
            program = _plan(options)
        except (ValueError, OSError) as error:
            run.error(str(error))
        return program.run()
    except (HostError, ValueError, ImportError, OSError) as error:
        print(f"keras-sparsity: {error}", file=sys.stderr)
        return 1


def _show(options):
    attributes = {name: name[2:].replace("-", "_") for name in _DESCRIBED}
    given = {
        name: value
        for name, attribute in attributes.items()
        if (value := getattr(options, attribute, None)) is not None
    }
    is_model = options.command == "plan" and not os.path.isdir(options.source)
    if given and not is_model:
        raise ValueError(
            f"{', '.join(given)} are for a saved model. Received: the folder "
            f"{options.source!r}. Name a file, MODEL.keras."
        )
    is_described = {"--machines", "--rate"} <= set(given)
    if is_model and (given or os.path.isfile(options.source)):
        if not is_described:
            raise ValueError(
                "The plan of a saved model needs --machines and --rate. "
                f"Received: {', '.join(given) or 'neither'}."
            )
    # These import TensorFlow, which takes seconds.
    check_requirements()
    if is_described:
        _show_described(options)
        return
    from keras_sparsity.board import reports

    shows = {"plan": reports.show_plan, "report": reports.show}
    shows[options.command](options.source)


def _show_described(options):
    from keras_sparsity.board.described_plan import described
    from keras_sparsity.planning import Cluster

    def scaled(value, factor):
        return None if value is None else value * factor

    cluster = Cluster(
        options.machines,
        1
        if options.processes_per_machine is None
        else options.processes_per_machine,
        megabits_per_second=options.rate,
        latency_seconds=scaled(options.latency, 1e-3),
        message_seconds=scaled(options.message, 1e-3),
        message_seconds_per_byte=scaled(options.message_byte, 1e-9),
        relative_speed=1.0 if options.speed is None else options.speed,
        memory_bytes=scaled(options.memory, 1e9),
    )
    described(
        options.source, cluster, options.batch_size, options.alpha
    ).print()


def _parsers():
    """The command's parser, and that of `run`."""
    parser = argparse.ArgumentParser(
        prog="keras-sparsity",
        description="Data-parallel training of Keras models.",
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="command"
    )
    run = commands.add_parser(
        "run",
        help="start a script in several processes",
        description=(
            "Starts a script in several processes, which train one model "
            "together. Shows the output of rank 0 and keeps the others' in "
            "files; if one fails, ends all, and names the rank and the reason."
        ),
        usage=(
            "%(prog)s (-n N [--servers S] | --hosts a:2,b:2 | --hostfile F) "
            "[options] "
            "script.py [its arguments]"
        ),
        epilog=hosts.HOSTFILE_FORMAT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run_options(run)
    plan, report = (
        commands.add_parser(
            name,
            help=shown,
            description=f"{shown.capitalize()}. LOG_DIR is a folder of "
            f"`ks.callbacks.ArchitectureLogger`.{more}",
        )
        for (name, shown), more in zip(_SHOWN.items(), _MORE, strict=True)
    )
    report.add_argument("source", metavar="LOG_DIR")
    plan.add_argument("source", metavar="LOG_DIR | MODEL.keras")
    _add_options(plan, _DESCRIBED)
    return parser, run


def _add_options(parser, options):
    for name, (kind, metavar, description) in options.items():
        parser.add_argument(name, type=kind, metavar=metavar, help=description)


def _add_run_options(parser):
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "-n",
        "--num-processes",
        type=int,
        metavar="N",
        help="number of processes on this machine",
    )
    where.add_argument(
        "--hosts",
        metavar="a:2,b:2",
        help="number of processes on each of these machines, over ssh; "
        "'localhost' is this one; a:2+1 has a dedicated server, too",
    )
    where.add_argument(
        "--hostfile", metavar="F", help="a file of hosts, see below"
    )
    _add_options(parser, _OPTIONS)
    parser.set_defaults(max_restarts=0)
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set an environment variable, or pass it to other machines "
        "(those of Python, TensorFlow, Keras, Horovod, NCCL and CUDA are "
        "always passed); may be repeated",
    )
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="'script.py' is a module's name, as with python -m",
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, help="with its arguments"
    )


def _plan(options):
    """The checked `Program` of the options."""
    for name, value in vars(options).items():
        if value == [] and name not in ("env", "script") or [] in options.env:
            # Python 3.10 to 3.12 parse it as that.
            raise ValueError("an option's value cannot be '--'.")
    where = _hosts(options)
    hosts.places(where)  # raises where servers are alone
    environment.check_timeout(options.timeout)
    environment.check_memory(
        sum(host.num_processes for host in where if host.is_local)
    )
    _check_remote(options, all(host.is_local for host in where))
    variables = _variables(options)
    if options.max_restarts < 0:
        raise ValueError(
            "--max-restarts must be 0 or more. "
            f"Received: {options.max_restarts}."
        )
    engine = environment.resolve_engine(
        options.engine, sum(host.num_processes for host in where)
    )
    target = _target(options)
    _check_log_dir(options.log_dir)
    return Program(
        hosts=where,
        engine=engine,
        kind="module" if options.module else "script",
        target=target,
        variables=variables,
        log_dir=options.log_dir,
        timeout_seconds=options.timeout,
        max_restarts=options.max_restarts,
        ssh=options.ssh,
        python=options.python,
    )


def _check_remote(options, are_local):
    """Checks the options that are for other hosts."""
    for name in ("python", "ssh"):
        value = getattr(options, name)
        if are_local and value is not None:
            raise ValueError(
                f"--{name} is for other hosts; leave it out. "
                f"Received: --{name} {value!r}."
            )
    if not are_local:
        ssh_command(options.ssh)
        if options.python is not None and not options.python.strip():
            raise ValueError(
                "--python takes the path of Python on the hosts. "
                f"Received: {options.python!r}."
            )


def _check_log_dir(path):
    if path is None:
        return
    try:
        os.makedirs(path, exist_ok=True)
        # Root may write anywhere but where nobody can.
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise ValueError(
            "--log-dir takes a folder to write to, created if missing. "
            f"Received: {path!r}, which fails: {error}."
        ) from error


def _hosts(options):
    if options.servers is not None:
        if options.num_processes is None:
            raise ValueError(
                "--servers is for -n; on hosts, name the number of servers "
                "behind that of workers: --hosts a:2+1,b:0+2. Received: "
                f"--servers {options.servers}."
            )
        if options.servers < 0:
            raise ValueError(
                "--servers takes a number of processes, or 0. "
                f"Received: {options.servers}."
            )
    if options.hosts is not None:
        return hosts.parse_hosts(options.hosts)
    if options.hostfile is not None:
        return hosts.parse_hostfile(options.hostfile)
    return hosts.local_hosts(
        options.num_processes, num_servers=options.servers or 0
    )


def _target(options):
    if not options.script:
        raise ValueError("name the script to run, after all options.")
    name = options.script[0]
    if not options.module and not os.path.exists(name):
        hint = ""
        if name.startswith("-"):
            hint = " For the options of keras-sparsity see --help."
        raise ValueError(f"there is no script {name!r}.{hint}")
    return options.script


def _variables(options):
    """The variables that the options set, after checks of all settings."""
    variables = {}
    for entry in options.env:
        name, equals, value = entry.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(
                f"--env takes NAME or NAME=VALUE. Received: {entry!r}."
            )
        if not equals and name not in os.environ:
            raise ValueError(f"--env {name}: there is no such variable here.")
        variables[name] = value if equals else os.environ[name]
    if options.rank_timeout is not None:
        seconds = checked_timeout(options.rank_timeout, "--rank-timeout")
        variables[TIMEOUT_VARIABLE] = f"{seconds:g}"
    given = {**os.environ, **variables}
    checked_timeout(given.get(TIMEOUT_VARIABLE, 600), TIMEOUT_VARIABLE)
    seed(given)
    firewall.given_networks()
    return variables
