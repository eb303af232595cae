"""Who may connect to the ports of a run, seen from emulated machines."""

import contextlib
import errno
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import _namespaces
import pytest

from keras_sparsity import launch
from keras_sparsity.machines import firewall, packet_filter
from tests.conftest import engines

ROOT = pathlib.Path(__file__).parents[2]
# Machines 0 and 1 take part, machine 2 is a stranger's. The second one has no
# IPv6, where TensorFlow makes another kind of socket.
_WITH_IPV6 = (0, 2)
_PORT = 23456

_ENABLE_IPV6 = """
for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 0 > $file; done
ip -6 addr add {address}/64 dev eth0 nodad
"""
# Prints whether each address has answered to the first bytes of HTTP/2.
_PROBE = """
import concurrent.futures, json, socket, sys
GREETING = b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n\\0\\0\\0\\4"
def answers(address):
    host, port = address
    try:
        with socket.create_connection((host, port), timeout=2) as probe:
            probe.settimeout(10)
            probe.sendall(GREETING + bytes(5))
            return bool(probe.recv(1))
    except OSError:
        return False
addresses = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(64) as pool:
    print(json.dumps(list(pool.map(answers, addresses))))
"""
# Servers that stand for TensorFlow's: they greet whoever gets through. A line
# of input ends what would be TensorFlow's start.
_SERVERS = """
import contextlib, json, os, socket, sys, threading
sys.argv[0] = "keras-sparsity"  # the command imports no TensorFlow
from keras_sparsity.machines import firewall
def say(*words):
    print(*words, flush=True)
def listen(port):
    family = socket.AF_INET6 if firewall._has_ipv6() else socket.AF_INET
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    shares = os.environ.get("TF_GRPC_REUSE_PORT") == "1"
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
    if family == socket.AF_INET6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(("", port))
    server.listen(16)
    def serve():
        while True:
            with server.accept()[0] as accepted:
                accepted.sendall(b"hello")
    threading.Thread(target=serve, daemon=True).start()
with contextlib.ExitStack() as stack:
    for port, hosts, networks in json.loads(sys.argv[1]):
        os.environ[firewall.VARIABLE] = networks
        stack.enter_context(firewall.guarded_port(port, hosts, say))
        if "before" in sys.argv:
            say("guarded")
            sys.stdin.readline()
        listen(port)
    if "during" in sys.argv:
        say("listening")
        sys.stdin.readline()
say("up")
sys.stdin.readline()
"""
_FIT = """
import json, os, sys
import keras
import numpy as np
import keras_sparsity as ks

folder = sys.argv[1]
strategy = ks.HybridStrategy()
model = keras.Sequential(
    [ks.layers.ShardedEmbedding(50, 4), keras.layers.Dense(1)]
)
with strategy.scope():
    model.compile("sgd", "mse")
ids = np.arange(16)
ended = False
while not ended:
    model.fit(ids, np.ones((16, 1)), batch_size=8, verbose=0)
    path = os.path.join(folder, f"fits-{strategy.rank}")
    with open(f"{path}.part", "w") as file:
        json.dump(dict(os.environ), file)
    os.replace(f"{path}.part", path)
    is_asked = os.path.exists(os.path.join(folder, "end"))
    ended = ks.collectives.current().gather_objects(is_asked, "end")[0]
print("DONE", strategy.rank)
"""


@pytest.fixture(scope="module")
def machines():
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(_namespaces.Machines(3, 0, 0, 1500))
        except _namespaces.ClusterError as error:
            pytest.skip(str(error))
        for index in _WITH_IPV6:
            enable = _ENABLE_IPV6.format(address=_ipv6(index))
            subprocess.run(
                made.command(index, ["sh", "-ec", enable]), check=True
            )
        yield made


def _ipv6(index):
    return f"fd00::{1 + index}"


