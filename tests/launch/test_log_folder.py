"""The folder with the output of a run's ranks."""

import os
import shutil

import pytest

from keras_sparsity.launch.log_folder import LogFolder


@pytest.mark.parametrize(
    ("is_kept", "has_file", "is_left"),
    [
        (False, False, False),
        (False, True, False),
        (True, False, False),
        (True, True, True),
    ],
)
def test_a_temporary_folder_stays_if_files_are_to_be_kept(
    is_kept, has_file, is_left
):
    with LogFolder(None) as logs:
        if has_file:
            open(logs.file(1), "w").close()
        if is_kept:
            logs.keep()
    assert os.path.exists(logs.path) == is_left
    shutil.rmtree(logs.path, ignore_errors=True)


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_loss_of_a_temporary_folder_is_no_error(is_kept):
    with LogFolder(None) as logs:
        shutil.rmtree(logs.path)
        if is_kept:
            logs.keep()


def test_a_given_folder_is_made_and_stays(tmp_path):
    with LogFolder(tmp_path / "a" / "b") as logs:
        pass
    assert logs.path == str(tmp_path / "a" / "b")
    assert os.path.isdir(logs.path)


def test_files_of_an_earlier_run_are_removed(tmp_path):
    for name in (
        *("rank-1.log", "rank-20.restart-3.log"),
        *("notes.log", "rank-1.log.txt"),
    ):
        (tmp_path / name).touch()
    with LogFolder(tmp_path):
        left = sorted(os.listdir(tmp_path))
    assert left == ["notes.log", "rank-1.log.txt"]


def test_files_of_a_restart_have_its_number(tmp_path):
    with LogFolder(tmp_path) as logs:
        logs.restart = 2
        assert logs.file(3) == str(tmp_path / "rank-3.restart-2.log")


def test_a_shown_error_is_taken_once(tmp_path):
    with LogFolder(tmp_path) as logs:
        with open(logs.shown_error, "w") as file:
            file.write("an error\n")
        assert logs.take_shown_error() == ["an error"]
        assert not logs.take_shown_error()
