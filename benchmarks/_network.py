"""Timed windows with the bytes a network carries, for measured scripts.

`cluster.py` puts the machines' counters and the rates of their links into the
environment. A script brackets its measured steps, on all processes alike:

    window = _network.Window(is_first=rank == 0)
    window.open()                   # no limit while it prepares
    ...                             # warm up
    for rate in window.rates:
        ...                         # wait for each other
        window.limit(rate)
        ...                         # some steps, wait for each other
        window.begin()
        ...                         # the steps
        ...                         # wait for each other
        window.end(num_steps)
    window.idle()
    window.report(words_per_step)

Links have the first rate until the script changes it. This module neither
imports TensorFlow nor knows how the processes wait for each other: `peers/` do
not use this library.
"""

import json
import os
import time

from _links import INTERFACE, Links

# JSON: the cluster's description and its `Links`.
VARIABLE = "EMULATED_CLUSTER"
# Ethernet, IPv4 and TCP with timestamps: of each packet, and a whole
# acknowledgement.
HEADER_BYTES = 14 + 20 + 32
_MAX_IDLE_SECONDS = 10
# Steps in which TCP adapts to a new rate.
SETTLE = 2


def counters(pid, interface=INTERFACE):
    """The kernel's counters of an interface, since it is up.

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
    """The difference of the machines' counters."""
    return [
        {name: a[name] - b[name] for name in a}
        for a, b in zip(after, before, strict=True)
    ]


def by_rate(figures):
    """Figures of a run, split by rate.

    Args:
        figures: The line of `Window.report`, and more.

    Returns:
        List of dicts, one for each rate.
    """
    common = {k: v for k, v in figures.items() if k != "windows"}
    return [{**common, **window} for window in figures["windows"]]


class Window:
    """Times some steps at each rate, and counts the interfaces' bytes.

    Outside of a cluster it reports the time alone.

    Args:
        is_first: Whether this process sets the rates and reports. Others only
            rest in `idle`.

    Attributes:
        rates: List of Mbit/s, 0 for no limit.
    """

    def __init__(self, is_first=True):
        self._is_first = is_first
        self._cluster = json.loads(os.environ.get(VARIABLE, "{}"))
        links = self._cluster.pop("links", None)
        self._links = Links(*links) if links else None
        self._pids = self._links.machines if links else []
        self.rates = self._cluster.pop("rates_mbit", [0])
        self._rate = self.rates[0]
        self._found = {}

    def open(self):
        """Removes the limit, for the script's preparations."""
        self.limit(0)

    def limit(self, rate):
        """Sets the rate of all links."""
        self._rate = rate
        if self._is_first and self._links:
            self._links.limit(rate)

    def begin(self):
        self._before = self._read()

    def end(self, num_steps):
        """Ends the window; the last one of each rate counts.

        Args:
            num_steps: Steps since `begin`.
        """
        found = self._since(self._before)
        self.seconds = found[0]
        self._found[self._rate] = (num_steps, *found)

    def extend(self, moment):
        """Has the last window end later, when other processes have.

        Args:
            moment: Of `time.perf_counter`.
        """
        self.seconds = moment - self._before[0]
        num_steps, _, *others = self._found[self._rate]
        self._found[self._rate] = (num_steps, self.seconds, *others)

    def idle(self):
        """Rests as long as a window, to measure the traffic of idling."""
        longest = max(seconds for _, seconds, _, _ in self._found.values())
        before = self._read()
        time.sleep(min(longest, _MAX_IDLE_SECONDS))
        self._idle_seconds, _, self._idle_carried = self._since(before)

    def figures(self, words_per_step):
        """The measured figures.

        Args:
            words_per_step: Words, images or samples of all processes.

        Returns:
            dict of the cluster's description and of `windows`, one dict for
            each rate. A machine's bytes per step are those beyond its idle
            traffic; `payload` excludes the packets' headers. The network's
            share is the part of the time in which the busiest interface's
            bytes, idle ones included, occupy it.
        """
        return {
            **self._cluster,
            "windows": [
                self._at_rate(rate, *found, words_per_step)
                for rate, found in self._found.items()
            ],
        }

    def report(self, words_per_step, **others):
        """Prints the figures and others as the line that `cluster.py` reads."""
        if self._is_first:
            figures = {**self.figures(words_per_step), **others}
            print(json.dumps(figures), flush=True)

    def _at_rate(self, rate, num_steps, seconds, busy, carried, words_per_step):
        figures = {
            "rate_mbit": rate,
            "steps": num_steps,
            "seconds": round(seconds, 3),
            "steps_per_second": round(num_steps / seconds, 3),
            "words_per_second": round(num_steps * words_per_step / seconds, 1),
            "processor_share": round(busy / seconds / os.cpu_count(), 3),
        }
        if not self._pids:
            return figures
        if rate:
            busiest = max(
                max(machine["sent_bytes"], machine["received_bytes"])
                for machine in carried
            )
            of_bytes = busiest * 8 / (rate * 1e6)
            figures["network_share"] = round(of_bytes / seconds, 3)
        share = seconds / self._idle_seconds
        figures["per_machine"] = [
            self._of_machine(of_machine, idle, share, num_steps)
            for of_machine, idle in zip(
                carried, self._idle_carried, strict=True
            )
        ]
        return figures

    def _of_machine(self, carried, idle, share, num_steps):
        found = {}
        for way in ("sent", "received"):
            in_all, packets, idle_in_all, idle_packets = (
                c[f"{way}_{unit}"]
                for c in (carried, idle)
                for unit in ("bytes", "packets")
            )
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
                    idle_in_all / self._idle_seconds
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
    """The processors' busy share in the next second, by all programs."""
    before = _busy_seconds()
    time.sleep(seconds)
    busy = _busy_seconds() - before
    return round(busy / seconds / os.cpu_count(), 3)


def _busy_seconds():
    """The processors' busy seconds, by all programs."""
    with open("/proc/stat") as file:
        numbers = [int(number) for number in file.readline().split()[1:9]]
    idle_and_waiting = numbers[3] + numbers[4]
    return (sum(numbers) - idle_and_waiting) / os.sysconf("SC_CLK_TCK")
