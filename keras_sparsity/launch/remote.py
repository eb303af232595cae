"""Processes on other machines, over the system's ssh client."""

import concurrent.futures
import dataclasses
import json
import os
import shlex
import socket
import subprocess
import sys

from keras_sparsity.launch.processes import LIFELINE_VARIABLE

SSH_VARIABLE = "KERAS_SPARSITY_SSH"
# No questions, as nobody could answer; a dead machine is noticed in a minute.
_SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=20"
_PROBE_TIMEOUT_SECONDS = 120
_NO_SUCH_COMMAND = (126, 127)
_SSH_FAILED = 255

# Of the environment only what is about the program goes to other machines:
# their PATH, HOME and the like are their own.
_PASSED_PREFIXES = (
    "CUDA_",
    "GLOO_",
    "GRPC_",
    "HOROVOD_",
    "KERAS_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTHON",
    "TF_",
    "XLA_",
)
_NOT_PASSED = ("PYTHONHOME", SSH_VARIABLE, LIFELINE_VARIABLE)

# What the remote shell starts: it reads the environment from its standard
# input (on the command line every user of the machine could read it) and
# becomes the real command, which keeps that input as its lifeline.
_STUB = f"""\
import json, os, sys
line = b""
while not line.endswith(b"\\n"):
    line += os.read(0, 1) or sys.exit("keras-sparsity: no greeting")
call = json.loads(line)
try:
    os.chdir(call["directory"])
except OSError as error:
    sys.exit("keras-sparsity: " + str(error))
os.environ.update(call["environment"], {LIFELINE_VARIABLE}="0")
os.execv(sys.executable, [sys.executable] + call["arguments"])
"""


class HostError(RuntimeError):
    """Raised when hosts cannot take part; lists every one's problem."""


@dataclasses.dataclass
class Machine:
    """What a host's check found.

    Args:
        host: The `Host`.
        address: Its address as the other hosts reach it.
        num_cores: Processor cores.
        ports: A free port for each of its processes.
        launcher_address: Our address as it sees us, None if unknown.
        own_addresses: All addresses of its interfaces.
    """

    host: object
    address: str
    num_cores: int
    ports: list
    launcher_address: str | None
    own_addresses: list


class Remote:
    """How to start Python on hosts.

    Args:
        ssh: Command of the ssh client, as one string; by default the
            environment's KERAS_SPARSITY_SSH, else `ssh` without questions.
        python: Path of Python on the hosts.
        directory: Folder in which to start.
        names: Names of environment variables to pass in any case.
    """

    def __init__(self, ssh=None, python=None, directory=None, names=()):
        self._ssh = shlex.split(ssh or os.environ.get(SSH_VARIABLE) or _SSH)
        self._python = python or sys.executable
        self._directory = directory or os.getcwd()
        self._names = names

    def command(self, host):
        """The command that starts Python on `host`."""
        return [
            *self._ssh,
            host.name,
            shlex.join([self._python, "-c", _STUB]),
        ]

    def greeting(self, arguments, environment):
        """What that command must read first.

        Args:
            arguments: Python's arguments.
            environment: A local rank's whole environment, of which it passes
                what belongs to the program.
        """
        call = {
            "arguments": arguments,
            "directory": self._directory,
            "environment": {
                name: value
                for name, value in environment.items()
                if name in self._names
                or (
                    name.startswith(_PASSED_PREFIXES)
                    and name not in _NOT_PASSED
                )
            },
        }
        return json.dumps(call).encode() + b"\n"

    def check(self, hosts, engine, environment, script=""):
        """Checks all hosts at once.

        Args:
            hosts: List of `Host`.
            engine: Name of the engine.
            environment: The environment that all ranks share.
            script: A path that must exist on each host, or empty.

        Returns:
            List of `Machine`.

        Raises:
            HostError: If any host cannot take part, with each one's problem.
        """
        with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
            found = list(
                pool.map(
                    lambda host: self._probe(host, engine, environment, script),
                    hosts,
                )
            )
        problems = {
            host.name: answer
            for host, answer in zip(hosts, found, strict=True)
            if isinstance(answer, str)
        }
        working = [answer for answer in found if not isinstance(answer, str)]
        for host, answer in zip(hosts, found, strict=True):
            if host.name not in problems:
                problem = self._compare(answer, working[0], script)
                if problem:
                    problems[host.name] = problem
        if problems:
            raise HostError(
                "Nothing was started, because these hosts cannot take part:\n"
                + "\n".join(f"  {h}: {p}" for h, p in problems.items())
            )
        return [
            _machine(host, answer)
            for host, answer in zip(hosts, found, strict=True)
        ]

    def _probe(self, host, engine, environment, script):
        """What the host has, or a string with its problem."""
        arguments = ["-m", "keras_sparsity.launch._probe"]
        arguments += [engine, str(host.num_slots), script]
        command = self.command(host)
        if host.is_local:
            command = [sys.executable, "-c", _STUB]
        try:
            done = subprocess.run(
                command,
                input=self.greeting(arguments, environment),
                capture_output=True,
                timeout=_PROBE_TIMEOUT_SECONDS,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {_PROBE_TIMEOUT_SECONDS} seconds"
        except OSError as error:
            return f"cannot run {command[0]}: {error.strerror}"
        if done.returncode == 0:
            try:
                return json.loads(done.stdout.decode().split("\n")[-2])
            except (ValueError, IndexError):
                pass
        return self._problem(done)

    def _problem(self, done):
        lines = done.stderr.decode(errors="replace").strip().split("\n")
        if done.returncode == _SSH_FAILED:
            return f"not reachable by ssh: {lines[-1]}"
        if done.returncode in _NO_SUCH_COMMAND:
            return (
                f"no Python at {self._python} ({lines[-1]}); name the one "
                "there with --python"
            )
        return lines[-1].removeprefix("keras-sparsity: ")

    def _compare(self, answer, first, script):
        problems = [
            f"has {name} {answer['versions'].get(name)}, the first host has "
            f"{version}"
            for name, version in first["versions"].items()
            if answer["versions"].get(name) != version
        ]
        if answer["versions"].get("horovod") == "none":
            problems.append(
                "has no Horovod: pip install 'keras-sparsity[horovod]'"
            )
        if not answer["has_script"]:
            problems.append(f"has no {script} in {self._directory}")
        return "; ".join(problems)


def _machine(host, answer):
    connection = answer["connection"]
    name = host.name.rpartition("@")[2]
    address = name
    if host.is_local:
        address = None
    elif not _resolves(name) and len(connection) == 4:
        address = connection[2]  # A name from ssh's own configuration.
    return Machine(
        host=host,
        address=address,
        num_cores=answer["num_cores"],
        ports=answer["ports"],
        launcher_address=_own_address(address, connection),
        # What ssh connects to may be translated on the way.
        own_addresses=[
            found.partition("%")[0]
            for found in answer["addresses"] + connection[2:3]
        ],
    )


def _own_address(address, connection):
    if address is None:
        return None
    if len(connection) == 4:
        return connection[0]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Sends nothing: it asks the system for the way there.
            probe.connect((address, 9))
            return probe.getsockname()[0]
    except OSError:
        return None


def _resolves(name):
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True
