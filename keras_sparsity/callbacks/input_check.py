"""Compares the input of the ranks while a model trains."""

import keras

from keras_sparsity.data import fingerprints


class InputCheck(keras.callbacks.Callback):
    """Raises, on every rank, once the ranks have read different batches.

    Looks after the first batch, so that an unseeded shuffle is found at once,
    and at the end of each epoch; costs nothing in between. `fit`, `evaluate`
    and `predict` of a distributed model add it by themselves.
    """

    def __init__(self, collectives):
        super().__init__()
        self._collectives = collectives
        self._is_first = True

    def on_train_batch_end(self, batch, logs=None):
        if self._is_first:
            self._is_first = False
            self._check()

    def on_epoch_end(self, epoch, logs=None):
        self._check()

    def on_test_end(self, logs=None):
        self._check()

    def on_predict_end(self, logs=None):
        self._check()

    def _check(self):
        fingerprints.check_inputs(self._collectives)
