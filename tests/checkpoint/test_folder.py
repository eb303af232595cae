"""A folder of checkpoints: names of complete ones, and what is on disk."""

import os

from keras_sparsity.checkpoint import folder

NAME = folder.name_of(1, 2)


def test_leftovers_of_kills_alone_are_removed(tmp_path):
    others = {".epoch-notes", "table.partial", folder.name_of(0, 3)}
    leftovers = {f".{NAME}.partial", f".{folder.name_of(0, 3)}.partial-old"}
    for name in others | leftovers:
        (tmp_path / name).mkdir()
    (tmp_path / f".{NAME}.partial" / "file").touch()
    folder.begin(tmp_path, NAME)
    assert set(os.listdir(tmp_path)) == others | {f".{NAME}.partial"}
    assert not os.listdir(folder.partial(tmp_path, NAME))


def test_all_is_on_disk_before_the_name_and_the_name_at_last(
    tmp_path, monkeypatch
):
    """As a power failure would show."""
    done, stock_fsync, stock_rename = [], os.fsync, os.rename

    def fsync(descriptor):
        stock_fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        done.append(("on disk", os.path.basename(path)))

    def rename(source, target):
        stock_rename(source, target)
        done.append(("renamed", os.path.basename(target)))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    for _ in range(2):  # the second time in place of the first
        done.clear()
        num_open = len(os.listdir("/proc/self/fd"))
        folder.begin(tmp_path, NAME)
        file = os.path.join(folder.partial(tmp_path, NAME), folder.DENSE)
        with open(file, "wb") as opened:
            opened.write(b"12345")
        assert folder.seal(file)["bytes"] == 5
        folder.commit(tmp_path, NAME, keep=1)
        replaced = [entry for entry in done if entry[1].endswith("-old")]
        assert [entry for entry in done if entry not in replaced] == [
            ("on disk", folder.DENSE),
            ("on disk", f".{NAME}.partial"),
            ("renamed", NAME),
            ("on disk", tmp_path.name),
        ]
        assert os.listdir(tmp_path) == [NAME]
        assert len(os.listdir("/proc/self/fd")) <= num_open
    assert len(replaced) == 1


def test_as_many_as_asked_for_stay_and_the_one_just_written(tmp_path):
    names = [folder.name_of(*place) for place in ((0, 5), (0, 40), (1, 2))]
    for number, name in enumerate(names, 1):
        folder.begin(tmp_path, name)
        folder.commit(tmp_path, name, keep=2)
        assert sorted(os.listdir(tmp_path)) == names[:number][-2:]
    # Of a new training in the same folder, though later ones are there.
    folder.begin(tmp_path, names[0])
    folder.commit(tmp_path, names[0], keep=2)
    assert sorted(os.listdir(tmp_path)) == names
