"""The links of emulated machines to their switch: rates and delay, by `tc`."""

import subprocess
from typing import NamedTuple

INTERFACE = "eth0"
# A machine's name while its processes are being ended. A process that enters
# and finds another name is early enough to be ended with the others.
ENDED = "ended"
_UNLESS_ENDED = f"""\
read -r name < /proc/sys/kernel/hostname
if [ "$name" = {ENDED} ]; then
    echo "this machine has ended" >&2
    exit 1
fi
exec "$@"
"""
# A token bucket's depth: a step's first bytes pass without a limit.
_BURST_SECONDS = 0.001
# Buffer of a switch's port.
_QUEUE_SECONDS = 0.1
_MIN_QUEUE_BYTES = 256 * 1024
_LONG_QUEUE = "limit 1000000"  # packets


class ClusterError(RuntimeError):
    """Raised when this machine cannot emulate a cluster."""


class Links(NamedTuple):
    """The machines' links, which any machine can limit.

    Args:
        switch: A process id in the switch's network namespace.
        machines: List of one in each machine's.
        delay: Milliseconds from each machine to another.
        mtu: Bytes of a packet, its Ethernet header aside.
    """

    switch: int
    machines: list
    delay: float
    mtu: int

    def limit(self, rate):
        """Sets the rate of all links, in each direction.

        Args:
            rate: Mbit/s; 0: no limit.
        """
        # The delay comes behind the sender's limit, where TCP keeps short
        # queues only as long as nothing takes its packets from it at once.
        ports = [f"port{index}" for index in range(len(self.machines))]
        self._limit(self.switch, ports, rate, self.delay)
        for machine in self.machines:
            self._limit(machine, [INTERFACE], rate)

    def _limit(self, pid, interfaces, rate, delay=0):
        lines = []
        for interface in interfaces:
            place, of_no_limit = "root", "noqueue"
            if delay:
                lines.append(
                    f"qdisc replace dev {interface} root handle 1: netem "
                    f"delay {delay}ms {_LONG_QUEUE}"
                )
                place, of_no_limit = "parent 1:1", f"pfifo {_LONG_QUEUE}"
            of_this = self._bucket(rate) if rate else of_no_limit
            lines.append(f"qdisc replace dev {interface} {place} {of_this}")
        try:
            batch("tc", pid, lines)
        except ClusterError as error:
            if delay and "kind is unknown" in str(error):
                raise ClusterError(
                    "This kernel has no netem (the module sch_netem), which "
                    f"delays packets: leave the delay at 0. Received: {delay}."
                ) from None
            raise

    def _bucket(self, rate):
        bytes_per_second = rate * 1e6 / 8
        burst = max(bytes_per_second * _BURST_SECONDS, 2 * (self.mtu + 14))
        limit = max(bytes_per_second * _QUEUE_SECONDS, _MIN_QUEUE_BYTES)
        return f"tbf rate {rate}mbit burst {burst:.0f} limit {limit:.0f}"


def enter(pid):
    """The prefix of a command that runs in a process's namespaces."""
    return [
        *("nsenter", "--target", str(pid), "--net", "--mount", "--uts"),
        *("sh", "-c", _UNLESS_ENDED, "enter"),
    ]


def batch(tool, pid, lines):
    """Runs lines of `ip` or `tc` in a process's namespace."""
    done = subprocess.run(
        [*enter(pid), tool, "-batch", "-"],
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
