"""Which lost ranks the launcher starts anew."""

from unittest import mock

import pytest

from keras_sparsity.launch.again import Again


@pytest.mark.parametrize("code, is_started", [(1, True), (0, False)])
def test_one_that_has_left_by_itself_does_not_come_back(
    code, is_started, tmp_path, capsys
):
    door = tmp_path / "door"
    door.touch()
    again = Again(str(door), 0)
    again.add(1, start := mock.Mock(), {}, 3)
    lost = mock.Mock(rank=1, returncode=code, log_path=None)
    lost.describe_end.return_value = f"exited with code {code}"
    new = again(lost, True)
    assert new is (start.return_value if is_started else None)
    said = capsys.readouterr().err
    assert f"rank 1 exited with code {code}; others go on" in said
    assert ("starts anew" in said) is is_started


def test_others_do_not_go_on_without_one_that_is_needed(tmp_path, capsys):
    door = tmp_path / "door"
    door.touch()
    again = Again(str(door), 0)
    again.add(1, start := mock.Mock(), {}, 1, is_needed=True)
    again.add(2, mock.Mock(), {}, 1)
    assert again.needs(1) and not again.needs(2)
    lost = mock.Mock(rank=1, returncode=-9, log_path=None)
    lost.describe_end.return_value = "was killed"
    assert again(lost, True) is start.return_value
    assert not again.is_used_up
    assert again(lost, True) is None
    assert again.is_used_up
    _, said = capsys.readouterr().err.splitlines()
    assert "others go on" not in said
    assert "rank 1 was killed; it does not start anew" in said
