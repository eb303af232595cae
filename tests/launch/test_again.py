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
