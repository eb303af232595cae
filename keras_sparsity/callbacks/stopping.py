"""All ranks end a `fit` together."""

import keras


class Stopping(keras.callbacks.Callback):
    """Has a rank's `model.stop_training` end the `fit` of all.

    At the end of an epoch, behind the callbacks that may set it: one that
    looks at its own clock sets it on some ranks alone.
    """

    def __init__(self, collectives):
        super().__init__()
        self._collectives = collectives

    def on_epoch_end(self, epoch, logs=None):
        stops = self._collectives.gather_objects(
            bool(self.model.stop_training), name="fit/stops"
        )
        self.model.stop_training = any(stops)
