"""Ranks that do not find each other, or should not work together.

The processes are started by hand, as a cluster's manager does it; all cases
run at once, since they mostly wait.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import pytest

from keras_sparsity.collectives import startup
from keras_sparsity.launch import environment, hosts
from keras_sparsity.machines import ports
from tests.conftest import HAS_HOROVOD

_ROOT = str(pathlib.Path(__file__).parents[2])
_SCRIPT = """\
import sys
import keras
if len(sys.argv) > 1:
    keras.__version__ = sys.argv[1]
import keras_sparsity as ks
strategy = ks.HybridStrategy(timeout=float(sys.argv[2]))
print("UP", strategy.rank, flush=True)
"""


@dataclasses.dataclass
class Case:
    """What some processes are told, and what each must say.

    Args:
        engine: How they are started.
        ranks: Those that are started, of two.
        versions: Keras's version on each, as they believe.
        messages: What each one's error output holds, in this order.
        taken: The rank whose port another program has.
        rendezvous: Whether Horovod's rendezvous is served.
        timeout: Seconds for which a rank waits for the others. Of ranks that
            are to find each other, one may import TensorFlow that much later
            on a busy machine.
    """

    engine: str
    ranks: tuple
    messages: tuple
    versions: tuple = ("3.15.1", "3.15.1")
    taken: int | None = None
    rendezvous: bool = True
    timeout: int = 6


CASES = {
    "a missing host": Case(
        "native",
        (0,),
        (
            "have not found each other within the timeout of 6 s",
            r"rank 1 at 127.0.0.1:\d+ cannot be reached: .*refused",
        ),
    ),
    "a missing first host": Case(
        "native",
        (1,),
        ("within the timeout of 6 s", r"rank 0 at .* cannot be reached"),
    ),
    "a port in use": Case(
        "native",
        (1,),
        (r"Rank 1 cannot listen at 127.0.0.1:\d+, .*: the port is in use",),
        taken=1,
    ),
    "another program at the first rank's port": Case(
        "native",
        (1,),
        ("within the timeout of 6 s", "have answered. Either another program"),
        taken=0,
    ),
    "another version": Case(
        "native",
        (0, 1),
        (
            "The versions must be the same on all ranks",
            r"rank 0: \{'Keras': '3.5.0'\}",
            r"rank 1: \{'Keras': '3.6.0'\}",
        ),
        versions=("3.5.0", "3.6.0"),
        timeout=100,
    ),
    "no rendezvous": Case(
        "horovod",
        (0,),
        (r"Horovod's rendezvous at 127.0.0.1:\d+ cannot be reached",),
        rendezvous=False,
    ),
    "a rank that does not come": Case(
        "horovod",
        (0,),
        ("within the timeout of 6 s", "rank 1 has not come"),
    ),
}


def _processes(case, stack):
    places = hosts.places(hosts.local_hosts(2))
    (closed,) = ports.free(1)
    variables = stack.enter_context(
        environment.of_ranks(case.engine, places, {})
    )
    if case.taken is not None:
        workers = json.loads(variables[0]["TF_CONFIG"])["cluster"]["worker"]
        port = int(workers[case.taken].rpartition(":")[2])
        stack.enter_context(socket.create_server(("127.0.0.1", port)))
    for rank in case.ranks:
        own = dict(variables[rank])
        if not case.rendezvous:
            own["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = "127.0.0.1"
            own["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(closed)
        own["PYTHONPATH"] = _ROOT
        own["TF_CPP_MIN_LOG_LEVEL"] = "2"
        told = case.versions[rank], str(case.timeout)
        yield subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, *told],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **own},
        )


@pytest.fixture(scope="module")
def ends(request):
    """`ends(name)` gives the exit codes and outputs of a case's ranks."""
    selected = {
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", None) == "test_a_start_that_fails"
    }
    running = {}
    with contextlib.ExitStack() as stack:
        for name in selected:
            case = CASES[name]
            if case.engine == "native" or HAS_HOROVOD:
                running[name] = list(_processes(case, stack))
        for process in [p for each in running.values() for p in each]:
            stack.enter_context(process)
            stack.callback(process.kill)

        def find(name):
            outputs = [p.communicate(timeout=200)[0] for p in running[name]]
            return [p.returncode for p in running[name]], outputs

        yield find


@pytest.mark.parametrize("name", CASES)
def test_a_start_that_fails(name, ends):
    case = CASES[name]
    if case.engine == "horovod" and not HAS_HOROVOD:
        pytest.skip("Horovod is not installed")
    codes, outputs = ends(name)
    for code, output in zip(codes, outputs, strict=True):
        # SIGALRM where the engine's start cannot be interrupted.
        is_late = "not found each other" in output
        assert code == (-signal.SIGALRM if is_late else 1), output
        assert "UP" not in output
        assert re.search(r"(.|\n)*".join(case.messages), output), output


def run_python(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_a_late_start_says_what_to_move():
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    ended = run_python(
        "import tensorflow as tf; tf.ones([])\n"
        "from keras_sparsity import collectives; collectives.start()",
        TF_CONFIG=json.dumps(config),
    )
    assert ended.returncode != 0
    assert "keras-sparsity run" in ended.stderr
    assert "top of the script" in ended.stderr


def test_a_second_start_keeps_the_engine():
    ended = run_python(
        "from keras_sparsity import collectives as c\n"
        "assert c.start() is c.start('local') is c.current()\n"
        "try: c.start('native')\n"
        "except ValueError as error: print(error)"
    )
    assert "cannot be changed to 'native'" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("variables", "is_told"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, True),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, False),  # the first one does
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, False),
        ({}, False),
    ],
)
def test_processes_of_mpi_that_train_alone_are_told(
    variables, is_told, monkeypatch, caplog
):
    for name in ("HOROVOD_RANK", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert startup._found_engine() == "local"
    assert ("4 processes were started by MPI" in caplog.text) is is_told
