"""Machines that are network namespaces of this one, on one switch.

They end with the process that made them, however that ends: a namespace without
a name is gone with its last process, and one process of each waits for the
maker's end and then ends all others. Nothing is written to a disk or changed
outside: the switch has a namespace of its own, so each cluster has all
addresses.
"""

import os
import shlex
import shutil
import subprocess
import sys

import _links
from _links import ClusterError

_TOOLS = {
    "iproute2": ("ip", "tc"),
    "util-linux": ("mount", "nsenter", "taskset", "unshare"),
}
_SWITCH_ADDRESS = "10.0.0.254"

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
# The holder's program: it waits for the end of its input, which its maker
# holds, and ends all other processes of its namespace. A process that is about
# to enter ends itself when it sees the name.
_WATCH = """
import os, signal, sys
def namespace(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
sys.stdin.read()
with open("/proc/sys/kernel/hostname", "w") as file:
    file.write(os.environ["ENDED"])
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


class Machines:
    """Emulated machines, for the length of a `with` block.

    Args:
        number: How many.
        rate: Mbit/s of each machine's link, in each direction; 0: no limit.
        delay: Milliseconds from each machine to another.
        mtu: Bytes of a packet, its Ethernet header aside.

    Attributes:
        addresses: List of their addresses.
        cores: List of the list of each one's cores: as many of its own as the
            others have, or all where there are fewer cores than machines.
        pids: List of a process id in each one's namespace.
        links: `_links.Links`.
    """

    def __init__(self, number, rate, delay, mtu):
        self._rate, self._delay, self._mtu = rate, delay, mtu
        self.addresses = [f"10.0.0.{1 + index}" for index in range(number)]
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // number
        self.cores = [
            cores[each * index : each * (index + 1)] or cores
            for index in range(number)
        ]
        self._holders = []

    @property
    def pids(self):
        return [holder.pid for holder in self._holders[1:]]

    @property
    def links(self):
        switch, *_ = (holder.pid for holder in self._holders)
        return _links.Links(switch, self.pids, self._delay, self._mtu)

    def __enter__(self):
        _check_possible()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        for holder in self._holders:
            holder.stdin.close()
        for holder in self._holders:
            with holder:
                pass  # It closes the pipes and waits.
        self._holders = []

    def command(self, machine, arguments):
        """The command that runs another one on a machine, in this folder.

        Args:
            machine: The machine's index, None for the switch, whose own link
                has no limit.
            arguments: The command, a list.
        """
        holder = self._holders[0 if machine is None else 1 + machine]
        # Another mount namespace begins in its root.
        folder = f"--chdir={os.getcwd()}"
        own = [] if machine is None else ["taskset", "-c", self._list(machine)]
        return [*_links.enter(holder.pid), *own, "env", folder, *arguments]

    def ssh_command(self):
        """A stand-in for ssh: HOST COMMAND runs COMMAND on that machine."""
        cases = "".join(
            f"{address}) pid={pid} cores={self._list(machine)};; "
            for machine, (address, pid) in enumerate(
                zip(self.addresses, self.pids, strict=True)
            )
        )
        enter = shlex.join(_links.enter("PID")).replace("PID", "$pid", 1)
        # As behind a real one there is nothing of our environment.
        script = (
            f"case $0 in {cases}esac; exec taskset -c $cores {enter} "
            'env -i HOME="$HOME" PATH="$PATH" sh -c "exec $1"'
        )
        return shlex.join(["sh", "-c", script])

    def _list(self, machine):
        """A machine's cores, as `taskset` takes them."""
        return ",".join(map(str, self.cores[machine]))

    def _make(self):
        names = [f"machine-{index}" for index in range(len(self.addresses))]
        pairs = zip(self.addresses, names, strict=True)
        hosts = "\n".join(
            ["127.0.0.1 localhost", *(" ".join(pair) for pair in pairs)]
        )
        for name in ["switch", *names]:
            self._hold(name, hosts)
        switch, *machines = (holder.pid for holder in self._holders)
        link = f"mtu {self._mtu} gso_max_segs 1"
        lines = ["link add switch type bridge mcast_snooping 0"]
        for index, machine in enumerate(machines):
            lines += [
                f"link add port{index} {link} type veth peer name "
                f"{_links.INTERFACE} {link} netns {machine}",
                f"link set port{index} master switch up",
            ]
        lines += [
            f"addr add {_SWITCH_ADDRESS}/24 dev switch",
            "link set switch up",
        ]
        _links.batch("ip", switch, lines)
        for machine, address in zip(machines, self.addresses, strict=True):
            lines = [
                f"addr add {address}/24 dev {_links.INTERFACE}",
                f"link set {_links.INTERFACE} up",
            ]
            _links.batch("ip", machine, lines)
        self.links.limit(self._rate)

    def _hold(self, name, hosts):
        """Makes a namespace and the process that holds it."""
        holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c", _HOLD],
            env={
                **os.environ,
                "NAME": name,
                "HOSTS": hosts,
                "PYTHON": sys.executable,
                "WATCH": _WATCH,
                "ENDED": _links.ENDED,
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
