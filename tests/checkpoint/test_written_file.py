"""An HDF5 file on a disk that becomes full."""

import errno
import os
import resource
import signal

import h5py
import numpy as np
import pytest

from keras_sparsity.checkpoint.written_file import written


@pytest.fixture
def limit():
    """A function that limits the bytes of a file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(
        resource.RLIMIT_FSIZE, (size, before[1])
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def write(path, num_groups, num_rows):
    with written(path) as file:
        file.attrs["text"] = "x" * 3_000
        for number in range(num_groups):
            group = file.create_group(str(number))
            dataset = group.create_dataset("0", (num_rows, 4), "float32")
            for start in range(0, num_rows, 1_000):
                dataset[start : start + 1_000] = np.float32(number)


# Of many groups HDF5 reads again what it has written.
SIZES = (1, 20_000), (3_000, 3)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_bytes", [0, 5_000, 100_000])
def test_a_full_disk_is_an_error_and_no_crash(
    tmp_path, limit, sizes, num_bytes
):
    num_open = len(os.listdir("/proc/self/fd"))
    limit(num_bytes)
    with pytest.raises(OSError) as caught:
        write(tmp_path / "it.h5", *sizes)
    assert caught.value.errno == errno.EFBIG
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize("sizes", SIZES)
def test_the_file_has_what_was_written(tmp_path, sizes):
    write(tmp_path / "it.h5", *sizes)
    with h5py.File(tmp_path / "it.h5") as file:
        assert file.attrs["text"] == "x" * 3_000
        for number in range(sizes[0]):
            values = file[f"{number}/0"][()]
            np.testing.assert_array_equal(
                values, np.full((sizes[1], 4), number, "float32")
            )


def test_an_error_of_the_writer_is_raised_as_it_is(tmp_path):
    with pytest.raises(KeyError, match="mine"), written(tmp_path / "it.h5"):
        raise KeyError("mine")
