"""Hosts, hostfiles, and the place of each process."""

import dataclasses
import re

from keras_sparsity._tf import checks
from keras_sparsity.machines import topology

_NAME = re.compile(r"[\w.@-]+")
# Fewer than the ports that `ports.reserved` searches.
_MAX_PROCESSES = 10_000
# A thousand hosts take some 20 kB.
_MAX_HOSTFILE_BYTES = 1_000_000

HOSTFILE_FORMAT = """\
a hostfile has one host per line; a # begins a comment:
  node1            one process
  node1:4          four processes
  node1 slots=4    the same, as Open MPI and DeepSpeed write it
  node1:4+2        four workers and two dedicated servers, which own the rows
                   of sharded tables; "node1:0+2" for servers alone
  node1: 0,1       one process for each of the GPUs 0 and 1, as Parallax's
                   resource file has it (a lone GPU: "node1: 0,")
"""


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine, its number of processes, and their GPUs.

    Args:
        name: Its name for ssh, or `localhost`.
        num_processes: The number of its processes.
        gpus: Ids of the GPUs that its processes see; empty to keep the
            machine's own `CUDA_VISIBLE_DEVICES`.
        num_servers: How many of the processes are dedicated servers.
    """

    name: str
    num_processes: int = 1
    gpus: tuple = ()
    num_servers: int = 0

    @property
    def is_local(self):
        return self.name in ("localhost", "127.0.0.1")


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of one process.

    Args:
        host: `Host`.
        machine: The host's index in the list of hosts. `topology.cross_rank`
            equals it only if all hosts have as many processes.
        topology: `Topology`.
        is_server: Whether it is a dedicated server.
    """

    host: Host
    machine: int
    topology: topology.Topology
    is_server: bool = False

    @property
    def rank(self):
        return self.topology.rank


def places(hosts):
    """Numbers the processes of `hosts`, host by host; servers come last.

    Returns:
        List of `Place`, by rank.

    Raises:
        ValueError: If all processes are dedicated servers.

    Example:

    >>> [place.machine for place in places([Host("a", 2), Host("b")])]
    [0, 0, 1]
    >>> hosts = [Host("a", 2, num_servers=1), Host("b", 2, num_servers=1)]
    >>> [(place.machine, place.is_server) for place in places(hosts)]
    [(0, False), (1, False), (0, True), (1, True)]
    """
    workers, servers = [], []
    for machine, host in enumerate(hosts):
        workers += [machine] * (host.num_processes - host.num_servers)
        servers += [machine] * host.num_servers
    if not workers:
        raise ValueError(
            "Dedicated servers need at least one worker beside them. "
            f"Received: {len(servers)} servers and no worker."
        )
    machines = [*workers, *servers]
    return [
        Place(hosts[machine], machine, place, place.rank >= len(workers))
        for machine, place in zip(
            machines, topology.topologies(machines), strict=True
        )
    ]


def local_hosts(num_workers, machines=1, num_servers=0):
    """Hosts of processes here, as if on `machines` of equal size."""
    checks.positive_integer("num_processes", num_workers)
    checks.positive_integer("machines", machines)
    checks.check(
        type(num_servers) is int and num_servers >= 0,
        "num_servers",
        num_servers,
        "a number of processes, or 0",
    )
    _within_limit(num_workers + num_servers, num_workers + num_servers)
    if num_workers % machines or num_servers % machines:
        servers = f", {num_servers} servers" if num_servers else ""
        raise ValueError(
            "`machines` must divide the number of processes. Received: "
            f"{num_workers} processes{servers} and machines={machines}."
        )
    num_servers //= machines
    num_processes = num_workers // machines + num_servers
    host = Host("localhost", num_processes, num_servers=num_servers)
    return [host] * machines


def parse_hosts(text):
    """Hosts from the command line's form, `a:2,b:2` or `a:2+1,b:0+1`.

    >>> [(host.name, host.num_processes) for host in parse_hosts("a:2,b")]
    [('a', 2), ('b', 1)]
    """
    hosts = []
    for entry in text.split(","):
        name, colon, count = entry.strip().partition(":")
        name = _checked_name(name, f"--hosts {text!r}")
        hosts.append(_counted(name, count, entry) if colon else Host(name))
    return _without_repeats(hosts, f"--hosts {text!r}")


def parse_hostfile(path):
    """Hosts from a file; see `HOSTFILE_FORMAT`."""
    hosts = []
    for number, line in enumerate(_read_lines(path), 1):
        line = line.partition("#")[0].strip()
        if line:
            try:
                hosts.append(_parse_line(line))
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}: {error}\n{HOSTFILE_FORMAT}"
                ) from None
    if not hosts:
        raise ValueError(f"{path} names no host.\n{HOSTFILE_FORMAT}")
    return _without_repeats(hosts, path)


def _read_lines(path):
    # A device would have no end.
    with open(path, "rb") as file:
        content = file.read(_MAX_HOSTFILE_BYTES + 1)
    try:
        if len(content) > _MAX_HOSTFILE_BYTES:
            raise ValueError
        return content.decode().split("\n")
    except ValueError:
        raise ValueError(
            f"{path} is not a text file of hosts.\n{HOSTFILE_FORMAT}"
        ) from None


def _parse_line(line):
    slots = re.fullmatch(r"(\S+)\s+slots\s*=\s*(\S+)", line)
    if slots:
        name, count = slots.groups()
        return Host(_checked_name(name, line), _checked_count(count, line))
    name, colon, rest = line.partition(":")
    name, rest = _checked_name(name.strip(), line), rest.strip()
    if not colon:
        return Host(name)
    # "node: 2" is a count; "node: 2," and "node: 0,2" are GPU ids.
    if "," not in rest:
        return _counted(name, rest, line)
    gpus = tuple(gpu.strip() for gpu in rest.removesuffix(",").split(","))
    if not all(re.fullmatch(r"\d+|GPU-[\w-]+|MIG-[\w/-]+", g) for g in gpus):
        raise ValueError(
            "GPU ids must be numbers (or UUIDs) separated by commas. "
            f"Received: {line!r}."
        )
    if len(set(gpus)) != len(gpus):
        raise ValueError(f"A GPU is named twice. Received: {line!r}.")
    return Host(name, len(gpus), gpus)


def _checked_name(name, where):
    if not _NAME.fullmatch(name) or name.startswith("-"):
        raise ValueError(f"Not a host name: {name!r}, in {where}.")
    return name


def _counted(name, count, where):
    """The host of `N` processes, or of `N+S`, S of which are servers."""
    workers, plus, servers = count.partition("+")
    if not plus:
        return Host(name, _checked_count(count, where))
    num_servers = _checked_count(servers, where)
    num_workers = 0
    if workers.strip() != "0":
        num_workers = _checked_count(workers, where)
    number = _within_limit(num_workers + num_servers, where)
    return Host(name, number, num_servers=num_servers)


def _checked_count(count, where):
    if not count.strip().isdecimal() or not count.strip("0 "):
        raise ValueError(
            "The number of processes on a host must be a number, at least 1. "
            f"Received: {count!r}, in {where!r}."
        )
    # Python refuses to read thousands of digits.
    number = int(count) if len(count) < 20 else _MAX_PROCESSES + 1
    return _within_limit(number, where)


def _within_limit(num_processes, received):
    if num_processes > _MAX_PROCESSES:
        raise ValueError(
            f"At most {_MAX_PROCESSES} processes can run on one machine. "
            f"Received: {received!r}."
        )
    return num_processes


def _without_repeats(hosts, where):
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"Host {name} is named more than once in {where}: name it "
                "once, with the number of all its processes."
            )
    return hosts
