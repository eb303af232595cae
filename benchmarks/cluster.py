"""A cluster on one machine, to measure what a network does to a training.

Each of its machines is a network namespace with an address of its own and a
link of a given rate, in each direction, and delay to a switch. A script is
started on them as on real machines, by `keras-sparsity run --hosts ...`; what
crosses each machine's interface is counted by the kernel. The last line is one
JSON object: that of the script, if its last line is one (see `_network.py`),
and the bytes of the whole run.

    python benchmarks/cluster.py --machines 4 --rate 50 \\
        benchmarks/workloads/lm.py --steps 40

Needs root. Nothing outlives it, also when it is killed: the namespaces have no
names, so they are gone with the last process inside, and one process of each
does nothing but wait for the end of this one and end all others then.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import _network
import _timing

_TOOLS = {
    "iproute2": ("ip", "tc"),
    "util-linux": ("mount", "nsenter", "unshare"),
}
_WORKLOAD = os.path.join(os.path.dirname(__file__), "workloads", "lm.py")
_MAX_MACHINES = 200
# The longer a link may save up what it has not sent, the more of a step's
# first bytes pass without a limit.
_BURST_SECONDS = 0.001
# What a switch's buffer holds, of one port.
_QUEUE_SECONDS = 0.1
_MIN_QUEUE_BYTES = 256 * 1024
_GRACE_SECONDS = 25

# The first process of a namespace. The hosts file is mounted from memory, for
# this namespace alone: Gloo asks it for the machine's own address. IPv6 would
# send neighbours' greetings, which would be counted. Reno is there on every
# kernel, whatever the system itself uses: four machines that all send to each
# other filled 98 % of 50 Mbit/s with it, 75 % with BBR.
_HOLD = """
set -e
mount -t tmpfs none /mnt
echo "$HOSTS" > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
umount -l /mnt
echo "$NAME" > /proc/sys/kernel/hostname
echo reno > /proc/sys/net/ipv4/tcp_congestion_control
for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do
    if [ -e "$file" ]; then echo 1 > "$file"; fi
