"""Which lost ranks the launcher starts anew."""

import json
import sys
from unittest import mock

import pytest

from keras_sparsity.launch.again import Again, say
from keras_sparsity.machines.door import JOINS_VARIABLE


@pytest.mark.parametrize("code, is_started", [(1, True), (0, False)])
def test_one_that_has_left_by_itself_does_not_come_back(
    code, is_started, capsys
):
    again = Again(mock.Mock(facts={"size": 2}), 0)
    again.add(1, start := mock.Mock(), {}, 3)
    lost = mock.Mock(rank=1, returncode=code, log_path=None)
    lost.describe_end.return_value = f"exited with code {code}"
    new = again(lost, True)
    assert new is (start.return_value if is_started else None)
    said = capsys.readouterr().err
    assert f"rank 1 exited with code {code}; others go on" in said
    assert ("starts anew" in said) is is_started
    if is_started:
        (variables,) = start.call_args.args
        assert json.loads(variables[JOINS_VARIABLE]) == {"size": 2}


def test_without_facts_none_starts(capsys):
    again = Again(mock.Mock(facts=None), 0)
    again.add(1, mock.Mock(), {}, 3)
    lost = mock.Mock(rank=1, returncode=1, log_path=None)
    assert again(lost, True) is None
    assert capsys.readouterr().err.endswith("others go on.\n")


def test_others_do_not_go_on_without_one_that_is_needed(capsys):
    again = Again(mock.Mock(facts={}), 0)
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


@pytest.mark.parametrize("ended_by_launcher", [False, True])
def test_one_that_the_launcher_ends_with_all_is_not_said(
    ended_by_launcher, capsys
):
    again = Again(mock.Mock(facts={}), 0)
    lost = mock.Mock(rank=1, returncode=-15, log_path=None)
    lost.we_ended_it = ended_by_launcher
    assert again(lost, False) is None
    assert bool(capsys.readouterr().err) is not ended_by_launcher


def test_a_line_is_written_in_one_piece(monkeypatch):
    """Else what a rank prints meanwhile could begin within it."""
    monkeypatch.setattr(sys, "stderr", stream := mock.Mock())
    say("rank 1 is lost.")
    stream.write.assert_called_once_with("keras-sparsity: rank 1 is lost.\n")
