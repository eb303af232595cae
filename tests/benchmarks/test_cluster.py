"""The emulated cluster of `benchmarks/cluster.py`."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import _namespaces
import _network
import cluster as emulated
import pytest
from _runs import Run, execute

from tests.conftest import engines

_ROOT = str(pathlib.Path(__file__).parents[2])
_BENCHMARKS = os.path.join(_ROOT, "benchmarks")
_RATE = 40  # Mbit/s
_PIECE_BYTES = 500_000

# Machine 0 sends a piece to each of the others at once, then each to it.
_TRANSFER = f"""\
import socket, sys, threading
import _network

PIECE = {_PIECE_BYTES}

def receive(channel):
    left = PIECE
    while left:
        left -= len(channel.recv(left))
    channel.sendall(b"k")

def send(channel):
    channel.sendall(bytes(PIECE))
    channel.recv(1)

def on_all(function, channels):
    threads = [threading.Thread(target=function, args=[c]) for c in channels]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

def connect():
    while True:
        try:
            return socket.create_connection(("machine-0", 5000))
        except ConnectionRefusedError:
            pass

if sys.argv[1] == "0":
    server = socket.create_server(("", 5000))
    channels = [server.accept()[0] for _ in sys.argv[2:]]
    window = _network.Window()
    for way in [send, receive] * 3:
        window.begin()
        for channel in channels: channel.sendall(b"g")
        on_all(way, channels)
        window.end(1)
        window.idle()
        window.report(0)
else:
    channel = connect()
    for way in [receive, send] * 3:
        channel.recv(1)
        way(channel)
"""

# The rank that sends a broadcast may leave it before the other has received it.
_SLOW_BROADCAST = """\
import tensorflow as tf
from keras_sparsity import collectives

collectives.start()
ranks = collectives.current()
ranks.broadcast([tf.ones(500_000)], root=0, name="weights")
(total,) = ranks.all_reduce([tf.ones(())], name="sum")
if ranks.rank == 0:
    print(f"The sum is {total:.0f}.")
"""

# Sums a known number of bytes over all ranks.
_ALL_REDUCE = """\
import tensorflow as tf
import _network
from keras_sparsity import collectives

ranks = collectives.current()
numbers = [tf.ones(250_000)]
window = _network.Window(is_first=ranks.rank == 0)
window.open()

def sum_up(times):
    for _ in range(times):
        (total,) = ranks.all_reduce(numbers, "sum", "numbers")
        if total[0] != ranks.size:
            raise ValueError(total)

for rate in window.rates:
    ranks.barrier("limit")
    window.limit(rate)
    sum_up(2)
    ranks.barrier("begin")
    window.begin()
    sum_up(5)
    ranks.barrier("end")
    window.end(5)
window.idle()
ranks.barrier("idle")
print("a line before")
window.report(100, engine=ranks.engine, machine_of=ranks.machines)
"""

_RATES = (100, 25, 200)

_FOR_EVER = """\
from cluster import Cluster

with Cluster(2) as cluster:
    # It leaves a process of another session in the background.
    leaves = "setsid sleep 600 & echo up; sleep 600"
    sleeps = (1, ["sleep", "600"], {})
    cluster.run_commands([(0, ["sh", "-c", leaves], {}), sleeps])
