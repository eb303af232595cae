"""An HDF5 file that is written, perhaps on a disk that becomes full.

HDF5 keeps what it could not write, tries again when the file is closed, and
then crashes the process. So Python writes the file's bytes, tells HDF5 that all
went well, and raises the error once HDF5 is done.
"""

import contextlib
import io

import h5py


class _Bytes(io.FileIO):
    """A file that keeps its first error, and writes nothing after it."""

    failure = None

    def write(self, data):
        left = memoryview(data).cast("B")
        with self._kept():
            while left and not self.failure:
                left = left[super().write(left) :]
        return len(data)

    def truncate(self, size=None):
        with self._kept():
            if not self.failure:
                return super().truncate(size)
        return size

    @contextlib.contextmanager
    def _kept(self):
        try:
            yield
        except OSError as error:
            self.failure = error


@contextlib.contextmanager
def written(path):
    """A new HDF5 file to write; an error of the disk comes at its end."""
    with _Bytes(path, "w+") as opened:
        try:
            with h5py.File(opened, "w") as file:
                yield file
        finally:  # in place of what HDF5 says where it reads what is not there
            if opened.failure:
                raise opened.failure
