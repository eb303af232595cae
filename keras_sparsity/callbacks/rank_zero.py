"""Which of Keras's own callbacks run on which rank, and what rank 0 says."""

import keras

# They only write files for a person to look at: one copy is enough. Their
# contents are the same on all ranks, because logs are.
_WRITE_ONCE = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def on_rank(callbacks, rank):
    """The callbacks that a rank runs.

    Those that decide something (`EarlyStopping`, `ReduceLROnPlateau`,
    `TerminateOnNaN`) run on every rank and decide alike, because logs are
    global. `ModelCheckpoint` runs on every rank, because saving involves all
    of them, and rank 0 writes. Those that only report run on rank 0. A user's
    own callbacks run on every rank.

    Args:
        callbacks: list of what `fit` was given.
        rank: this process's rank.

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
        histograms = getattr(callback, "histogram_freq", 0)
        if isinstance(callback, keras.callbacks.TensorBoard) and histograms:
            raise ValueError(
                "TensorBoard(histogram_freq=...) reads all weights on one "
                "process, which has only a part of each sharded table. "
                f"Received: histogram_freq={histograms}. Use 0."
            )
    if rank == 0:
        return callbacks
    return [c for c in callbacks if not isinstance(c, _WRITE_ONCE)]


def say(callback, text):
    """Prints a line, not into the middle of Keras's progress bar.

    Args:
        callback: the callback that says it, in `fit`, on rank 0.
        text: the line.
    """
    has_bar = callback.params.get("verbose") in (1, "auto")
    start = "\n" if has_bar else ""
    print(f"{start}{text}", flush=True)
