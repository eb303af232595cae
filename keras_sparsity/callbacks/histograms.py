"""Keras's histograms of weights that are spread over ranks."""

import keras

from keras_sparsity._tf import keras_callbacks
from keras_sparsity.conversion import saving


def of_whole_weights(callbacks, rank, whole=saving.on_rank_zero):
    """Has every rank send what it has when `TensorBoard` reads all weights.

    Rank 0 writes.

    Args:
        callbacks: list, as given to `fit`.
        rank: this process's rank.
        whole: function of a model to a context, which every rank enters and
            in which rank 0 may read all weights; by default it reads a
            sharded table at a time.

    Returns:
        The callbacks that the rank runs.

    Raises:
        ValueError: if one is to save embeddings for the projector, which one
            process cannot by itself.
    """
    return [_of_rank(callback, rank, whole) for callback in callbacks]


def _of_rank(callback, rank, whole):
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
    if rank != 0 and type(callback) is keras.callbacks.TensorBoard:
        return _Sender(callback.histogram_freq, whole)
    keras_callbacks.log_weights_within(
        callback, lambda: whole(callback.model), is_writer=rank == 0
    )
    return callback


class _Sender(keras.callbacks.Callback):
    """In the place of `TensorBoard` on the other ranks."""

    def __init__(self, histogram_freq, whole):
        super().__init__()
        self._histogram_freq, self._whole = histogram_freq, whole

    def on_epoch_end(self, epoch, logs=None):
        if epoch % self._histogram_freq == 0:
            with self._whole(self.model):
                pass