def _answers(machines, addresses):
    """Whether they answer to a machine; dict from its index to a list."""
    probes = {
        index: subprocess.Popen(
            machines.command(
                index, [sys.executable, "-Ic", _PROBE, json.dumps(asked)]
            ),
            stdout=subprocess.PIPE,
        )
        for index, asked in addresses.items()
    }
    return {
        index: json.loads(probe.communicate(timeout=60)[0])
        for index, probe in probes.items()
    }


@pytest.fixture
def serve(machines):
    """`serve(index, cases)` starts servers of these cases on a machine."""
    with contextlib.ExitStack() as stack:

        def start(index, cases, *when):
            arguments = [json.dumps(cases), *when]
            servers = subprocess.Popen(
                machines.command(
                    index, [sys.executable, "-c", _SERVERS, *arguments]
                ),
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(servers)
            stack.callback(servers.kill)
            return servers

        yield start


# Hosts, networks; who gets through: machine 1, the stranger by IPv4, by IPv6.
_CASES = [
    (["127.0.0.1"], "", False, False, False),
    (["10.0.0.1", "10.0.0.2"], "", True, False, False),
    (["machine-0", "machine-1"], "", True, False, False),
    (["10.0.0.1"], "10.0.0.2, 10.9.0.0/16", True, False, False),
    (["10.0.0.1"], "10.0.0.0/24", True, True, False),
    (["10.0.0.1"], "10.0.0.3/32,fd00::/64", False, True, True),
    (["fd00::3", "10.0.0.1"], "", False, False, True),
    (["fd00::4", "fd00::203"], "fd00:0:0:1::/64", False, False, False),
    (["::ffff:10.0.0.2"], "0.0.0.0/1,::/0", True, True, True),
    (["127.0.0.1"], "any", True, True, True),
]


def test_who_gets_through(serve, machines):
    ports = range(_PORT, _PORT + len(_CASES))
    servers = serve(
        0, [(p, *case[:2]) for p, case in zip(ports, _CASES, strict=True)]
    )
    assert servers.stdout.readline() == "up\n"
    ipv4, ipv6 = ([[h, p] for p in ports] for h in ("10.0.0.1", _ipv6(0)))
    own = [[host, p] for p in ports for host in ("127.0.0.1", "::1")]
    answers = _answers(
        machines, {0: own + ipv4 + ipv6, 1: ipv4, 2: ipv4 + ipv6}
    )
    assert answers[0] == [True] * 4 * len(_CASES)
    assert answers[1] == [case[2] for case in _CASES]
    assert answers[2] == [case[n] for n in (3, 4) for case in _CASES]


def test_without_ipv6(serve, machines):
    servers = serve(1, [(_PORT, ["10.0.0.1", "10.0.0.2"], "")])
    assert servers.stdout.readline() == "up\n"
    address = ["10.0.0.2", _PORT]
    own = [["127.0.0.1", _PORT], address]
    assert _answers(machines, {0: [address], 1: own, 2: [address]}) == {
        0: [True],
        1: [True, True],
        2: [False],
    }


def test_before_the_server_listens(serve, machines):
    servers = serve(0, [(_PORT, ["10.0.0.2"], "")], "before")
    assert servers.stdout.readline() == "guarded\n"
    asked = dict.fromkeys((1, 2), [["10.0.0.1", _PORT]])
    assert _answers(machines, asked) == {1: [False], 2: [False]}
    print(file=servers.stdin, flush=True)
    assert servers.stdout.readline() == "up\n"
    assert _answers(machines, asked) == {1: [True], 2: [False]}


def test_a_name_that_is_known_later(serve, machines):
    servers = serve(0, [(_PORT, ["10.0.0.1", "late.test"], "")], "during")
    assert servers.stdout.readline() == "listening\n"
    asked = dict.fromkeys((1, 2), [["10.0.0.1", _PORT]])
    assert _answers(machines, asked) == {1: [False], 2: [False]}
    name = "echo 10.0.0.2 late.test >> /etc/hosts"
    subprocess.run(machines.command(0, ["sh", "-ec", name]), check=True)
    deadline = time.monotonic() + 60
    while _answers(machines, asked) != {1: [True], 2: [False]}:
        assert time.monotonic() < deadline
    print(file=servers.stdin, flush=True)
    assert servers.stdout.readline() == "up\n"
    assert _answers(machines, asked) == {1: [True], 2: [False]}


@pytest.mark.parametrize("shares", [False, True])
def test_a_port_in_use(shares):
    with (
        socket.create_server(("127.0.0.1", 0), reuse_port=shares) as other,
        pytest.raises(OSError) as raised,
        firewall.guarded_port(other.getsockname()[1], [], pytest.fail),
    ):
        pass
    assert raised.value.errno == errno.EADDRINUSE


def test_python_ends_without_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = (
        "import sys\n"
        "sys.argv[0] = 'keras-sparsity'\n"
        "from keras_sparsity.machines import firewall\n"
        f"with firewall.guarded_port({port}, ['127.0.0.1'], print):\n"
        "    pass"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_kernel_that_cannot(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    monkeypatch.setattr(packet_filter, "attach", refuse)
    said = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with firewall.guarded_port(port, ["127.0.0.1"], said.append):
        assert firewall._SHARE_VARIABLE not in os.environ
        with socket.create_server(("127.0.0.1", port)):
            pass
    (message,) = said
    assert f"port {port} " in message
    assert "Protocol not available" in message
    assert "unshare" in message


def test_a_name_that_is_never_known(monkeypatch):
    monkeypatch.setattr(
        packet_filter, "resolved", lambda hosts: ([], ["nobody.test"])
    )
    said = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with firewall.guarded_port(port, ["nobody.test"], said.append):
        assert not said  # It may be known later.
    assert "nobody.test, of other ranks, cannot be resolved" in said.pop()


@pytest.mark.parametrize("text", ["10.0.0", "10.0.0.0/33", "a", "10.0.0.1;::1"])
def test_what_is_no_network(text, monkeypatch):
    monkeypatch.setenv(firewall.VARIABLE, text)
    message = f"{firewall.VARIABLE} must be IP addresses .*Received: '{text}'"
    with pytest.raises(ValueError, match=message):
        firewall.given_networks()


def test_the_launcher_says_what_is_no_network(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.touch()
    variable = f"{firewall.VARIABLE}=10.0"
    arguments = ["run", "-n", "2", "--env", variable, str(script)]
    assert launch.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"keras-sparsity: {firewall.VARIABLE} must be")


def test_more_addresses_than_a_program_takes(monkeypatch):
    hosts = [f"10.{n // 250}.{n % 250}.1" for n in range(3000)]
    said = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with firewall.guarded_port(port, hosts, said.append):
        pass
    assert "too many addresses" in said.pop()
    monkeypatch.setenv(firewall.VARIABLE, "10.0.0.0/8")
    with firewall.guarded_port(port, hosts, said.append):
        pass
    assert not said


def test_own_addresses(machines):  # of machines/addresses.py
    code = (
        "import sys\n"
        "sys.argv[0] = 'keras-sparsity'\n"
        "from keras_sparsity.machines import addresses\n"
        "print(addresses.of_interfaces())"
    )
    for index, expected in [(0, {"10.0.0.1", "fd00::1"}), (1, {"10.0.0.2"})]:
        found = subprocess.check_output(
            machines.command(index, [sys.executable, "-c", code]),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        addresses = {a for a in eval(found) if not a.startswith("fe80")}
        assert addresses == expected


@pytest.fixture
def fit(machines, tmp_path):
    """`fit(index, arguments, **variables)` trains on a machine."""
    script = tmp_path / "fit.py"
    script.write_text(_FIT)
    with contextlib.ExitStack() as stack:

        def start(index, *arguments, **variables):
            command = [sys.executable, *arguments, str(script), str(tmp_path)]
            process = subprocess.Popen(
                machines.command(index, command),
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "TF_CPP_MIN_LOG_LEVEL": "2",
                    **variables,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.terminate)
            return process

        yield start


def _wait_for(path, *processes):
    deadline = time.monotonic() + 200
    while not path.exists():
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.2)


def _ports(folder):
    variables = json.loads((folder / "fits-0").read_text())
    workers = json.loads(variables["TF_CONFIG"])["cluster"]["worker"]
    return [int(worker.rpartition(":")[2]) for worker in workers]


def test_one_machine_is_closed_to_others(fit, machines, tmp_path):
    run = fit(0, "-m", "keras_sparsity.launch", "run", "-n", "2")
    for rank in range(2):
        _wait_for(tmp_path / f"fits-{rank}", run)
    ports = _ports(tmp_path)
    own, ipv4, ipv6 = (
        [[host, port] for port in ports]
        for host in ("127.0.0.1", "10.0.0.1", _ipv6(0))
    )
    answers = _answers(machines, {0: own + ipv4, 1: ipv4, 2: ipv4 + ipv6})
    assert answers == {0: [True] * 4, 1: [False] * 2, 2: [False] * 4}
    (tmp_path / "end").touch()
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 0, output
    assert "open to everyone" not in output


# As each machine by itself, above, and hosts below.
@pytest.mark.all_cells
def test_several_machines_are_closed_to_others(fit, machines, tmp_path):
    addresses = [f"machine-{index}:{_PORT + index}" for index in range(2)]

    def rank(index):
        config = {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
        return fit(index, TF_CONFIG=json.dumps(config))

    first, second = (["10.0.0.1", _PORT], ["10.0.0.2", _PORT + 1])
    runs = [rank(0)]
    deadline = time.monotonic() + 100
    while (answers := _answers(machines, {1: [first], 2: [first]}))[1] != [
        True
    ]:
        assert runs[0].poll() is None, runs[0].communicate()[0]
        assert time.monotonic() < deadline
    # Rank 0 waits for the other one, and keeps Python's lock meanwhile.
    assert answers[2] == [False]
    runs.append(rank(1))
    for index in range(2):
        _wait_for(tmp_path / f"fits-{index}", *runs)
    strangers = [first, [_ipv6(0), _PORT], second]
    answers = _answers(machines, {0: [second], 1: [first], 2: strangers})
    assert answers == {0: [True], 1: [True], 2: [False] * 3}
    (tmp_path / "end").touch()
    for run in runs:
        output = run.communicate(timeout=60)[0]
        assert run.returncode == 0, output


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_hosts_are_closed_to_others(engine, fit, machines, tmp_path):
    # The launcher is on the switch.
    run = fit(
        None,
        *("-m", "keras_sparsity.launch", "run", "--engine", engine),
        *("--hosts", "10.0.0.1,10.0.0.2", "--ssh", machines.ssh_command()),
        *("--env", f"{firewall.VARIABLE}=10.0.9.0/24"),
    )
    for rank in range(2):
        _wait_for(tmp_path / f"fits-{rank}", run)
    variables = json.loads((tmp_path / "fits-0").read_text())
    allowed = variables[firewall.VARIABLE].split(",")
    assert {"10.0.0.1", "10.0.0.2", "10.0.0.254", "10.0.9.0"} < {
        network.partition("/")[0] for network in allowed
    }
    if engine == "native":
        first, second = _ports(tmp_path)
        doors = [["10.0.0.1", first], ["10.0.0.2", second]]
    else:
        port = int(variables["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        doors = [["10.0.0.254", port]]
    answers = _answers(machines, dict.fromkeys(range(3), doors))
    count = len(doors)
    assert answers == {0: [True] * count, 1: [True] * count, 2: [False] * count}
    (tmp_path / "end").touch()
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 0, output
