"""The command `keras-sparsity run`: its options, and their checks."""

import argparse
import functools
import os
import re
import tempfile

from keras_sparsity.launch import environment, hosts
from keras_sparsity.launch.option_types import (
    number_from_zero,
    one_of,
    positive_integer,
    positive_number,
)
from keras_sparsity.launch.program import RESTARTS_VARIABLE, Program
from keras_sparsity.launch.remote import SSH_VARIABLE, ssh_command
from keras_sparsity.machines import firewall
from keras_sparsity.machines.settings import (
    ENGINES,
    TIMEOUT_VARIABLE,
    checked_timeout,
    seed,
)

# Type, name of the value, description.
_OPTIONS = {
    "--servers": (
        number_from_zero,
        "S",
        "with -n: start S more processes on this machine, dedicated servers, "
        "which own the rows of sharded tables and train on no examples; with "
        "--hosts write a:2+1",
    ),
    "--engine": (
        functools.partial(one_of, choices=ENGINES),
        "NAME",
        "native (the default: TensorFlow's own collectives), horovod, or "
        "local, for -n 1",
    ),
    "--log-dir": (
        str,
        "D",
        "folder for the output of the ranks other than 0 (rank-1.log, ..., "
        "after a restart rank-1.restart-1.log, ...); by default a temporary "
        "one, kept on failure",
    ),
    "--timeout": (
        positive_number,
        "SECONDS",
        "end the run after that time, and print the line at which each rank is",
    ),
    "--rank-timeout": (
        float,
        "SECONDS",
        "end the run when a rank has kept the others waiting for that long, "
        f"by default ${TIMEOUT_VARIABLE} or 600; HybridStrategy(timeout=...) "
        "in the script takes precedence",
    ),
    "--max-restarts": (
        number_from_zero,
        "K",
        "restart all ranks after a failure, up to K times. Each attempt has "
        "the same arguments and random seed, and the number of restarts in "
        f"${RESTARTS_VARIABLE}; the script resumes by a ShardedCheckpoint. In "
        "asynchronous training with dedicated servers a lost worker or server "
        "is restarted alone, up to K times",
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


def add_to(commands):
    """Adds the command's parser to those of `keras-sparsity`; returns it."""
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
    _add_options(run)
    return run


def _add_options(run):
    where = run.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "-n",
        "--num-processes",
        type=positive_integer,
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
    for name, (kind, metavar, description) in _OPTIONS.items():
        run.add_argument(name, type=kind, metavar=metavar, help=description)
    run.set_defaults(max_restarts=0)
    run.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set an environment variable, or pass it to other machines "
        "(those of Python, TensorFlow, Keras, Horovod, NCCL and CUDA are "
        "always passed); may be repeated",
    )
    run.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="'script.py' is a module's name, as with python -m",
    )
    run.add_argument(
        "script", nargs=argparse.REMAINDER, help="with its arguments"
    )


def program(options):
    """The `Program` of parsed options; an error, if one is not valid."""
    for name, value in vars(options).items():
        if value == [] and name not in ("env", "script") or [] in options.env:
            # Python 3.10 to 3.12 parse it as that.
            raise ValueError("an option's value cannot be '--'.")
    where = _hosts(options)
    hosts.places(where)  # raises where servers are alone
    environment.check_memory(
        sum(host.num_processes for host in where if host.is_local)
    )
    _check_remote(options, all(host.is_local for host in where))
    variables = _variables(options)
    engine = environment.resolve_engine(
        options.engine,
        sum(host.num_processes for host in where),
        native="--engine native",
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
    if options.servers is not None and options.num_processes is None:
        raise ValueError(
            "--servers is for -n; on hosts, name the number of servers behind "
            "that of workers: --hosts a:2+1,b:0+2. Received: --servers "
            f"{options.servers}."
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
        elif name.startswith("python"):
            hint = " Leave the interpreter out: keras-sparsity run train.py."
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
