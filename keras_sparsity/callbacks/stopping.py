"""All ranks end a `fit` together."""

import keras


class Stopping(keras.callbacks.Callback):
    """Has a rank's `model.stop_training` end the `fit` of all.

    At the end of an epoch, behind the callbacks that may set it: one that
    looks at its own clock sets it on some ranks alone.

    Attributes:
        is_cut: whether a rank's callback has stopped it behind the epoch's
            last step already, which cuts this run off rather than ends the
            training; known at the end of an epoch.
    """

    def __init__(self, collectives):
        super().__init__()
        self._collectives = collectives
        self.is_cut = self._cuts = False

    def on_train_batch_end(self, batch, logs=None):
        self._cuts = bool(self.model.stop_training)

    def on_epoch_end(self, epoch, logs=None):
        found = self._collectives.gather_objects(
            (bool(self.model.stop_training), self._cuts), name="fit/stops"
        )
        stops, cuts = zip(*found, strict=True)
        self.model.stop_training, self.is_cut = any(stops), any(cuts)
