"""Runs a script or module on all ranks, for the command line."""

import dataclasses
import functools
import ipaddress
import os
import random
import signal
import sys
import threading
import time

from keras_sparsity.launch import environment
from keras_sparsity.launch._boot import SHOWN_ERROR_VARIABLE
from keras_sparsity.launch.again import RESTARTS_VARIABLE, Again, say
from keras_sparsity.launch.hosts import places
from keras_sparsity.launch.listener import Listener
from keras_sparsity.launch.log_folder import LogFolder
from keras_sparsity.launch.processes import ProcessGroup
from keras_sparsity.launch.rank_process import start_here
from keras_sparsity.launch.remote import HostError, Remote
from keras_sparsity.machines import addresses, firewall
from keras_sparsity.machines.settings import SEED_VARIABLE

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GPUS = "CUDA_VISIBLE_DEVICES"
_TIMED_OUT = 124  # as of the command `timeout`
# From a restart that a host could not take part in to the next one.
_HOST_SECONDS = 30.0
# More would scroll the first rank's error off the screen.
_MAX_TAILS = 3


@dataclasses.dataclass
class Program:
    """A program and its hosts.

    Rank 0 has this process's standard input and output; each other rank's
    output goes to a file.

    Args:
        hosts: List of `Host`.
        engine: Name of the engine.
        kind: `"script"` or `"module"`.
        target: List of the script's path or module's name and its arguments.
        variables: Dictionary of further environment variables.
        log_dir: Folder for the files; by default a temporary one, which is
            kept if a rank fails.
        timeout_seconds: Seconds until all ranks are ended, None for no limit.
        max_restarts: Largest number of restarts of all ranks after a failure,
            and of each worker without which the others go on, and of each
            server that they wait for.
        ssh: See `Remote`.
        python: See `Remote`.
    """

    hosts: list
    engine: str
    kind: str
    target: list
    variables: dict = dataclasses.field(default_factory=dict)
    log_dir: str | None = None
    timeout_seconds: float | None = None
    max_restarts: int = 0
    ssh: str | None = None
    python: str | None = None

    def run(self):
        """Runs the program; returns the exit code.

        Raises:
            HostError: If a host cannot take part. No rank has started then.
        """
        with _Signals() as signals:
            try:
                return self._run(signals)
            except _Interrupted:
                say(f"ended by {signals.name} before the start.")
                return signals.exit_code

    def _run(self, signals):
        # Shared by all attempts, which so draw the same random numbers.
        shared = environment.shared(self.variables)
        firewall.given_networks(shared)  # raises before anything starts
        num_processes = sum(host.num_processes for host in self.hosts)
        if self.max_restarts or num_processes > 1:
            seed = random.SystemRandom().randrange(2**31)
            shared.setdefault(SEED_VARIABLE, str(seed))
        deadline = None
        if self.timeout_seconds is not None:
            deadline = time.monotonic() + self.timeout_seconds
        with LogFolder(self.log_dir) as logs:
            for logs.restart in range(self.max_restarts + 1):
                try:
                    watched = self._attempt(shared, logs, deadline, signals)
                except HostError as error:
                    if logs.restart == 0:
                        raise
                    # A machine that was lost may be there again later.
                    say(str(error))
                    if logs.restart < self.max_restarts:
                        _wait(_HOST_SECONDS, deadline, signals)
                    continue
                code = watched.exit_code()
                if code == 0:
                    return 0
                logs.keep()
                is_last = logs.restart == self.max_restarts
                is_last |= watched.is_used_up
                if is_last or not watched.failed_by_itself:
                    break
                say(
                    f"{watched.describe_cause()}; restart "
                    f"{logs.restart + 1} of {self.max_restarts}."
                )
            watched.report(logs.path)
            return code

    def _attempt(self, shared, logs, deadline, signals):
        """Runs all ranks once; returns their `_Watched`."""
        shared = {**shared, RESTARTS_VARIABLE: str(logs.restart)}
        remote, network = None, environment.Network()
        of_ranks = places(self.hosts)
        if not all(host.is_local for host in self.hosts):
            if _GPUS not in self.variables:
                # This machine's say nothing about others'.
                shared.pop(_GPUS, None)
            remote, network = self._checked(of_ranks, shared, signals)
        with (
            Listener(of_ranks, network.here, network.networks) as listener,
            environment.of_ranks(
                self.engine,
                of_ranks,
                {**shared, **listener.variables(bool(self.max_restarts))},
                network,
            ) as environments,
            ProcessGroup(
                listener.lost,
                again := Again(listener, logs.restart),
                again.needs,
            ) as processes,
        ):
            for place, variables in zip(of_ranks, environments, strict=True):
                start = functools.partial(self._start, remote, place, logs)
                if self.max_restarts:
                    of_rank = start, variables, self.max_restarts
                    again.add(place.rank, *of_rank, place.is_server)
                processes.append(start(variables))
            watched = _Watched(
                processes, signals, deadline, self.timeout_seconds
            )
            watched.wait()
            watched.shown = logs.take_shown_error()
            if processes.lost():
                logs.keep()  # their output
            watched.is_used_up = again.is_used_up
        return watched

    def _checked(self, of_ranks, shared, signals):
        """`(Remote, environment.Network)` of hosts that can take part."""
        remote = Remote(self.ssh, self.python, names=self.variables)
        script = self.target[0] if self.kind == "script" else ""
        machines = remote.check(
            self.hosts, self.engine, shared, script, signals.check
        )
        networks = firewall.given_networks(shared)
        return remote, _network(machines, of_ranks, networks)

    def _start(self, remote, place, logs, variables):
        log = None
        if place.host.is_local and _GPUS in os.environ:
            variables = {_GPUS: os.environ[_GPUS], **variables}
        if place.rank > 0:
            log = logs.file(place.rank)
            # The last lines of a killed rank matter most.
            variables = {"PYTHONUNBUFFERED": "1", **variables}
        elif place.host.is_local:
            variables = {**variables, SHOWN_ERROR_VARIABLE: logs.shown_error}
        start = start_here
        if not place.host.is_local:
            start = functools.partial(remote.start, place.host)
        return start(
            place.rank,
            [self.kind, self.engine, *self.target],
            variables,
            stdout=log,
            stderr=log,
            inherit_stdin=place.rank == 0,
        )