"""


@pytest.fixture(scope="module")
def possible():
    try:
        with emulated.Cluster(1):
            pass
    except emulated.ClusterError as error:
        pytest.skip(f"no emulated cluster here: {error}")


@pytest.fixture
def nothing_is_left(possible):
    # Namespaces of other tests may end meanwhile.
    namespaces, before = _system_state()
    yield
    deadline = time.monotonic() + 60
    left, after = _system_state()
    while (left - namespaces or after != before) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
        left, after = _system_state()
    assert not left - namespaces
    assert after == before


def _system_state():
    """Network namespaces; their names and files, links, hosts and mounts."""
    namespaces = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # It has ended, or is no process.
            namespaces.add(os.readlink(f"/proc/{name}/ns/net"))
    found = [sorted(os.listdir("/sys/class/net"))]
    for name in ("/run/netns", "/etc/netns"):
        found.append(os.path.exists(name) and os.listdir(name))
    for name in ("/proc/self/mounts", "/etc/hosts"):
        with open(name) as file:
            found.append(file.read())
    return namespaces, found


@pytest.fixture
def variables(monkeypatch):
    """The path by which scripts find the benchmarks' modules."""
    paths = [_BENCHMARKS, _ROOT, os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def test_links_have_their_rate_and_bytes_are_counted(
    nothing_is_left, variables, capfd
):
    with emulated.Cluster(3, rate=_RATE, mtu=1500) as cluster:
        figures = cluster.run_commands(
            [
                (index, [sys.executable, "-c", _TRANSFER, *others], {})
                for index, others in enumerate(["012", "1", "2"])
            ]
        )
    assert figures["exit_code"] == 0
    lines = capfd.readouterr().out.splitlines()
    found = [x for line in lines for x in _network.by_rate(json.loads(line))]
    assert len(found) == 6
    # One machine's bytes to two are limited where they leave, two machines'
    # bytes to one where they arrive; each of the two could send in half the
    # time.
    for own, other, windows in (
        ("sent", "received", found[0::2]),
        ("received", "sent", found[1::2]),
    ):
        for window in windows:
            machines = window["per_machine"]
            payload = machines[0][f"{own}_payload_bytes_per_step"]
            # Some packets may be sent twice.
            assert payload == pytest.approx(2 * _PIECE_BYTES, rel=0.05)
            for machine in machines[1:]:
                assert machine[
                    f"{other}_payload_bytes_per_step"
                ] == pytest.approx(_PIECE_BYTES, rel=0.05)
            headers = machines[0][f"{own}_bytes"] / payload - 1
            assert 0.04 < headers < 0.06  # 66 of 1514 bytes, and answers
            assert window["network_share"] < 1.03
        # Half the rate, or a limit for both ways, would give 0.5. Other work
        # on the machine makes some slower.
        assert max(window["network_share"] for window in windows) > 0.55
    in_all = figures["whole_run"]["per_machine"][0]
    assert in_all["sent_bytes"] > 3 * 2 * _PIECE_BYTES


def test_a_delay_is_kept_or_refused(nothing_is_left, variables):
    script = (
        "import json, socket, time\n"
        "begin = time.monotonic()\n"
        "try: socket.create_connection(('machine-1', 5000))\n"
        "except ConnectionRefusedError: pass\n"
        "print(json.dumps({'answer_ms': 1000 * (time.monotonic() - begin)}))"
    )
    try:
        with emulated.Cluster(2, rate=_RATE, delay=40) as cluster:
            figures = cluster.run_commands(
                [(0, [sys.executable, "-c", script], {})]
            )
    except emulated.ClusterError as error:  # in the middle of being made
        assert "This kernel has no netem" in str(error)
        assert subprocess.run(
            ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "0"],
            stderr=subprocess.DEVNULL,
        ).returncode, "It has."
    else:
        # There and back, and at first for the other's hardware address.
        assert 80 <= figures["answer_ms"] < 300


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_slow_broadcast_is_no_deadlock(
    engine, nothing_is_left, variables, tmp_path, capfd
):
    script = tmp_path / "script.py"
    script.write_text(_SLOW_BROADCAST)
    # 2 MB take 8 s, in which rank 0 waits in the sum.
    with emulated.Cluster(2, 1, rate=2) as cluster:
        figures = cluster.run(str(script), engine=engine)
    assert figures["exit_code"] == 0
    assert "The sum is 2." in capfd.readouterr().out


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_a_script_on_machines(
    engine, nothing_is_left, variables, tmp_path, capfd
):
    script = tmp_path / "script.py"
    script.write_text(_ALL_REDUCE)
    processes = {"native": 2, "horovod": 1}[engine]
    with emulated.Cluster(2, processes, rate=_RATES) as cluster:
        figures = cluster.run(
            str(script), engine=engine, options=["--timeout", "60"]
        )
    assert figures["exit_code"] == 0
    assert "a line before" in capfd.readouterr().out
    assert figures["engine"] == engine
    assert figures["machine_of"] == [0] * processes + [1] * processes
    # In a ring each of R ranks sends 2 (R - 1) / R of the tensor to the next.
    ranks = 2 * processes
    expected = 1_000_000 * 2 * (ranks - 1) / ranks
    windows = _network.by_rate(figures)
    assert [window["rate_mbit"] for window in windows] == list(_RATES)
    for window in windows:
        for machine in window["per_machine"]:
            for way in ("sent", "received"):
                payload = machine[f"{way}_payload_bytes_per_step"]
                assert payload == pytest.approx(expected, rel=0.05)
        seconds = window["seconds"]
        per_second = window["steps_per_second"], window["words_per_second"]
        assert 5 / seconds == pytest.approx(per_second[0], rel=0.01)
        assert 500 / seconds == pytest.approx(per_second[1], rel=0.01)
        assert 5 * expected * 8 / (window["rate_mbit"] * 1e6) < seconds
    _, slow, fast = (window["seconds"] for window in windows)
    assert fast < slow


