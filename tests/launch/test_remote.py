"""`--hosts` over a real ssh server, which listens on loopback for the tests."""

import contextlib
import json
import os
import pathlib
import pwd
import signal
import socket
import subprocess
import sys
import time

import pytest

from keras_sparsity.launch.hosts import Host
from keras_sparsity.launch.remote import HostError, Remote
from keras_sparsity.machines import ports
from tests.launch_functions import is_running

_ROOT = pathlib.Path(__file__).parents[2]
_INSTALL = _ROOT / "scripts" / "install_sshd.sh"
_REQUIRE = "KERAS_SPARSITY_REQUIRE_SSHD"
# Alone, ranks run for ten minutes; a busy machine takes a while to end them.
_SECONDS = 40
# Two names of this machine, which only ssh's own configuration knows.
_HOSTS = "first.invalid:1,second.invalid:1"

_SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey "{folder}/host"
AuthorizedKeysFile "{folder}/client.pub"
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""
_CLIENT = """\
Host first.invalid second.invalid
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile "{folder}/client"
  IdentitiesOnly yes
  UserKnownHostsFile "{folder}/known"
  BatchMode yes
"""

# What a shell, ssh or JSON might take for something else.
_ODD = ["a b", "it's", 'say "x"', "$HOME `id` \\ !", "*?[a]", "", "-n", "é\n;"]

# Says who and where it is, and does what the last argument says.
_SCRIPT = """\
import ctypes, json, os, signal, sys
from keras_sparsity import collectives
ranks = collectives.current()
print(json.dumps([ranks.rank, os.getpid(), os.getcwd(), sys.argv,
                  os.environ["ODD"], os.environ.get("SSH_CONNECTION"),
                  sys.stdin.read()]), flush=True)
ranks.barrier("all have said it")
if sys.argv[-1] == "exit" and ranks.rank == 1:
    sys.exit(7)
if sys.argv[-1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(600)
signal.pause()
"""


def _tools():
    """Paths of sshd, ssh and ssh-keygen; without them the test is skipped."""
    found = subprocess.run([_INSTALL, "--find"], capture_output=True, text=True)
    if found.returncode:
        if os.environ.get(_REQUIRE):
            pytest.fail(found.stderr)
        pytest.skip(found.stderr)
    return found.stdout.split()


