"""The last lines of a rank's output, and its additions."""

import io

import pytest

from keras_sparsity.launch.rank_process import Follower, last_lines


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