# Rates change above, and Horovod's ranks report.
@pytest.mark.all_cells
@pytest.mark.parametrize("way", ["tensorflow ps", *engines("horovod")])
def test_peers_at_two_rates(way, nothing_is_left, variables):
    small = ("--tables", "2", "--largest", "500", "--dim", "8")
    first = Run(
        workload="recommender",
        way=way,
        machines=2,
        rate=200,
        steps=2,
        warm_up=1,
        size="small",
        arguments=small,
    )
    runs = [first, dataclasses.replace(first, rate=20, steps=3)]
    found = execute(runs, timeout=120)
    assert [(f["rate_mbit"], f["steps"]) for f in found] == [(200, 2), (20, 3)]
    for figures in found:
        assert figures["words_per_second"] > 0
        assert figures["loss"] == pytest.approx(0.69, abs=0.2)  # of a coin
        for machine in figures["per_machine"]:
            assert machine["sent_payload_bytes_per_step"] > 1000


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
)
def test_nothing_outlives_it(number, nothing_is_left, variables):
    run = subprocess.Popen(
        [sys.executable, "-c", _FOR_EVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with run:
        assert run.stdout.readline() == "up\n"
        run.send_signal(number)
        code = run.wait(60)
    assert code == (128 + number if number == signal.SIGTERM else -number)


@pytest.mark.parametrize(
    ("cores", "number", "of_machines"),
    [
        ({0, 1}, 2, [[0], [1]]),
        ({0, 1}, 1, [[0, 1]]),
        ({0, 1}, 3, [[0, 1]] * 3),
        ({2, 3, 5, 7, 8}, 2, [[2, 3], [5, 7]]),
    ],
)
def test_machines_have_cores_of_their_own(
    cores, number, of_machines, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert _namespaces.Machines(number, 0, 0, 1500).cores == of_machines


def test_programs_of_a_machine_run_on_its_cores(nothing_is_left):
    asked = "import os; print(sorted(os.sched_getaffinity(0)))"
    program = [sys.executable, "-c", asked]
    with _namespaces.Machines(2, 0, 0, 1500) as machines:
        ssh = shlex.split(machines.ssh_command())
        for machine, address in enumerate(machines.addresses):
            for command in (
                machines.command(machine, program),
                [*ssh, address, shlex.join(program)],
            ):
                own = subprocess.check_output(command, text=True)
                assert own == f"{machines.cores[machine]}\n"


def test_nobody_comes_in_when_it_has_ended(nothing_is_left):
    with contextlib.ExitStack() as files:
        with _namespaces.Machines(1, 0, 0, 1500) as machines:
            command = machines.command(0, ["echo", "inside"])
            (pid,) = machines.pids
            # The namespaces of a command that is about to enter.
            of = {
                kind: files.enter_context(open(f"/proc/{pid}/ns/{name}"))
                for kind, name in (("net",) * 2, ("mount", "mnt"), ("uts",) * 2)
            }
            first = _run_inside(command, of)
        last = _run_inside(command, of)
    assert (first.stdout, first.returncode) == ("inside\n", 0)
    assert (last.stdout, last.returncode) == ("", 1)
    assert last.stderr == "this machine has ended\n"


def _run_inside(command, of):
    """Runs it in namespaces that are open files."""
    end = command.index("--uts") + 1
    kinds = [f"--{kind}=/proc/self/fd/{of[kind].fileno()}" for kind in of]
    return subprocess.run(
        ["nsenter", *kinds, *command[end:]],
        pass_fds=[file.fileno() for file in of.values()],
        capture_output=True,
        text=True,
    )


def test_a_command_that_fails(nothing_is_left, capfd):
    with emulated.Cluster(2) as cluster:
        figures = cluster.run_commands(
            [(0, ["sleep", "600"], {}), (1, ["sh", "-c", "exit 7"], {})]
        )
    assert figures["exit_code"] == 7


def test_two_at_once(nothing_is_left):
    with emulated.Cluster(2) as one, emulated.Cluster(2) as other:
        assert one.addresses == other.addresses
        for cluster in (one, other):
            figures = cluster.run_commands([(0, ["cat", "/etc/hosts"], {})])
            assert figures["exit_code"] == 0


def test_it_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cluster.py"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="which root alone may make.*sudo"):
        emulated.main()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SystemExit, match="apt-get install iproute2"):
        emulated.main()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("machines", 0),
        ("processes", 0),
        ("rate", -1),
        ("delay", -1),
        ("mtu", 100),
    ],
)
def test_bad_input(name, value):
    arguments = {"machines": 2, name: value}
    with pytest.raises(emulated.ClusterError, match=f"`{name}` must be"):
        emulated.Cluster(**arguments)
