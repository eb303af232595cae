"""Python on hosts, over the system's ssh client."""

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
from keras_sparsity.launch.processes import ProcessGroup
from keras_sparsity.launch.rank_process import (
    SSH_FAILED,
    RankProcess,
    last_lines,
    python_flags,
)
from keras_sparsity.machines import addresses
from keras_sparsity.machines.settings import INSTALL_HOROVOD

SSH_VARIABLE = "KERAS_SPARSITY_SSH"
# BatchMode asks no questions; a dead machine is noticed within a minute.
_SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=20"
_PROBE_TIMEOUT_SECONDS = 120
_NO_SUCH_COMMAND = (126, 127)

# Only the program's variables go to other machines, which have a PATH, HOME
# and the like of their own.
_PASSED_PREFIXES = (
    *("CUDA_", "GLOO_", "GRPC_", "HOROVOD_", "KERAS_", "MKL_", "NCCL_"),
    *("OMP_", "PYTHON", "TF_", "XLA_"),
)
_NOT_PASSED = ("PYTHONHOME", SSH_VARIABLE, LIFELINE_VARIABLE)

# The command of the remote shell. It reads the environment from its standard
# input (every user of the machine could read a command line) and becomes the
# rank's command, which keeps that input as its lifeline.
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
    """Raised when hosts cannot take part; lists each one's problem."""


@dataclasses.dataclass
class Machine:
    """The facts of a checked host.

    Args:
        host: The `Host`.
        address: Its address for the other hosts.
        num_cores: Processor cores.
        ports: A free port for each of its processes.
        launcher_address: The launcher's address for it, None if unknown.
        own_addresses: All addresses of its interfaces.
    """

    host: object
    address: str
    num_cores: int
    ports: list
    launcher_address: str | None
    own_addresses: list


class Remote:
    """Starts Python on hosts.

    Args:
        ssh: Command of the ssh client, as one string; by default the
            environment's KERAS_SPARSITY_SSH, else `ssh` without questions.
        python: Path of Python on the hosts.
        names: Names of further environment variables to pass.
    """

    def __init__(self, ssh=None, python=None, names=()):
        self._ssh = ssh_command(ssh)
        self._python = python or sys.executable
        self._directory = _working_folder()
        self._names = names

    def start(self, host, rank, arguments, variables, **files):
        """As `start_here`; passes only the program's variables."""
        return RankProcess(
            rank,
            self._command(host),
            variables,
            remote_host=host.name,
            greeting=self._greeting(arguments, variables),
            **files,
        )

    def _command(self, host):
        if host.is_local:
            return [sys.executable, "-c", _STUB]
        python = shlex.join([self._python, "-c", _STUB])
        return [*self._ssh, host.name, python]

    def _greeting(self, arguments, variables):
        """The line that `_STUB` reads."""
        call = {
            "arguments": arguments,
            "flags": python_flags(),
            "package": _own_package(),
            "directory": self._directory,
            "environment": {
                name: value
                for name, value in variables.items()
                if name in self._names
                or (
                    name.startswith(_PASSED_PREFIXES)
                    and name not in _NOT_PASSED
                )
            },
        }
        return json.dumps(call).encode() + b"\n"

    def check(self, hosts, engine, variables, script="", on_poll=None):
        """Checks all hosts at once; returns a list of `Machine`.

        Args:
            variables: The environment that all ranks share.
            script: A path that must exist on each host, or empty.
            on_poll: Called a few times per second; its exception ends the
                check.

        Raises:
            HostError: If any host cannot take part, with each one's problem.
        """
        found = self._probe(hosts, engine, variables, script, on_poll)
        first = next((f for f in found if not isinstance(f, str)), None)
        problems = []
        for host, answer in zip(hosts, found, strict=True):
            problem = answer
            if not isinstance(answer, str):
                problem = self._compare(answer, first, script)
            if problem:
                problems.append(f"  {host.name}: {problem}")
        if problems:
            raise HostError(
                "Nothing was started, because these hosts cannot take part:\n"
                + "\n".join(problems)
            )
        return [
            _machine(host, answer)
            for host, answer in zip(hosts, found, strict=True)
        ]

    def _probe(self, hosts, engine, variables, script, on_poll):
        """The facts of each host, or a string with its problem."""
        found, probes = {}, {}
        deadline = time.monotonic() + _PROBE_TIMEOUT_SECONDS
        with (
            tempfile.TemporaryDirectory(prefix="keras-sparsity-") as folder,
            ProcessGroup() as processes,
        ):
            for index, host in enumerate(hosts):
                path = os.path.join(folder, str(index))
                try:
                    probes[index] = self.start(
                        host,
                        index,
                        ["probe", engine, str(host.num_processes), script],
                        variables,
                        stdout=f"{path}.out",
                        stderr=f"{path}.err",
                    )
                except OSError as error:
                    client = self._command(host)[0]
                    found[index] = f"cannot run {client}: {error.strerror}"
                else:
                    processes.append(probes[index])
            while processes.running() and time.monotonic() < deadline:
                processes.step()
                if on_poll is not None:
                    on_poll()
            for index, probe in probes.items():
                output = last_lines(os.path.join(folder, f"{index}.out"), 1)
                found[index] = self._answer(probe, output)
        return [found[index] for index in range(len(hosts))]

    def _answer(self, probe, output):
        code = probe.poll()
        if code is None:
            return f"no answer within {_PROBE_TIMEOUT_SECONDS} seconds"
        if code == 0:
            with contextlib.suppress(ValueError, IndexError):
                answer = json.loads(output[-1])
                if isinstance(answer, dict) and "versions" in answer:
                    return answer
            return (
                "no answer from Python, though the command ended without an "
                f"error: is {shlex.join(self._ssh)!r} an ssh client?"
            )
        said = probe.last_lines(1)
        line = said[0] if said else "it printed no error"
        if code == SSH_FAILED:
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
            problems.append(f"has no Horovod: {INSTALL_HOROVOD}")
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
            f"{name} takes a client and its options, as in a shell. "
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
    """This package's folder; None if it is installed in site-packages."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    root = os.path.basename(os.path.dirname(package))
    return None if root in ("site-packages", "dist-packages") else package


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
        launcher_address=_launcher_address(address, connection),
        # With the one that ssh reached, which may be a translated address.
        own_addresses=[
            found.partition("%")[0]
            for found in answer["addresses"] + connection[2:3]
        ],
    )


def _launcher_address(address, connection):
    if address is None:
        return None
    seen = connection[0] if len(connection) == 4 else None
    if seen is None or ":" in seen:
        # Horovod's rendezvous has no IPv6.
        return addresses.towards(address) or seen
    return seen


def _resolves(name):
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True