def test_without_a_server_it_is_skipped_unless_required(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda *_, **__: subprocess.CompletedProcess((), 1, "", "no sshd"),
    )
    monkeypatch.delenv(_REQUIRE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no sshd"):
        _tools()
    monkeypatch.setenv(_REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="no sshd"):
        _tools()


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """The ssh command that reaches the hosts."""
    server, client, keygen = _tools()
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "client"):
        subprocess.run(
            [keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
            check=True,
        )
    (port,) = ports.free(1)
    user = pwd.getpwuid(os.getuid()).pw_name
    for name, text in (("server", _SERVER), ("config", _CLIENT)):
        path = folder / name
        path.write_text(text.format(folder=folder, port=port, user=user))
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}")
    if os.getuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    log = folder / "log"
    with subprocess.Popen(
        [server, "-D", "-E", log, "-f", folder / "server"],
        start_new_session=True,
    ) as process:
        try:
            deadline = time.monotonic() + 30
            while not _answers(port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield f"{client} -T -F {folder}/config"
        finally:
            process.terminate()


def _answers(port):
    with contextlib.suppress(OSError):
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            return connection.recv(4) == b"SSH-"
    return False


@contextlib.contextmanager
def _launched(ssh, *arguments, folder, paths=(), **variables):
    """The launcher on both hosts, in a folder of an odd name."""
    # A server gives nothing of our environment to what it starts.
    more = [_ROOT, os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(map(str, filter(None, [*paths, *more])))
    options = ["--hosts", _HOSTS, "--ssh", ssh, "--log-dir", folder / "logs"]
    with subprocess.Popen(
        [sys.executable, "-m", "keras_sparsity.launch", "run"]
        + [*options, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **variables},
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


@pytest.fixture
def folder(tmp_path):
    """An odd name, in which a script is."""
    path = tmp_path / 'it\'s a "folder" $HOME;é'
    path.mkdir()
    (path / "my script.py").write_text(_SCRIPT)
    return path


def _facts(folder, launcher):
    """What both ranks have said, once they have."""
    said = [launcher.stdout.readline()]
    assert said[0], launcher.stderr.read()
    log = folder / "logs" / "rank-1.log"
    while True:
        lines = [x for x in log.read_text().splitlines() if x.startswith("[")]
        if lines:
            return [json.loads(line) for line in (said[0], lines[0])]
        assert launcher.poll() is None, launcher.stderr.read()
        time.sleep(0.05)


def _still_running(pids, seconds=_SECONDS):
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if is_running(pid)]


def test_odd_words_arrive_and_a_failure_is_told(ssh, folder):
    python = folder / "my python's"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    odd = " ".join(_ODD)
    with _launched(
        ssh,
        *("--python", str(python), "--env", f"ODD={odd}"),
        *("my script.py", *_ODD, "exit"),
        folder=folder,
    ) as launcher:
        facts = _facts(folder, launcher)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 7, errors
    assert "rank 1 of 2 exited with code 7 on second.invalid" in errors
    for rank, (number, _, where, argv, value, connection, stdin) in enumerate(
        facts
    ):
        assert (number, where) == (rank, str(folder))
        assert argv == [str(folder / "my script.py"), *_ODD, "exit"]
        assert value == odd
        assert connection.startswith("127.0.0.1 ")
        # The launcher's letters are not the program's input.
        assert stdin == ""
    assert not _still_running([pid for _, pid, *_ in facts])


@pytest.mark.parametrize("end", ["SIGINT", "SIGKILL"])
def test_ranks_end_with_the_launcher(end, ssh, folder):
    todo = "wait" if end == "SIGINT" else "deaf"
    with _launched(
        ssh, "--env", "ODD=", "my script.py", todo, folder=folder
    ) as launcher:
        pids = [pid for _, pid, *_ in _facts(folder, launcher)]
        launcher.send_signal(getattr(signal, end))
        assert not _still_running(pids)
        _, errors = launcher.communicate(timeout=_SECONDS)
    if end == "SIGINT":
        assert launcher.returncode == 130
        assert "KeyboardInterrupt" in errors
        assert "keras-sparsity: ended by SIGINT" in errors


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_the_check_of_the_hosts_ends_with_the_launcher(end, ssh, folder):
    (folder / "tensorflow.py").write_text(
        "import ctypes, os\n"
        "folder = os.path.dirname(__file__)\n"
        "open(os.path.join(folder, f'{os.getpid()}.pid'), 'w').close()\n"
        "ctypes.PyDLL(None).sleep(600)\n"
    )
    with _launched(
        ssh, "my script.py", folder=folder, paths=[folder]
    ) as launcher:
        while len(pids := [int(p.stem) for p in folder.glob("*.pid")]) < 2:
            assert launcher.poll() is None, launcher.stderr.read()
            time.sleep(0.05)
        launcher.send_signal(getattr(signal, end))
        assert not _still_running(pids)
        _, errors = launcher.communicate(timeout=_SECONDS)
    if end == "SIGTERM":
        assert launcher.returncode == 143
        assert "ended by SIGTERM before the start" in errors


def test_who_is_not_let_in_is_named(ssh, folder):
    with _launched(
        f"{ssh} -o PubkeyAuthentication=no", "my script.py", folder=folder
    ) as launcher:
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    for host in ("first.invalid", "second.invalid"):
        assert f"{host}: not reachable by ssh: " in errors
    assert "Permission denied" in errors


def test_a_missing_ssh_client_is_said():
    remote = Remote(ssh="/missing/ssh")
    with pytest.raises(HostError, match="a: cannot run /missing/ssh"):
        remote.check([Host("a")], "native", {})
