"""Keras's histograms of weights, of tables that are spread over ranks."""

import keras

from keras_sparsity.conversion import saving


def of_whole_tables(callbacks, rank):
    """Has every rank send its rows when `TensorBoard` reads all weights.

    Rank 0 writes; it holds one table at a time.

    Args:
        callbacks: list, as given to `fit`.
        rank: this process's rank.

    Returns:
        The callbacks that the rank runs.

    Raises:
        ValueError: if one is to save embeddings for the projector, which one
            process cannot by itself.
    """
    return [_of_rank(callback, rank) for callback in callbacks]


def _of_rank(callback, rank):
    is_board = isinstance(callback, keras.callbacks.TensorBoard)
    if is_board and callback.embeddings_freq:
        raise ValueError(
            "TensorBoard(embeddings_freq=...) saves the model on one process, "
            "which has only a part of each sharded table. Received: "
            f"embeddings_freq={callback.embeddings_freq}. Use 0, and "
            "`keras.callbacks.ModelCheckpoint`."
        )
    if not is_board or not callback.histogram_freq:
        return callback
    if rank != 0:
        return _Sender(callback.histogram_freq)
    if not hasattr(callback, _IS_WRAPPED):
        setattr(callback, _IS_WRAPPED, True)
        callback.on_epoch_end = _reading_whole_tables(callback)
    return callback


_IS_WRAPPED = "_keras_sparsity_reads_whole_tables"


def _reading_whole_tables(board):
    stock = board.on_epoch_end

    def on_epoch_end(epoch, logs=None):
        if epoch % board.histogram_freq:
            return stock(epoch, logs)
        with saving.on_rank_zero(board.model):
            return stock(epoch, logs)

    return on_epoch_end


class _Sender(keras.callbacks.Callback):
    """In the place of `TensorBoard` on the other ranks."""

    def __init__(self, histogram_freq):
        super().__init__()
        self._histogram_freq = histogram_freq

    def on_epoch_end(self, epoch, logs=None):
        if epoch % self._histogram_freq == 0:
            with saving.on_rank_zero(self.model):
                pass