done
ip link set lo up
echo ready
exec "$PYTHON" -I -S -c "$WATCH"
"""
# What it becomes: it waits for the end of its input, which is that of the
# process that made it, and ends all others of its namespace.
_WATCH = """
import os, signal, sys
def namespace(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
sys.stdin.read()
own, found = namespace("self"), True
while found:
    found = [
        int(pid) for pid in os.listdir("/proc")
        if pid.isdecimal() and namespace(pid) == own and int(pid) != os.getpid()
    ]
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
"""


class ClusterError(RuntimeError):
    """Raised when a cluster cannot be made."""


class Cluster:
    """Machines that exist inside of the `with` block.

    Args:
        machines: How many.
        processes: How many on each; what `run` starts.
        rate: Mbit/s of each machine's link, in each direction; 0: no limit.
        delay: Milliseconds from each machine to another.
        mtu: Bytes of a packet, its Ethernet header aside.

    Attributes:
        addresses: List of the machines' addresses.

    Example:

        with Cluster(machines=4, rate=50) as cluster:
            figures = cluster.run("workloads/lm.py", ["--steps", "40"])
    """

    def __init__(self, machines, processes=1, rate=0, delay=0, mtu=1500):
        for name, value, low, high in (
            ("machines", machines, 1, _MAX_MACHINES),
            ("processes", processes, 1, 1000),
            ("rate", rate, 0, 100_000),
            ("delay", delay, 0, 10_000),
            ("mtu", mtu, 576, 65_535),
        ):
            if not low <= value <= high:
                raise ClusterError(
                    f"`{name}` must be from {low} to {high}. Received: {value}."
                )
        self.machines, self.processes = machines, processes
        self.rate, self.delay, self.mtu = rate, delay, mtu
        self.addresses = [f"10.0.0.{1 + index}" for index in range(machines)]
        self._holders = []
        self._started = []

    def __enter__(self):
        _check_possible()
        self._signals = contextlib.ExitStack()
        self._signals.enter_context(_signals_raise())
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        try:
            self._end()
        finally:
            for holder in self._holders:
                holder.stdin.close()
            for holder in self._holders:
                with holder:
                    pass  # It closes the pipes and waits.
            self._holders = []
            self._signals.close()

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
        hosts = ",".join(f"{a}:{self.processes}" for a in self.addresses)
        command = [sys.executable, "-m", "keras_sparsity.launch", "run"]
        command += ["--hosts", hosts, "--env", _network.VARIABLE]
        command += ["--engine", engine] if engine else []
        command += [*options, script, *arguments]
        environment = {"KERAS_SPARSITY_SSH": self._ssh_command()}
        # It starts all from the switch, whose own link has no limit.
        return self.run_commands([(None, command, environment)])

    def run_commands(self, commands):
        """Runs one command or more, each on a machine.

        Ends when the first one has ended or any has failed; others that run
        on, as servers do, are then ended.

        Args:
            commands: List of `(machine, arguments, environment)`: the number
                of the machine, or None for the switch; the command as a list;
                a dict of what it needs in its environment. The first one's
                output is shown.

        Returns:
            dict of what the cluster is; of what the first one's last line
            says, if that is a JSON object; of `whole_run`, what each
            machine's interface has carried; and of `exit_code`.
        """
        before = self._counters()
        begin = time.monotonic()
        tail = _Tail()
        for machine, arguments, environment in commands:
            self._start(machine, arguments, environment, tail)
        while not (code := self._exit_code()) and self._started[0].poll() != 0:
            time.sleep(0.02)
        tail.wait()
        seconds = time.monotonic() - begin
        carried = _network.difference(self._counters(), before)
        self._end()
        return {
            **self._description(),
            **tail.json_object(),
            "whole_run": {"seconds": round(seconds, 3), "per_machine": carried},
            "exit_code": code,
        }

    def _description(self):
        return {
            "machines": self.machines,
            "processes": self.processes,
            "rate_mbit": self.rate,
            "delay_ms": self.delay,
            "mtu": self.mtu,
        }

    def _counters(self):
        return [_network.counters(holder.pid) for holder in self._holders[1:]]

    # How it is made.

    def _make(self):
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{address} machine-{index}\n"
            for index, address in enumerate(self.addresses)
        )
        names = [f"machine-{index}" for index in range(self.machines)]
        for name in ["switch", *names]:
            self._hold(name, hosts)
        switch, *machines = self._holders
        link = f"mtu {self.mtu} gso_max_segs 1"
        lines = ["link add switch type bridge mcast_snooping 0"]
        for index, machine in enumerate(machines):
            lines += [
                f"link add port{index} {link} type veth peer name "
                f"{_network.INTERFACE} {link} netns {machine.pid}",
                f"link set port{index} master switch up",
            ]
        lines += ["addr add 10.0.0.254/24 dev switch", "link set switch up"]
        _batch("ip", switch, lines)
        received = [f"port{index}" for index in range(self.machines)]
        self._limit(switch, received)
        for machine, address in zip(machines, self.addresses, strict=True):
            lines = [
                f"addr add {address}/24 dev {_network.INTERFACE}",
                f"link set {_network.INTERFACE} up",
            ]
            _batch("ip", machine, lines)
            self._limit(machine, [_network.INTERFACE], delay=self.delay)

    def _hold(self, name, hosts):
        """Makes a namespace, and a process that it lasts as long as."""
        holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c", _HOLD],
            env={
                **os.environ,
                "NAME": name,
                "HOSTS": hosts,
                "PYTHON": sys.executable,
                "WATCH": _WATCH,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._holders.append(holder)
        if holder.stdout.readline() != "ready\n":
            raise ClusterError(
                "This system lets us make no network namespace: "
                f"{holder.stderr.read().strip()}. In a container, root needs "
                "more than it usually has: docker run --privileged."
            )

    def _limit(self, holder, interfaces, delay=0):
        lines = []
        for interface in interfaces:
            place = "root"
            if delay:
                lines.append(
                    f"qdisc add dev {interface} root handle 1: netem "
                    f"delay {delay}ms limit 1000000"
                )
                place = "parent 1:1"
            if self.rate:
                bytes_per_second = self.rate * 1e6 / 8
                burst = max(
                    bytes_per_second * _BURST_SECONDS, 2 * (self.mtu + 14)
                )
                limit = max(bytes_per_second * _QUEUE_SECONDS, _MIN_QUEUE_BYTES)
                lines.append(
                    f"qdisc add dev {interface} {place} tbf rate "
                    f"{self.rate}mbit burst {burst:.0f} limit {limit:.0f}"
                )
        try:
            _batch("tc", holder, lines)
        except ClusterError as error:
            if delay and "kind is unknown" in str(error):
                raise ClusterError(
                    "This kernel has no netem (the module sch_netem), which "
                    f"delays packets: leave the delay at 0. Received: {delay}."
                ) from None
            raise

    # How commands are run in it.

    def _ssh_command(self):
        """A stand-in for ssh: HOST COMMAND runs COMMAND on that machine."""
        cases = "".join(
            f"{address}) pid={machine.pid};; "
            for address, machine in zip(
                self.addresses, self._holders[1:], strict=True
            )
        )
        # As behind a real one there is nothing of our environment.
        script = (
            f"case $0 in {cases}esac; exec nsenter --target $pid --net "
            '--mount --uts env -i HOME="$HOME" PATH="$PATH" sh -c "exec $1"'
        )
        return shlex.join(["sh", "-c", script])

    def _start(self, machine, arguments, environment, tail):
        holder = self._holders[0 if machine is None else 1 + machine]
        cluster = {
            **self._description(),
            "pids": [holder.pid for holder in self._holders[1:]],
        }
        command = [
            *["nsenter", "--target", str(holder.pid)],
            *["--net", "--mount", "--uts"],
            # Another mount namespace begins in its root.
            *["env", f"--chdir={os.getcwd()}", *arguments],
        ]
        is_first = not self._started
        process = subprocess.Popen(
            command,
            env={
                **_shared_processors(self.machines * self.processes),
                **os.environ,
                **environment,
                _network.VARIABLE: json.dumps(cluster),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_first else subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        if is_first:
            tail.follow(process.stdout)

    def _exit_code(self):
        """That of the first that failed, else 0."""
        codes = [process.poll() for process in self._started]
        return next((code for code in codes if code), 0)

    def _end(self):
        """Ends what was started."""
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


class _Tail:
    """Shows what a process prints, and keeps the last line."""

    def __init__(self):
        self._thread = None
        self._last_line = ""

    def follow(self, stream):
        self._thread = threading.Thread(
            target=self._copy, args=(stream,), daemon=True
        )
        self._thread.start()

    def wait(self):
        # Not for ever: what the process has left behind may hold its output.
        self._thread.join(1)

    def json_object(self):
        """The last line's, empty where it is something else."""
        try:
            found = json.loads(self._last_line)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _copy(self, stream):
        with stream:
            for line in stream:
                print(line, end="", flush=True)
                if line.strip():
                    self._last_line = line


def _check_possible():
    if os.geteuid() != 0:
        raise ClusterError(
            "An emulated cluster is made of network namespaces, which root "
            f"alone may make. This is user {os.geteuid()}: run it as root "
            "(sudo), or in a container of your own."
        )
    for package, tools in _TOOLS.items():
        missing = [tool for tool in tools if not shutil.which(tool)]
        if missing:
            raise ClusterError(
                f"An emulated cluster needs {', '.join(missing)}: install "
                f"{package} (apt-get install {package})."
            )


@contextlib.contextmanager
def _signals_raise():
    """SIGTERM and SIGHUP end the `with` block, as Ctrl-C does."""

    def end(number, _):
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may set handlers.
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _batch(tool, holder, lines):
    """Runs lines of `ip` or `tc` in a namespace."""
    done = subprocess.run(
        ["nsenter", "--target", str(holder.pid), "--net", tool, "-batch", "-"],
        input="\n".join(lines) + "\n",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise ClusterError(
            f"{tool} failed: {done.stderr.strip()}\nOf these lines:\n"
            + "\n".join(lines)
        )


def _shared_processors(num_processes):
    """Each process's threads: the emulated machines have the same cores."""
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
    code = figures["exit_code"]
    _timing.finish(figures, [f"{args.script}: exit code {code}"] * bool(code))


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--machines", type=int, default=2)
    add("--processes", type=int, default=1, help="on each machine")
    add(
        "--rate",
        type=float,
        default=50,
        help="Mbit/s of each machine, in each direction; 0: no limit",
    )
    add("--delay", type=float, default=0, help="ms from machine to machine")
    add("--mtu", type=int, default=1500, help="bytes of a packet")
    add("--engine", help="native or horovod")
    add("--timeout", type=float, help="end everything after so many seconds")
    add("script", nargs="?", default=_WORKLOAD, help="by default workloads/lm")
    add("arguments", nargs=argparse.REMAINDER, help="the script's")
    return parser.parse_args()


if __name__ == "__main__":
    main()
