"""What a network carries in a timed window, for scripts that are measured.

`cluster.py` says in the environment where its machines' counters are. A script
brackets what it measures:

    window = _network.Window()
    ...                             # warm up, wait for each other
    window.begin()
    ...                             # the steps
    ...                             # wait for each other
    window.end()
    window.idle()                   # on all processes alike
    if rank == 0:
        window.report(num_steps, words_per_step)

Nothing here imports TensorFlow, or says how the processes wait for each other:
`peers/` need not know this library.
"""

import json
import os
import time

# JSON: what `cluster.py` emulates, and for each machine a process id that is
# in its network namespace.
VARIABLE = "EMULATED_CLUSTER"
INTERFACE = "eth0"
# Ethernet, IPv4 and TCP with timestamps. Of each packet, and all that there is
# of an acknowledgement.
HEADER_BYTES = 14 + 20 + 32
_MAX_IDLE_SECONDS = 10


def counters(pid, interface=INTERFACE):
    """What an interface has carried since it is up, from the kernel.

    Args:
        pid: A process in the interface's network namespace.
        interface: Its name.

    Returns:
        dict of `sent_bytes`, `received_bytes`, whole packets with all their
        headers, and of `sent_packets`, `received_packets`.
    """
    with open(f"/proc/{pid}/net/dev") as file:
        (line,) = (x for x in file if x.strip().startswith(f"{interface}:"))
    numbers = [int(number) for number in line.partition(":")[2].split()]
    return {
        "sent_bytes": numbers[8],
        "received_bytes": numbers[0],
        "sent_packets": numbers[9],
        "received_packets": numbers[1],
    }


def difference(after, before):
    """The same numbers of each machine, of the time between."""
    return [
        {name: a[name] - b[name] for name in a}
        for a, b in zip(after, before, strict=True)
    ]


class Window:
    """Times some steps, and what the machines' interfaces carry meanwhile.

    Started by hand, outside of a cluster, it reports the time alone.
    """

    def __init__(self):
        self.cluster = json.loads(os.environ.get(VARIABLE, "{}"))
        self._pids = self.cluster.pop("pids", [])

    def begin(self):
        self._before = self._read()

    def end(self):
        self.seconds, self.busy_seconds, self.carried = self._since(
            self._before
        )

    def idle(self):
        """Rests as long as the window took, to measure what idling sends."""
        before = self._read()
        time.sleep(min(self.seconds, _MAX_IDLE_SECONDS))
        self.idle_seconds, _, self.idle_carried = self._since(before)

    def figures(self, num_steps, words_per_step):
        """What was measured.

        Args:
            num_steps: Steps between `begin` and `end`.
            words_per_step: Words, images or samples of all processes.

        Returns:
            dict. For each machine the bytes per step are less what it carries
            when idle, and `payload` is without the packets' headers. The
            network's share is that of the time for which the busiest
            interface's bytes, idle ones included, keep it occupied.
        """
        figures = {
            **self.cluster,
            "steps": num_steps,
            "seconds": round(self.seconds, 3),
            "steps_per_second": round(num_steps / self.seconds, 3),
            "words_per_second": round(
                num_steps * words_per_step / self.seconds, 1
            ),
            "processor_share": round(
                self.busy_seconds / self.seconds / os.cpu_count(), 3
            ),
        }
        if not self._pids:
            return figures
        rate = self.cluster["rate_mbit"]
        if rate:
            busiest = max(
                max(machine["sent_bytes"], machine["received_bytes"])
                for machine in self.carried
            )
            seconds = busiest * 8 / (rate * 1e6)
            figures["network_share"] = round(seconds / self.seconds, 3)
        figures["per_machine"] = [
            self._of_machine(carried, idle, num_steps)
            for carried, idle in zip(
                self.carried, self.idle_carried, strict=True
            )
        ]
        return figures

    def report(self, num_steps, words_per_step, **others):
        """Prints the figures, and others, as a line that `cluster.py` reads."""
        figures = {**self.figures(num_steps, words_per_step), **others}
        print(json.dumps(figures), flush=True)

    def _of_machine(self, carried, idle, num_steps):
        found = {}
        for way in ("sent", "received"):
            in_all, packets, idle_in_all, idle_packets = (
                c[f"{way}_{unit}"]
                for c in (carried, idle)
                for unit in ("bytes", "packets")
            )
            share = self.seconds / self.idle_seconds
            payload = in_all - packets * HEADER_BYTES
            idle_payload = idle_in_all - idle_packets * HEADER_BYTES
            found |= {
                f"{way}_bytes": in_all,
                f"{way}_bytes_per_step": round(
                    (in_all - idle_in_all * share) / num_steps
                ),
                f"{way}_payload_bytes_per_step": round(
                    (payload - idle_payload * share) / num_steps
                ),
                f"{way}_idle_bytes_per_second": round(
                    idle_in_all / self.idle_seconds
                ),
            }
        return found

    def _read(self):
        return (
            time.perf_counter(),
            _busy_seconds(),
            [counters(pid) for pid in self._pids],
        )

    def _since(self, before):
        seconds, busy, carried = self._read()
        return (
            seconds - before[0],
            busy - before[1],
            difference(carried, before[2]),
        )


def busy_share(seconds=1.0):
    """Which share of a second the processors have work, of whomever."""
    before = _busy_seconds()
    time.sleep(seconds)
    busy = _busy_seconds() - before
    return round(busy / seconds / os.cpu_count(), 3)


def _busy_seconds():
    """Seconds for which the processors had work, of whomever."""
    with open("/proc/stat") as file:
        numbers = [int(number) for number in file.readline().split()[1:9]]
    idle_and_waiting = numbers[3] + numbers[4]
    return (sum(numbers) - idle_and_waiting) / os.sysconf("SC_CLK_TCK")
