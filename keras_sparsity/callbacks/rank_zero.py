"""The ranks that run Keras's own callbacks, and the messages of rank 0."""

import contextlib
import os
import tempfile

import keras

from keras_sparsity.callbacks import histograms

# They only write files for a person to look at: one copy is enough. Their
# contents are the same on all ranks, because logs are.
_WRITE_ONCE = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_FOLDER = "_keras_sparsity_folder"


def on_rank(callbacks, rank, **options):
    """The callbacks that a rank runs.

    Those that decide something (`EarlyStopping`, `ReduceLROnPlateau`,
    `TerminateOnNaN`) run on every rank and decide alike, because logs are
    global. `ModelCheckpoint` runs on every rank, because saving involves all
    of them, and rank 0 writes. Those that only report run on rank 0. A user's
    own callbacks run on every rank, as they may call the model; if they are
    `TensorBoard`s or `CSVLogger`s, their files on other ranks are dropped.

    Args:
        callbacks: list, as given to `fit`.
        rank: this process's rank.
        **options: see `histograms.of_whole_weights`.

    Returns:
        All of them on rank 0; on others, without those that report.

    Raises:
        ValueError: if one of them cannot work on several processes.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "BackupAndRestore moves and deletes its files on every "
                "process at once, which loses them on several processes. Use "
                "`ks.callbacks.ShardedCheckpoint`."
            )
        # Of newer versions of Keras.
        if isinstance(
            callback, getattr(keras.callbacks, "OrbaxCheckpoint", ())
        ):
            raise ValueError(
                "OrbaxCheckpoint writes the same files from every process, and "
                "of tables each process's slots as if they were all. Use "
                "`ks.callbacks.ShardedCheckpoint`."
            )
    callbacks = histograms.of_whole_weights(callbacks, rank, **options)
    if rank == 0:
        return callbacks
    elsewhere = [each for each in callbacks if type(each) not in _WRITE_ONCE]
    for callback in elsewhere:
        _drop_files(callback)
    return elsewhere


def _drop_files(callback):
    """Has a class of the user's write what it inherits where nobody looks."""
    if isinstance(callback, keras.callbacks.CSVLogger):
        callback.filename = os.devnull
    elif isinstance(callback, keras.callbacks.TensorBoard):
        if not hasattr(callback, _FOLDER):  # which goes with the callback
            folder = tempfile.TemporaryDirectory(prefix="keras-sparsity-")
            setattr(callback, _FOLDER, folder)
            callback.log_dir = folder.name


def listed(arguments):
    """The callbacks that a run is given, as a list.

    Of those of a `CallbackList` Keras then makes another one: it decides when
    it is made whether a thread calls its callbacks, which must not be where
    they send messages.

    Args:
        arguments: dict of the run's arguments; `verbose` changes where a
            `CallbackList` has no progress bar.
    """
    callbacks = arguments.get("callbacks")
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return keras.tree.flatten([] if callbacks is None else callbacks)
    has_bar = any(
        isinstance(each, keras.callbacks.ProgbarLogger)
        for each in callbacks.callbacks
    )
    if not has_bar:
        arguments["verbose"] = 0  # Keras adds none to a list that is given
    return callbacks.callbacks


class Lines(keras.callbacks.Callback):
    """Part of every `fit`: holds lines back while a progress bar is drawn.

    Before Keras's own callback, which ends a bar when an epoch ends. Used in
    a `with` statement, which prints the lines that an interrupted training
    has left.
    """

    def __init__(self):
        super().__init__()
        self._is_in_epoch = False
        self._lines = []

    def __enter__(self):
        _open.append(self)
        return self

    def __exit__(self, *exception):
        _open.remove(self)
        if self._lines:
            print(flush=True)  # ends the bar
        self._print()

    @contextlib.contextmanager
    def among(self, listed):
        """While entered, part of a `CallbackList`, before all others."""
        self.set_params(listed.params)
        listed.callbacks.insert(0, self)
        try:
            yield
        finally:
            listed.callbacks.remove(self)

    def add(self, text):
        self._lines.append(text)
        has_bar = self.params.get("verbose") in (1, "auto")
        if not (has_bar and self._is_in_epoch):
            self._print()

    def on_epoch_begin(self, epoch, logs=None):
        self._print()
        self._is_in_epoch = True

    def on_train_end(self, logs=None):
        self._is_in_epoch = False
        self._print()

    def _print(self):
        for line in self._lines:
            print(line, flush=True)
        self._lines = []


_open = []  # the `Lines` of each `fit` that runs, the innermost last


def say(text):
    """Prints a line, not into the middle of Keras's progress bar."""
    if _open:
        _open[-1].add(text)
    else:
        print(text, flush=True)