def _network(machines, of_ranks, given):
    """The `environment.Network` of checked hosts.

    Args:
        of_ranks: List of `Place`, by rank.
        given: The networks in the environment; None for any.
    """
    found = [m.launcher_address for m in machines if m.launcher_address]
    # The launcher's machine may be among them by its name, and sees loopback.
    found.sort(key=lambda address: ipaddress.ip_address(address).is_loopback)
    here = next(iter(found), "127.0.0.1")
    networks = None
    if given is not None:
        own = [here, *addresses.of_interfaces()]
        for machine in machines:
            own += machine.own_addresses
        own = [ipaddress.ip_network(address) for address in dict.fromkeys(own)]
        networks = given + own
    return environment.Network(
        addresses=[
            machines[place.machine].address or here for place in of_ranks
        ],
        ports=[
            machines[place.machine].ports[place.topology.local_rank]
            for place in of_ranks
        ],
        here=here,
        networks=networks,
        cores=[machine.num_cores for machine in machines],
    )


def _wait(seconds, deadline, signals):
    end = time.monotonic() + seconds
    while time.monotonic() < min(end, deadline or end):
        signals.check()
        time.sleep(0.1)


class _Interrupted(Exception):
    """A signal came before there were ranks."""


class _Signals:
    """Collects the signals that end the launcher, while entered."""

    def __init__(self):
        self.received, self._before = [], {}

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            return self  # Only the main thread may set handlers.
        for number in _FORWARDED:
            # Signals that a parent ignores (nohup) stay ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number, frame):
        self.received.append(number)

    def check(self):
        if self.received:
            raise _Interrupted

    @property
    def name(self):
        return signal.Signals(self.received[0]).name

    @property
    def exit_code(self):
        """As in a shell."""
        return 128 + self.received[0]


