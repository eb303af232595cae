"""The environment variables that make a process a rank."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import random
from collections import Counter

from keras_sparsity._tf import checks
from keras_sparsity.machines import firewall, ports, slurm
from keras_sparsity.machines.door import JOINS_VARIABLE, LAUNCHER_VARIABLE
from keras_sparsity.machines.settings import (
    ENGINES,
    INSTALL_HOROVOD,
    SERVERS_VARIABLE,
)
from keras_sparsity.machines.topology import OVERRIDE, Topology

# TensorFlow 2.21 and Keras take 500 MB, partly shared among processes: a
# bound that no process stays below.
_LEAST_PROCESS_BYTES = 100_000_000

_RENDEZVOUS = "HOROVOD_GLOO_RENDEZVOUS_"
_PLACES = [field.name for field in dataclasses.fields(Topology)]
# An outer launcher's variables would contradict ours.
_RANK_VARIABLES = (
    "TF_CONFIG",
    OVERRIDE,
    SERVERS_VARIABLE,
    JOINS_VARIABLE,
    LAUNCHER_VARIABLE,
    slurm.STEP_VARIABLE,
    "HOROVOD_HOSTNAME",
    f"{_RENDEZVOUS}ADDR",
    f"{_RENDEZVOUS}PORT",
    *(f"HOROVOD_{name.upper()}" for name in _PLACES),
)


def resolve_engine(engine, num_processes, native="engine='native'"):
    """The engine's name; by default native, or local for one process.

    Args:
        native: How one asks for the native engine, for messages.
    """
    if engine is None:
        return "native" if num_processes > 1 else "local"
    checks.one_of("engine", engine, ENGINES)
    if engine == "local" and num_processes > 1:
        raise ValueError(
            "The local engine is for one process. Received: "
            f"{num_processes} processes. Use {native}."
        )
    if engine == "horovod" and importlib.util.find_spec("horovod") is None:
        raise ValueError(
            "The horovod engine needs Horovod, which is not installed here: "
            f"{INSTALL_HOROVOD}, or use {native}."
        )
    return engine


def check_timeout(timeout):
    is_number = checks.is_number(timeout)
    checks.check(
        timeout is None or (is_number and 0 < timeout < math.inf),
        "timeout",
        timeout,
        "a positive number of seconds, or None for no limit",
    )


def check_memory(num_processes):
    """Raises ValueError if this machine cannot hold so many processes."""
    installed_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed_bytes = num_processes * _LEAST_PROCESS_BYTES
    if needed_bytes > installed_bytes:
        raise ValueError(
            f"{num_processes} processes on one machine take more than "
            f"{needed_bytes / 1e9:.0f} GB of memory, and this machine has "
            f"{installed_bytes / 1e9:.0f} GB. Start fewer."
        )


def shared(variables):
    """The variables that all ranks of a launch share.

    Args:
        variables: dict that takes precedence over defaults and over this
            process's environment.
    """
    return {
        # Sets have one order on all ranks, and so have the collectives of
        # traced graphs.
        "PYTHONHASHSEED": str(random.SystemRandom().randrange(2**32)),
        # Warnings and banners of N processes would hide the first error.
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Last words of a rank that crashes in C++.
        "PYTHONFAULTHANDLER": "1",
        **{k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES},
        **variables,
    }


def _thread_defaults(num_processes, num_cores):
    """Shares a machine's cores among its processes.

    By default TensorFlow uses all cores in every process, and processes that
    wait for each other then mostly wait for a core.
    """
    if num_cores is None:
        num_cores = len(os.sched_getaffinity(0))
    threads = max(1, num_cores // num_processes)
    return {
        "OMP_NUM_THREADS": str(threads),
        "TF_NUM_INTRAOP_THREADS": str(threads),
        # A blocking operation (a Python function) must leave an inter-op
        # thread to the collective that it waits for.
        "TF_NUM_INTEROP_THREADS": str(max(2, threads)),
    }


@dataclasses.dataclass(frozen=True)
class Network:
    """The addresses of a run; the defaults are for this machine alone.

    Args:
        addresses: Each rank's address for the others; None for loopback.
        ports: Each rank's port, for the native engine; None for free ones of
            this machine.
        here: This machine's address for the ranks; None for loopback.
        networks: Networks of the machines; None for any.
        cores: Number of cores of each host; None for this machine's.
    """

    addresses: list | None = None
    ports: list | None = None
    here: str | None = None
    networks: list | None = None
    cores: list | None = None


@contextlib.contextmanager
def of_ranks(engine, places, shared, network=None):
    """Yields each rank's environment; serves a rendezvous while entered.

    Args:
        places: List of `Place`, by rank.
        shared: The variables that all ranks share.
        network: `Network`; by default this machine.
    """
    network = network or Network()
    cores = network.cores or [None] * len(places)
    # Emulated machines are one host. Servers mostly wait while others compute.
    busy, servers = (
        Counter(p.host.name for p in places if p.is_server == is_server)
        for is_server in (False, True)
    )
    num_processes = busy | servers
    with _VARIABLES[engine](places, network, shared) as of_engine:
        yield [
            {
                **_thread_defaults(
                    num_processes[place.host.name], cores[place.machine]
                ),
                **shared,
                **variables,
                **_of_place(place, places, network),
            }
            for place, variables in zip(places, of_engine, strict=True)
        ]


def _of_place(place, places, network):
    variables = {}
    # The override names a machine by its cross rank, which is unique only if
    # all have as many processes; else the engine finds machines by address.
    if len({other.topology.local_size for other in places}) == 1:
        variables[OVERRIDE] = place.topology.to_override()
    if network.networks is not None and network.here:
        allowed = ",".join(map(str, network.networks))
        variables[firewall.VARIABLE] = allowed
    if place.host.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(place.host.gpus)
    num_servers = sum(other.is_server for other in places)
    if num_servers:
        variables[SERVERS_VARIABLE] = str(num_servers)
    if place.is_server:
        variables["CUDA_VISIBLE_DEVICES"] = "-1"  # none
    return variables


@contextlib.contextmanager
def _local_variables(places, network, shared):
    yield [{} for _ in places]


@contextlib.contextmanager
def _native_variables(places, network, shared):
    hosts = network.addresses or ["127.0.0.1"] * len(places)
    hosts = [f"[{host}]" if ":" in host else host for host in hosts]  # IPv6
    with _ports(places, network) as numbers:
        workers = [f"{h}:{p}" for h, p in zip(hosts, numbers, strict=True)]
        yield [
            {
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": workers},
                        "task": {"type": "worker", "index": place.rank},
                    }
                )
            }
            for place in places
        ]


def _ports(places, network):
    if network.ports:
        return contextlib.nullcontext(network.ports)
    return ports.reserved(len(places))


@contextlib.contextmanager
def _horovod_variables(places, network, shared):
    from keras_sparsity.launch import rendezvous

    # Gloo groups processes by the names of machines, emulated ones too.
    hostnames = [f"{place.host.name}-{place.machine}" for place in places]
    loopback = {} if network.here else {"HOROVOD_GLOO_IFACE": "lo"}
    with rendezvous.served(
        hostnames,
        [place.topology for place in places],
        network.here,
        network.networks,
    ) as (address, port):
        yield [
            {
                # The user may set another interface.
                **{k: shared.get(k, v) for k, v in loopback.items()},
                **{
                    f"HOROVOD_{name.upper()}": str(value)
                    for name, value in vars(place.topology).items()
                },
                "HOROVOD_HOSTNAME": hostname,
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                f"{_RENDEZVOUS}ADDR": address,
                f"{_RENDEZVOUS}PORT": str(port),
            }
            for place, hostname in zip(places, hostnames, strict=True)
        ]


_VARIABLES = {
    "local": _local_variables,
    "native": _native_variables,
    "horovod": _horovod_variables,
}
