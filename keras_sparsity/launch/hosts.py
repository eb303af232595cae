"""Which process runs where: hosts, hostfiles and each process's slot."""

import dataclasses
import re

from keras_sparsity import checks

_NAME = re.compile(r"[\w.@-]+")
# More than the ports that `environment.free_ports` looks through are a mistake.
_MAX_SLOTS = 10_000
# A hostfile of a thousand hosts has some 20 kB.
_MAX_HOSTFILE_BYTES = 1_000_000

HOSTFILE_FORMAT = """\
a hostfile has one host per line; what follows # is a comment:
  node1            one process
  node1:4          four processes
  node1 slots=4    the same, as Open MPI and DeepSpeed write it
  node1: 0,1       one process for each of the GPUs 0 and 1, as Parallax's
                   resource file has it (a lone GPU: "node1: 0,")
"""


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine, the processes it runs, and the GPUs they may use.

    Args:
        name: As ssh knows it, or `localhost`.
        num_slots: How many processes run there.
        gpus: Ids of the GPUs its processes see; empty: the machine's own
            `CUDA_VISIBLE_DEVICES` stays as it is.
    """

    name: str
    num_slots: int = 1
    gpus: tuple = ()

    @property
    def is_local(self):
        return self.name in ("localhost", "127.0.0.1")


@dataclasses.dataclass(frozen=True)
class Slot:
    """One process's place, numbered as in Horovod.

    Args:
        machine: Index of its host in the list of hosts.
        cross_rank: Its number among the processes with its local rank; this
            is the machine's index only where all hosts have as many slots.
    """

    host: Host
    machine: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    @property
    def topology(self):
        """The value of `KERAS_SPARSITY_TOPOLOGY` for this process."""
        return (
            f"{self.local_rank},{self.local_size},"
            f"{self.cross_rank},{self.cross_size}"
        )


def assign_slots(hosts):
    """Numbers the processes of `hosts`, those of one host in a row.

    Args:
        hosts: List of `Host`.

    Returns:
        List of `Slot`, by rank.

    Example:

    >>> [slot.topology for slot in assign_slots([Host("a", 2), Host("b")])]
    ['0,2,0,2', '1,2,0,1', '0,1,1,2']
    """
    size = sum(host.num_slots for host in hosts)
    slots = []
    for machine, host in enumerate(hosts):
        for local_rank in range(host.num_slots):
            with_local_rank = [h.num_slots > local_rank for h in hosts]
            slots.append(
                Slot(
                    host=host,
                    machine=machine,
                    rank=len(slots),
                    size=size,
                    local_rank=local_rank,
                    local_size=host.num_slots,
                    cross_rank=sum(with_local_rank[:machine]),
                    cross_size=sum(with_local_rank),
                )
            )
    return slots


def local_hosts(num_processes, machines=1):
    """`num_processes` on this machine, as if on `machines` of equal size."""
    checks.positive_integer("num_processes", num_processes)
    checks.positive_integer("machines", machines)
    _within_limit(num_processes, num_processes)
    if num_processes % machines:
        raise ValueError(
            "`machines` must divide the number of processes, so that all "
            f"have as many. Received: {num_processes} processes and "
            f"machines={machines}."
        )
    return [Host("localhost", num_processes // machines)] * machines


def parse_hosts(text):
    """Hosts from the command line's form, `a:2,b:2`.

    >>> parse_hosts("a:2,b")
    [Host(name='a', num_slots=2, gpus=()), Host(name='b', num_slots=1, gpus=())]
    """
    hosts = []
    for entry in text.split(","):
        name, colon, count = entry.strip().partition(":")
        hosts.append(
            Host(
                _checked_name(name, f"--hosts {text!r}"),
                _checked_count(count, entry) if colon else 1,
            )
        )
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
    # Not for ever, whatever it is.
    with open(path, "rb") as file:
        content = file.read(_MAX_HOSTFILE_BYTES + 1)
    try:
        if len(content) > _MAX_HOSTFILE_BYTES:
            raise ValueError
        return content.decode().split("\n")
    except ValueError:
        raise ValueError(
            f"{path} is no text file of hosts.\n{HOSTFILE_FORMAT}"
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
    # "node: 2" is a count and "node: 2," or "node: 0,2" are GPU ids.
    if "," not in rest:
        return Host(name, _checked_count(rest, line))
    gpus = tuple(gpu.strip() for gpu in rest.removesuffix(",").split(","))
    if not all(re.fullmatch(r"\d+|GPU-[\w-]+|MIG-[\w/-]+", g) for g in gpus):
        raise ValueError(
            "GPU ids must be numbers (or UUIDs) with commas between. "
            f"Received: {line!r}."
        )
    if len(set(gpus)) != len(gpus):
        raise ValueError(f"A GPU is named twice. Received: {line!r}.")
    return Host(name, len(gpus), gpus)


def _checked_name(name, where):
    if not _NAME.fullmatch(name) or name.startswith("-"):
        raise ValueError(f"Not a host name: {name!r}, in {where}.")
    return name


def _checked_count(count, where):
    if not count.strip().isdecimal() or not count.strip("0 "):
        raise ValueError(
            "The number of processes on a host must be a number, at least 1. "
            f"Received: {count!r}, in {where!r}."
        )
    # Python refuses to read thousands of digits.
    number = int(count) if len(count) < 20 else _MAX_SLOTS + 1
    return _within_limit(number, where)


def _within_limit(num_processes, received):
    if num_processes > _MAX_SLOTS:
        raise ValueError(
            f"At most {_MAX_SLOTS} processes can run on one machine. "
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
