"""The files with the output of a run's ranks, and others beside them."""

import contextlib
import os
import re
import shutil
import tempfile

from keras_sparsity.launch.rank_process import last_lines


class LogFolder:
    """The ranks' output files; deletes a temporary folder unless kept.

    Args:
        path: the folder, made if missing; None for a temporary one.
    """

    def __init__(self, path):
        self._is_temporary, self._is_kept = path is None, False
        # The ranks' programs may change their folder.
        self.path = path and os.path.abspath(path)
        self.restart = 0  # number of earlier attempts

    def __enter__(self):
        if self._is_temporary:
            self.path = tempfile.mkdtemp(prefix="keras-sparsity-")
        else:
            os.makedirs(self.path, exist_ok=True)
            for name in os.listdir(self.path):
                if re.fullmatch(r"rank-\d+(\.restart-\d+)?\.log", name):
                    # An earlier run may have had more ranks or restarts.
                    os.remove(os.path.join(self.path, name))
        return self

    def __exit__(self, *exception):
        if self._is_temporary and self._is_kept:
            with contextlib.suppress(OSError):  # It has files: they stay.
                os.rmdir(self.path)
        elif self._is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)

    def file(self, rank):
        attempt = f".restart-{self.restart}" if self.restart else ""
        return os.path.join(self.path, f"rank-{rank}{attempt}.log")

    @property
    def shown_error(self):
        """Path of the file with rank 0's shown error."""
        return self.file(0) + ".error"

    def take_shown_error(self):
        """The last lines of rank 0's shown error, if any."""
        lines = last_lines(self.shown_error)
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.shown_error)
        return lines

    def keep(self):
        self._is_kept = True
