"""The environment variables that make a process a rank."""

import contextlib
import importlib.util
import json
import os
import random
import socket
import sys

from keras_sparsity import checks, firewall
from keras_sparsity.launch import _boot

ENGINES = ("local", "native", "horovod")
# TensorFlow 2.21 and Keras, imported, take 500 MB, of which processes share
# some: a bound that no process stays below.
_LEAST_PROCESS_BYTES = 100_000_000

# What an outer launcher may have left, which would contradict ours.
_RANK_VARIABLES = (
    "TF_CONFIG",
    "KERAS_SPARSITY_TOPOLOGY",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "HOROVOD_HOSTNAME",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
)


def resolve_engine(engine, num_processes):
    """The engine's name; without a choice native, or local for one process."""
    if engine is None:
        return "native" if num_processes > 1 else "local"
    if not isinstance(engine, str) or engine not in ENGINES:
        raise ValueError(
            f"`engine` must be one of {', '.join(ENGINES)}. "
            f"Received: {engine!r}."
        )
    if engine == "local" and num_processes > 1:
        raise ValueError(
            "The local engine is for one process. Received: "
            f"{num_processes} processes. Use engine='native'."
        )
    if engine == "horovod" and importlib.util.find_spec("horovod") is None:
        raise ValueError(
            "The horovod engine needs Horovod, which is not installed here: "
            "pip install 'keras-sparsity[horovod]', or use engine='native'."
        )
    return engine


def check_timeout(timeout):
    is_number = isinstance(timeout, int | float)
    checks.check(
        timeout is None
        or (is_number and not isinstance(timeout, bool) and timeout > 0),
        "timeout",
        timeout,
        "None or a positive number of seconds",
    )


def check_memory(num_processes):
    """Raises where this machine cannot hold so many processes.

    Args:
        num_processes: How many are to run here.
    """
    installed_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed_bytes = num_processes * _LEAST_PROCESS_BYTES
    if needed_bytes > installed_bytes:
        raise ValueError(
            f"{num_processes} processes on one machine take more than "
            f"{needed_bytes / 1e9:.0f} GB of memory, and this machine has "
            f"{installed_bytes / 1e9:.0f} GB. Start fewer."
        )


def inherited():
    """This process's environment without what may make it a rank itself."""
    return {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}


def child_command(arguments):
    """The command of a rank on this machine; see `_child.main`."""
    return [sys.executable, *python_flags(), _boot.__file__, *arguments]


def python_flags():
    """This interpreter's flags that its ranks need too."""
    return ["-P"] if _boot.is_path_safe() else []


def shared_defaults():
    """Defaults that must be the same in all ranks of one launch."""
    return {
        # The same program on every rank also walks its sets in one order:
        # traced graphs, and with them the collectives, come in that order.
        "PYTHONHASHSEED": str(random.SystemRandom().randrange(2**32)),
        # Warnings and banners of N processes would hide the first error.
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Last words of a rank that crashes in C++.
        "PYTHONFAULTHANDLER": "1",
    }


def chosen_seed():
    """A seed for the ranks to agree on, where the user has given none."""
    return str(random.SystemRandom().randrange(2**31))


