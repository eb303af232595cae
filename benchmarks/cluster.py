"""An emulated cluster, to measure the network's part of a training.

Each machine is a network namespace with its own address and a link to a switch,
of a given rate in each direction and delay. `keras-sparsity run --hosts ...`
starts a script on them as on real machines; the kernel counts the bytes of each
machine's interface. The last line is one JSON object: the script's last line,
if it is one (see `_network.py`), with the bytes of the whole run.

    python benchmarks/cluster.py --machines 4 --rate 50 \\
        benchmarks/workloads/lm.py --steps 40

Needs root. Leaves nothing behind, even when it is killed (`_namespaces.py`).
"""

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import _network
import _program
from _namespaces import ClusterError, Machines

_WORKLOAD = os.path.join(os.path.dirname(__file__), "workloads", "lm.py")
_MAX_MACHINES = 200
# Jumbo frames. Eight machines, all to all, filled 98 % of 200 Mbit/s on two
# cores; with 1,500 bytes the packets' cost left 60 %.
MTU = 9000
# More than the launcher gives its ranks.
_GRACE_SECONDS = 25


class Cluster:
    """An emulated cluster, for the length of a `with` block.

    Args:
        machines: Their number.
        processes: Their number on each machine, for `run`.
        rate: Mbit/s of each machine's link, in each direction; 0: no limit.
            A script measures at each of several, in turn (`_network.py`);
            until then links have the first one.
        delay: Milliseconds from each machine to another.
        mtu: Bytes of a packet, its Ethernet header aside.

    Attributes:
        addresses: List of the machines' addresses.

    Example:

        with Cluster(machines=4, rate=50) as cluster:
            figures = cluster.run("workloads/lm.py", ["--steps", "40"])
    """

    def __init__(self, machines, processes=1, rate=0, delay=0, mtu=MTU):
        rates = list(rate) if isinstance(rate, (list, tuple)) else [rate]
        for name, value, low, high in (
            ("machines", machines, 1, _MAX_MACHINES),
            ("processes", processes, 1, 1000),
            *(("rate", rate, 0, 100_000) for rate in rates),
            ("delay", delay, 0, 10_000),
            ("mtu", mtu, 576, 65_535),
        ):
            if not low <= value <= high:
                raise ClusterError(
                    f"`{name}` must be from {low} to {high}. Received: {value}."
                )
        self._description = {
            "machines": machines,
            "processes": processes,
            "rates_mbit": rates,
            "delay_ms": delay,
            "mtu": mtu,
        }
        self._processes = processes
        self._machines = Machines(machines, rates[0], delay, mtu)
        self.addresses = self._machines.addresses
        self._started = []

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.enter_context(_signals_raise())
            stack.enter_context(self._machines)
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def run(self, script, arguments=(), engine=None, options=()):
        """Runs a script on all machines, by `keras-sparsity run`.

        Args:
            script: Its path.
            arguments: List of its arguments.
            engine: `"native"`, `"horovod"` or None to choose.
            options: List of further options of `keras-sparsity run`.

        Returns:
            See `run_commands`.
        """
        command = self.command(script, arguments, engine, options)
        return self.run_commands([command])

    def command(
        self, script, arguments=(), engine=None, options=(), first_machine=0
    ):
        """The command by which `run` does so, for `run_commands`.

        Args:
            script, arguments, engine, options: See `run`.
            first_machine: The index of the machine of rank 0; the others
                follow it in turn.
        """
        turned = self.addresses[first_machine:] + self.addresses[:first_machine]
        hosts = ",".join(f"{a}:{self._processes}" for a in turned)
        command = [sys.executable, "-m", "keras_sparsity.launch", "run"]
        command += ["--hosts", hosts, "--env", _network.VARIABLE]
        command += ["--engine", engine] if engine else []
        command += [*options, script, *arguments]
        ssh = {"KERAS_SPARSITY_SSH": self._machines.ssh_command()}
        return None, command, ssh

    def run_commands(self, commands, until_all_end=False):
        """Runs commands, each on a machine.

        Ends when the first command has ended or any has failed, and ends the
        others then: servers, for example.

        Args:
            until_all_end: Whether the first one waits for the others.
            commands: List of `(machine, arguments, environment)`: the index
                of the machine, or None for the switch, whose own link has no
                limit; the command as a list; a dict of environment variables.
                The first command's output is shown.

        Returns:
            dict of the cluster's description, the first command's last line
            if it is a JSON object, `whole_run` with the bytes of each
            machine's interface, and `exit_code`.
        """
        before = self._counters()
        begin = time.monotonic()
        first, *_ = [self._start(*command) for command in commands]
        shown = _Shown(first.stdout)
        awaited = self._started if until_all_end else [first]
        while any(p.poll() is None for p in awaited) and not self._exit_code():
            time.sleep(0.02)
        code = self._exit_code()
        seconds = time.monotonic() - begin
        carried = _network.difference(self._counters(), before)
        self._end()
        return {
            **self._description,
            **shown.json_object(),
            "whole_run": {"seconds": round(seconds, 3), "per_machine": carried},
            "exit_code": code,
        }

    def _counters(self):
        return [_network.counters(pid) for pid in self._machines.pids]

    def _start(self, machine, arguments, environment):
        cluster = {**self._description, "links": self._machines.links}
        is_first = not self._started
        process = subprocess.Popen(
            self._machines.command(machine, arguments),
            env={
                **_shared_cores(len(self.addresses) * self._processes),
                **os.environ,
                **environment,
                _network.VARIABLE: json.dumps(cluster),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_first else subprocess.DEVNULL,
            text=True,
            # The terminal's Ctrl-C reaches this process alone.
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def _exit_code(self):
        """The first failed command's, else 0."""
        codes = [process.poll() for process in self._started]
        return next((code for code in codes if code), 0)

    def _end(self):
        """Ends all commands."""
        try:
            running = [p for p in self._started if p.poll() is None]
            for process in running:
                process.terminate()
            deadline = time.monotonic() + _GRACE_SECONDS
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0, deadline - time.monotonic()))
        finally:
            for process in self._started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._started = []


