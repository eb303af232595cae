"""All ranks end a `fit` together."""

import keras

from keras_sparsity.health import watch


class Stopping(keras.callbacks.Callback):
    """Has a rank's `model.stop_training` end the `fit` of all.

    Behind the callbacks that may set it: one that looks at its own clock sets
    it on some ranks alone. Within an epoch all end after the same step, which
    may be some steps later; else at the end of the epoch.

    Args:
        is_in_steps: whether all ranks run the same steps, and so may end within
            an epoch together.

    Attributes:
        is_cut: whether a rank's callback has stopped it behind the epoch's
            last step already, which cuts this run off rather than ends the
            training; known at the end of an epoch.
    """

    def __init__(self, collectives, is_in_steps=True):
        super().__init__()
        self._collectives, self._is_in_steps = collectives, is_in_steps
        self.is_cut = self._cuts = False
        self._num_executions = 0

    def on_train_begin(self, logs=None):
        watch.stops().begin()

    def on_train_batch_end(self, batch, logs=None):
        self._num_executions += 1
        is_set = bool(self.model.stop_training)
        self._cuts = self._cuts or is_set
        if not self._is_in_steps:
            return
        if is_set:
            self.model.stop_training = False  # until all end
        stops = watch.stops()
        if stops.ends_after(self._num_executions, self._cuts):
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        found = self._collectives.gather_objects(
            (bool(self.model.stop_training), self._cuts), name="fit/stops"
        )
        stops, cuts = zip(*found, strict=True)
        self.model.stop_training, self.is_cut = any(stops + cuts), any(cuts)
