"""The command `keras-sparsity`."""

import argparse
import os
import re
import sys
import tempfile

from keras_sparsity import firewall
from keras_sparsity._requirements import check_requirements
from keras_sparsity.launch import environment, hosts
from keras_sparsity.launch.program import RESTARTS_VARIABLE, Program
from keras_sparsity.launch.remote import SSH_VARIABLE, HostError, ssh_command
from keras_sparsity.settings import TIMEOUT_VARIABLE, checked_timeout, seed

_SHOWN = {
    "plan": "print how each variable travels",
    "report": "print that, its costs, and what was searched",
}


def main(argv=None):
    """Runs the command; returns its exit code."""
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
            "files; when one fails, ends all and says which and why."
        ),
        usage=(
            "%(prog)s (-n N | --hosts a:2,b:2 | --hostfile F) [options] "
            "script.py [its arguments]"
        ),
        epilog=hosts.HOSTFILE_FORMAT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run_options(run)
    for name, shown in _SHOWN.items():
        show = commands.add_parser(
            name,
            help=shown,
            description=f"{shown.capitalize()}, as "
            "`ks.callbacks.ArchitectureLogger(LOG_DIR)` wrote it.",
        )
        show.add_argument("log_dir", metavar="LOG_DIR")
    options = parser.parse_args(argv)
    try:
        if options.command in _SHOWN:
            _show(options.command, options.log_dir)
            return 0
        try:
            program = _plan(options)
        except (ValueError, OSError) as error:
            run.error(str(error))
        return program.run()
    except (HostError, ValueError, ImportError, OSError) as error:
        print(f"keras-sparsity: {error}", file=sys.stderr)
        return 1


def _show(command, log_dir):
    # Not before it is known that TensorFlow is needed: importing it takes
    # seconds.
    check_requirements()
    from keras_sparsity import reports

    show = {"plan": reports.show_plan, "report": reports.show}[command]
    show(log_dir)


def _add_run_options(parser):
    where = parser.add_argument_group("where")
    where.add_argument(
        "-n",
        "--num-processes",
        type=int,
        metavar="N",
        help="so many processes on this machine",
    )
    where.add_argument(
        "--hosts",
        metavar="a:2,b:2",
        help="so many processes on each of these machines, over ssh; "
        "'localhost' is this one",
    )
    where.add_argument(
        "--hostfile", metavar="F", help="a file of hosts, see below"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--engine",
        metavar="NAME",
        help="native (the default: TensorFlow's own collectives) or horovod",
    )
    how.add_argument(
        "--log-dir",
        metavar="D",
        help="folder for the output of the ranks other than 0 "
        "(rank-1.log, ..., after a restart rank-1.restart-1.log, ...); by "
        "default a temporary one, kept on failure",
    )
    how.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="end everything after so long, showing where each rank was",
    )
    how.add_argument(
        "--rank-timeout",
        type=float,
        metavar="SECONDS",
        help="end everything when a rank has kept the others waiting for so "
        f"long, by default ${TIMEOUT_VARIABLE} or 600; "
        "HybridStrategy(timeout=...) in the script goes before it",
    )
    how.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="when a rank fails, start all of them anew, up to K times; the "
        "script, which has to resume by itself (from a checkpoint), gets the "
        "same arguments and random seed and finds the number of restarts in "
        f"${RESTARTS_VARIABLE}",
    )
    how.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set an environment variable, or pass it on to other machines "
        "(those about Python, TensorFlow, Keras, Horovod, NCCL and CUDA are "
        "passed by themselves); may be repeated",
    )
    how.add_argument(
        "--python",
        metavar="PATH",
        help="Python on the hosts, by default at the same path as here",
    )
    how.add_argument(
        "--ssh",
        metavar="COMMAND",
        help=f"ssh client and options, by default ${SSH_VARIABLE} or ssh",
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="'script.py' is a module's name, as with python -m",
    )
    what.add_argument(
        "script", nargs=argparse.REMAINDER, help="with its arguments"
    )


def _plan(options):
    """The checked options: what is to run where."""
    for name, value in vars(options).items():
        if value == [] and name not in ("env", "script") or [] in options.env:
            # Python 3.10 to 3.12 make that of it.
            raise ValueError("an option's value cannot be '--'.")
    where = _hosts(options)
    environment.check_timeout(options.timeout)
    num_processes = sum(host.num_slots for host in where)
    environment.check_memory(
        sum(host.num_slots for host in where if host.is_local)
    )
    if all(host.is_local for host in where):
        if options.python is not None:
            raise ValueError(
                "--python is for other hosts; here it is the Python that runs "
                f"keras-sparsity. Received: --python {options.python}."
            )
        if options.ssh is not None:
            raise ValueError(
                "--ssh is for other hosts; leave it out. "
                f"Received: --ssh {options.ssh!r}."
            )
    else:
        ssh_command(options.ssh)
        if options.python is not None and not options.python.strip():
            raise ValueError(
                "--python takes the path of Python on the hosts. "
                f"Received: {options.python!r}."
            )
    variables = _variables(options.env)
    if options.rank_timeout is not None:
        seconds = checked_timeout(options.rank_timeout, "--rank-timeout")
        variables[TIMEOUT_VARIABLE] = f"{seconds:g}"
    given = {**os.environ, **variables}
    checked_timeout(given.get(TIMEOUT_VARIABLE, 600), TIMEOUT_VARIABLE)
    seed(given)
    firewall.given_networks()
    if options.max_restarts < 0:
        raise ValueError(
            "--max-restarts must be 0 or more. "
            f"Received: {options.max_restarts}."
        )
    engine = environment.resolve_engine(options.engine, num_processes)
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
            "--log-dir takes a folder to write to, made if it is not there. "
            f"Received: {path!r}, where this fails: {error}."
        ) from error


def _hosts(options):
    ways = {
        "-n": options.num_processes,
        "--hosts": options.hosts,
        "--hostfile": options.hostfile,
    }
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            "say how many processes by one of -n N, --hosts a:2,b:2 and "
            f"--hostfile F. Received: {' and '.join(given) or 'none of them'}."
        )
    if options.hosts is not None:
        return hosts.parse_hosts(options.hosts)
    if options.hostfile is not None:
        return hosts.parse_hostfile(options.hostfile)
    return hosts.local_hosts(options.num_processes)


def _target(options):
    if not options.script:
        raise ValueError("name the script to run, after all options.")
    name = options.script[0]
    if not options.module and not os.path.exists(name):
        hint = ""
        if name.startswith("-"):
            hint = " Options of keras-sparsity that it knows: see --help."
        raise ValueError(f"there is no script {name!r}.{hint}")
    return options.script


def _variables(entries):
    variables = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(
                f"--env takes NAME or NAME=VALUE. Received: {entry!r}."
            )
        if equals:
            variables[name] = value
        elif name in os.environ:
            variables[name] = os.environ[name]
        else:
            raise ValueError(f"--env {name}: there is no such variable here.")
    return variables