class _Shown:
    """Shows a process's output and keeps its last line."""

    def __init__(self, stream):
        self._last_line = ""
        self._thread = threading.Thread(
            target=self._copy, args=(stream,), daemon=True
        )
        self._thread.start()

    def json_object(self):
        """The last line's; empty if it has none."""
        # A limited time: a process left behind may hold the output.
        self._thread.join(1)
        return _program.last_json(self._last_line)

    def _copy(self, stream):
        with stream:
            for line in stream:
                print(line, end="", flush=True)
                if line.strip():
                    self._last_line = line


@contextlib.contextmanager
def _signals_raise():
    """SIGTERM and SIGHUP end the `with` block, as Ctrl-C does."""

    def end(number, _):
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may set handlers.
        return
    before = {
        number: signal.signal(number, end)
        for number in (signal.SIGTERM, signal.SIGHUP)
        # Signals that a parent had us ignore (nohup) stay ignored.
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _shared_cores(num_processes):
    """Each process's threads: its part of this machine's cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    return {
        "OMP_NUM_THREADS": str(threads),
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": str(max(2, threads)),
    }


def main():
    args = parse_arguments()
    options = []
    if args.timeout is not None:
        options = ["--timeout", str(args.timeout)]
    try:
        with Cluster(
            args.machines, args.processes, args.rate, args.delay, args.mtu
        ) as cluster:
            figures = cluster.run(
                args.script, args.arguments, args.engine, options
            )
    except ClusterError as error:
        sys.exit(f"cluster.py: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finish(figures, args.script)


def measure(script, arguments, engine, **cluster):
    """Runs a script on a cluster of its own.

    Args:
        script, arguments, engine: See `Cluster.run`.
        **cluster: See `Cluster`.

    Returns:
        List of the script's figures, one dict for each rate. Without figures
        the program ends, with what the script printed.
    """
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), Cluster(**cluster) as machines:
            figures = machines.run(script, arguments, engine)
    except ClusterError as error:
        sys.exit(f"{os.path.basename(script)}: {error}")
    if figures["exit_code"]:
        code = figures["exit_code"]
        sys.exit(f"{shown.getvalue()}\n{script}: exit code {code}")
    return _network.by_rate(figures)


def finish(figures, script):
    """Prints the figures of `Cluster.run` in words, and ends the program."""
    _show(figures)
    code = figures["exit_code"]
    _program.finish(figures, [f"{script}: exit code {code}"] * bool(code))


def _show(figures):
    for at_rate in _network.by_rate({"windows": [], **figures}):
        print(
            f"{at_rate['rate_mbit']:g} Mbit/s: "
            f"{at_rate['steps_per_second']:,.2f} steps/s, "
            f"{at_rate['words_per_second']:,.0f} words/s; the network explains "
            f"{at_rate.get('network_share', 0):.0%} of the time, the "
            f"processors were busy for {at_rate['processor_share']:.0%}"
        )
        for index, machine in enumerate(at_rate["per_machine"]):
            ways = (
                f"{way} {machine[f'{way}_bytes_per_step']:,} bytes a step "
                f"({machine[f'{way}_payload_bytes_per_step']:,} without "
                "headers)"
                for way in ("sent", "received")
            )
            print(f"machine {index}: {', '.join(ways)}")


def options(add):
    """Adds a `Cluster`'s options by `ArgumentParser.add_argument`."""
    add("--machines", type=int, default=2)
    add("--processes", type=int, default=1, help="on each machine")
    add(
        "--rate",
        type=_rates,
        default=[50],
        metavar="RATE[,RATE...]",
        help="Mbit/s of each machine, in each direction; 0: no limit; a "
        "workload is measured at each of several",
    )
    add("--delay", type=float, default=0, help="ms from machine to machine")
    add("--mtu", type=int, default=MTU, help="bytes of a packet")


def _rates(text):
    return [float(number) for number in text.split(",")]


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    options(add)
    add("--engine", help="native or horovod")
    add("--timeout", type=float, help="end everything after so many seconds")
    add("script", nargs="?", default=_WORKLOAD, help="by default workloads/lm")
    add("arguments", nargs=argparse.REMAINDER, help="the script's")
    return parser.parse_args()


if __name__ == "__main__":
    main()
