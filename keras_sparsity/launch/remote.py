"""Processes on other machines, over the system's ssh client."""

import contextlib
import dataclasses
import json
import os
import shlex
import socket
import sys
import tempfile
import time

from keras_sparsity.launch._boot import LIFELINE_VARIABLE
from keras_sparsity.launch.environment import python_flags
from keras_sparsity.launch.processes import ProcessGroup, RankProcess

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
import sys
if sys.path[0] == "":
    del sys.path[0]
import json, importlib.util, os
def fail(problem):
    sys.exit("keras-sparsity: " + str(problem))
line = b""
while not line.endswith(b"\\n"):
    line += os.read(0, 1) or fail("no greeting")
call = json.loads(line)
variables = call["environment"]
try:
    os.chdir(call["directory"])
except OSError as error:
    fail(error)
package = call["package"]
if not (package and os.path.isdir(package)):
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(":"))
    spec = importlib.util.find_spec("keras_sparsity")
    if spec is None or spec.origin is None:
        fail("no keras_sparsity is installed for " + sys.executable)
    package = os.path.dirname(spec.origin)
os.environ.update(variables, {LIFELINE_VARIABLE}="0")
boot = [*call["flags"], os.path.join(package, "launch", "_boot.py")]
os.execv(sys.executable, [sys.executable, *boot, *call["arguments"]])
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
        self._ssh = ssh_command(ssh)
        self._python = python or sys.executable
        self._directory = directory or _working_folder()
        self._names = names

    def command(self, host):
        """The command that starts Python on `host`."""
        if host.is_local:
            return [sys.executable, "-c", _STUB]
        return [
            *self._ssh,
            host.name,
            shlex.join([self._python, "-c", _STUB]),
        ]

    def greeting(self, arguments, environment):
        """What that command must read first.

        Args:
            arguments: See `_child.main`.
            environment: A local rank's whole environment, of which it passes
                what belongs to the program.
        """
        call = {
            "arguments": arguments,
            "flags": python_flags(),
            "package": _own_package(),
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

    def check(self, hosts, engine, environment, script="", on_poll=None):
        """Checks all hosts at once.

        Args:
            hosts: List of `Host`.
            engine: Name of the engine.
            environment: The environment that all ranks share.
            script: A path that must exist on each host, or empty.
            on_poll: Called a few times per second; what it raises ends it.

        Returns:
            List of `Machine`.

        Raises:
            HostError: If any host cannot take part, with each one's problem.
        """
        found = self._probe(hosts, engine, environment, script, on_poll)
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

    def _probe(self, hosts, engine, environment, script, on_poll):
        """What each host has, or a string with its problem."""
        found, probes = {}, {}
        deadline = time.monotonic() + _PROBE_TIMEOUT_SECONDS
        with (
            tempfile.TemporaryDirectory(prefix="keras-sparsity-") as folder,
            ProcessGroup() as processes,
        ):
            for index, host in enumerate(hosts):
                arguments = ["probe", engine, str(host.num_slots), script]
                path = os.path.join(folder, str(index))
                command = self.command(host)
                try:
                    probes[index] = RankProcess(
                        index,
                        command,
                        dict(os.environ),
                        stdout=f"{path}.out",
                        stderr=f"{path}.err",
                        remote_host=host.name,
                        greeting=self.greeting(arguments, environment),
                    )
                except OSError as error:
                    found[index] = f"cannot run {command[0]}: {error.strerror}"
                else:
                    processes.append(probes[index])
            while processes.running() and time.monotonic() < deadline:
                processes.step()
                if on_poll is not None:
                    on_poll()
            for index, probe in probes.items():
                path = os.path.join(folder, str(index))
                found[index] = self._answer(probe, _read(f"{path}.out"))
        return [found[index] for index in range(len(hosts))]

    def _answer(self, probe, output):
        code = probe.poll()
        if code is None:
            return f"no answer within {_PROBE_TIMEOUT_SECONDS} seconds"
        if code == 0:
            with contextlib.suppress(ValueError, IndexError):
                answer = json.loads(output.split("\n")[-2])
                if isinstance(answer, dict) and "versions" in answer:
                    return answer
            return (
                "no answer from Python, though the command ended without an "
                f"error: is {shlex.join(self._ssh)!r} an ssh client?"
            )
        said = probe.last_lines(1)
        line = said[0] if said else "it printed no error"
        if code == _SSH_FAILED:
            return f"not reachable by ssh: {line}"
        if code in _NO_SUCH_COMMAND:
            return (
                f"no Python at {self._python} ({line}); name the one there "
                "with --python"
            )
        if not said:
            return (
                f"{shlex.join(self._ssh)!r} ended with code {code} and printed "
                "no error: is it an ssh client?"
            )
        return line.removeprefix("keras-sparsity: ")

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


def ssh_command(given=None):
    """The ssh client and its options, as a list."""
    name, text = "--ssh", given
    if given is None:
        name, text = SSH_VARIABLE, os.environ.get(SSH_VARIABLE) or _SSH
    try:
        command = shlex.split(text)
    except ValueError:  # a quote without its other one
        command = []
    if not command:
        raise ValueError(
            f"{name} takes a client and its options, as a shell would. "
            f"Received: {text!r}."
        )
    return command


def _working_folder():
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ValueError(
            "The working folder, in which the ranks would start, is gone."
        ) from None


def _own_package():
    """This package's folder; None where an installation has it."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    root = os.path.basename(os.path.dirname(package))
    return None if root in ("site-packages", "dist-packages") else package


def _read(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


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