def thread_defaults(local_size, num_cores=None):
    """Shares a machine's cores among its processes.

    TensorFlow takes all cores in every process otherwise, and N processes
    that wait for each other then mostly wait for a core.
    """
    if num_cores is None:
        num_cores = len(os.sched_getaffinity(0))
    threads = max(1, num_cores // local_size)
    return {
        "OMP_NUM_THREADS": str(threads),
        "TF_NUM_INTRAOP_THREADS": str(threads),
        # An operation that blocks (a Python function) must not keep the only
        # inter-op thread from the collective that it waits for.
        "TF_NUM_INTEROP_THREADS": str(max(2, threads)),
    }


def free_ports(count):
    """Ports of this machine that are free now.

    They lie below the range from which the system hands out ports by itself
    (32768 and up on Linux), so that no connection made between this call and
    the rank's own `bind` takes one.
    """
    ports = []
    candidates = list(range(15000, 32000))
    random.SystemRandom().shuffle(candidates)
    while len(ports) < count:
        if not candidates:
            raise ValueError(
                f"{count} processes need as many free ports; of those from "
                f"15000 to 31999 this machine has {len(ports)}."
            )
        port = candidates.pop()
        if _can_bind(port):
            ports.append(port)
    return ports


def _can_bind(port):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def engine_variables(
    engine, slots, addresses=None, ports=None, here=None, networks=None
):
    """Yields each rank's variables, serving a rendezvous while in use.

    Args:
        engine: Name of the engine.
        slots: List of `Slot`.
        addresses: Each rank's address as the others reach it; by default
            this machine's loopback.
        ports: Each rank's port for the native engine; by default free ones
            of this machine.
        here: This machine's address as the ranks reach it.
        networks: Those of the machines' addresses; None for any.
    """
    with contextlib.ExitStack() as stack:
        if engine == "native":
            variables = _native_variables(slots, addresses, ports)
        elif engine == "horovod":
            server = stack.enter_context(_rendezvous(slots, here, networks))
            variables = _horovod_variables(slots, here, *server)
        else:
            variables = [{} for _ in slots]
        is_even = len({slot.local_size for slot in slots}) == 1
        for slot, rank_variables in zip(slots, variables, strict=True):
            # It names the machine by the cross rank, which needs as many
            # processes on each; else the engine finds machines by address.
            if is_even:
                rank_variables["KERAS_SPARSITY_TOPOLOGY"] = slot.topology
            if networks is not None and here:
                rank_variables[firewall.VARIABLE] = ",".join(map(str, networks))
            if slot.host.gpus:
                rank_variables["CUDA_VISIBLE_DEVICES"] = ",".join(
                    slot.host.gpus
                )
        yield variables


def _native_variables(slots, addresses, ports):
    addresses = addresses or ["127.0.0.1"] * len(slots)
    ports = ports or free_ports(len(slots))
    workers = [f"{a}:{p}" for a, p in zip(addresses, ports, strict=True)]
    return [
        {
            "TF_CONFIG": json.dumps(
                {
                    "cluster": {"worker": workers},
                    "task": {"type": "worker", "index": slot.rank},
                }
            )
        }
        for slot in slots
    ]


def _host_name(slot):
    # Emulated machines need names of their own: Gloo makes the groups of a
    # machine by them.
    return f"{slot.host.name}-{slot.machine}"


def _horovod_variables(slots, here, address, port):
    loopback = {} if here else {"HOROVOD_GLOO_IFACE": "lo"}
    return [
        {
            # First, so that who launches may set another interface.
            **{k: os.environ.get(k, v) for k, v in loopback.items()},
            "HOROVOD_RANK": str(slot.rank),
            "HOROVOD_SIZE": str(slot.size),
            "HOROVOD_LOCAL_RANK": str(slot.local_rank),
            "HOROVOD_LOCAL_SIZE": str(slot.local_size),
            "HOROVOD_CROSS_RANK": str(slot.cross_rank),
            "HOROVOD_CROSS_SIZE": str(slot.cross_size),
            "HOROVOD_HOSTNAME": _host_name(slot),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }
        for slot in slots
    ]


def _rendezvous(slots, here, networks):
    """Serves Gloo's rendezvous while entered, as horovodrun does."""
    from horovod.runner.common.util.hosts import SlotInfo

    from keras_sparsity.launch import rendezvous

    places = [
        SlotInfo(
            hostname=_host_name(slot),
            rank=slot.rank,
            local_rank=slot.local_rank,
            cross_rank=slot.cross_rank,
            size=slot.size,
            local_size=slot.local_size,
            cross_size=slot.cross_size,
        )
        for slot in slots
    ]
    return rendezvous.served(places, here, networks)
