"""How a rank's process ended, its output's last lines and additions."""

import io
import os
import sys

import pytest

from keras_sparsity.launch.rank_process import (
    Follower,
    RankProcess,
    last_lines,
)


# An ssh client ends with the code of the remote shell.
@pytest.mark.parametrize(
    ("code", "returncode", "exit_code", "description"),
    [
        (134, -6, 134, "was killed by SIGABRT on there"),
        (137, -9, 137, "was killed by SIGKILL on there (by the system"),
        (3, 3, 3, "exited with code 3 on there"),
        (255, 255, 255, "ended on there without an exit code"),
    ],
)
def test_the_end_of_a_rank_on_another_host(
    code, returncode, exit_code, description, tmp_path
):
    client = [sys.executable, "-c", f"raise SystemExit({code})"]
    process = RankProcess(
        *(0, client, dict(os.environ)),
        stderr=tmp_path / "log",
        remote_host="there",
    )
    process.wait(60)
    assert process.poll() == process.returncode == returncode
    assert process.exit_code == exit_code
    assert process.describe_end().startswith(description)
    process.close_lifeline()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\n\n  \ntwo", ["one", "two"]),
        # A progress bar is what it showed last.
        (b" 1/9 [=>..]\r 9/9 [====]\ndone\n", [" 9/9 [====]", "done"]),
        (b"\b\b\b\b 3/9\b\b\b\b 4/9\n", [" 4/9"]),
        (b"bad \xff byte\n", ["bad \ufffd byte"]),
        (b"I0000 00:00:17.1 9 port.cc:153] oneDNN is on\nmine\n", ["mine"]),
        (b"".join(b"%d\n" % i for i in range(99)), ["96", "97", "98"]),
    ],
)
def test_last_lines(content, expected, tmp_path):
    path = tmp_path / "log"
    path.write_bytes(content)
    assert last_lines(path, 3) == expected


def test_last_lines_of_no_file(tmp_path):
    assert last_lines(tmp_path / "log") == []


def test_follower_shows_what_is_added(tmp_path):
    path, stream = tmp_path / "log", io.StringIO()
    follow = Follower(path, stream)
    follow()
    path.write_text("one\n")
    follow()
    with open(path, "a") as file:
        file.write("two")
    follow()
    follow()
    assert stream.getvalue() == "one\ntwo"