class _Watched:
    """Waits for the ranks, forwards signals, and reports the end."""

    def __init__(self, processes, signals, deadline, timeout_seconds):
        self.shown = []  # lines of rank 0's shown error
        self.is_used_up = False  # whether a server's restarts are
        self._processes = processes
        self._signals = signals
        self._deadline = deadline
        self._timeout_seconds = timeout_seconds
        self._timed_out = False
        self._num_passed = 0

    def wait(self):
        self._processes.wait(self._on_poll)

    def exit_code(self):
        """0, or that of the rank that failed first."""
        if self._timed_out:
            return _TIMED_OUT
        if self._processes.succeeded():
            return 0
        if self._signals.received:
            return self._signals.exit_code
        return self._processes.causes()[0].exit_code

    @property
    def failed_by_itself(self):
        """Whether a rank, not the user or the timeout, ended the run."""
        return not self._signals.received and not self._timed_out

    def describe_cause(self):
        """A line about the rank that failed first."""
        cause = self._processes.causes()[0]
        output = f" (its output: {cause.log_path})" if cause.log_path else ""
        return self._describe(cause) + output

    def _describe(self, rank):
        size = len(self._processes.processes)
        return f"rank {rank.rank} of {size} {rank.describe_end()}"

    def report(self, folder):
        """Prints the failed ranks and their last lines to stderr."""
        ranks = self._processes.processes
        if self._timed_out:
            say(f"not done within {self._timeout_seconds:g} seconds; ended.")
            self._show(ranks, folder)
        elif self._signals.received:
            name = self._signals.name
            say(f"ended by {name}.")
            self._show([], folder)
        else:
            failed = self._processes.causes()
            ended = [r.rank for r in ranks if r.we_ended_it]
            for rank in failed:
                after = "" if rank is failed[0] else "after it, "
                say(f"{after}{self._describe(rank)}.")
            if ended:
                say(f"ended the others: {', '.join(map(str, ended))}.")
            self._show(failed, folder)

    def _show(self, ranks, folder):
        with_file = [rank for rank in ranks if rank.log_path]
        if not with_file and any(r.log_path for r in self._processes.processes):
            say(f"the other ranks' output: {folder}")
        same = [r for r in with_file if _has(r.last_lines(), self.shown)]
        if same:
            numbers = ", ".join(str(rank.rank) for rank in same)
            say(f"the same error on rank {numbers}; output: {folder}")
        with_file = [rank for rank in with_file if rank not in same]
        for rank in with_file[:_MAX_TAILS]:
            lines = rank.last_lines()
            said = "printed nothing" if not lines else "last lines"
            say(f"rank {rank.rank}, {said} ({rank.log_path}):")
            for line in lines:
                print(f"  | {line}", file=sys.stderr)
        if len(with_file) > _MAX_TAILS:
            say(f"the output of more ranks: {folder}")

    def _on_poll(self):
        received = self._signals.received
        while self._num_passed < len(received):
            # A further signal of the user makes `stop` send the next one.
            self._processes.stop(received[self._num_passed])
            self._num_passed += 1
        if self._deadline and time.monotonic() > self._deadline:
            self._deadline = None
            if self._processes.running():
                self._timed_out = True
                self._processes.dump_stacks()
                self._processes.stop()


def _has(lines, block):
    """Whether lines contain a block of lines, or begin within it."""
    if not block:
        return False
    block = block[-len(lines) :]
    starts = range(len(lines) - len(block) + 1)
    return any(lines[i : i + len(block)] == block for i in starts)
