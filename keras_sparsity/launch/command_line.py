"""The command `keras-sparsity`."""

import argparse
import signal
import sys

from keras_sparsity._version import __version__
from keras_sparsity.launch import run_command, show_commands
from keras_sparsity.launch.remote import HostError


def main(argv=None):
    """Runs the command `keras-sparsity`.

    Args:
        argv: List of arguments; by default those of this process.

    Returns:
        The exit code.

    Raises:
        SystemExit: For wrong usage, `--help` and `--version`.

    Example:

    >>> main(["run", "-n", "1", "train.py"])  # doctest: +SKIP
    0

    References:
        Horovod's `horovodrun`.
    """
    parser = argparse.ArgumentParser(
        prog="keras-sparsity",
        description="Distributed training of Keras models.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    run = run_command.add_to(commands)
    show_commands.add_to(commands)
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        if options.command in show_commands.COMMANDS:
            show_commands.show(options)
            return 0
        try:
            program = run_command.program(options)
        except (ValueError, OSError) as error:
            run.error(str(error))
        return program.run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # as in a shell
    except (HostError, ValueError, ImportError, OSError) as error:
        print(f"keras-sparsity: {error}", file=sys.stderr)
        return 1
