"""All ranks end a `fit` together."""

import keras

from keras_sparsity._tf import keras_variables
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
        own = bool(self.model.stop_training), self._cuts, self._rate()
        found = self._collectives.gather_objects(own, name="fit/stops")
        stops, cuts, rates = zip(*found, strict=True)
        if self._is_in_steps and len(set(rates)) > 1:
            _raise_of_rates(rates)
        self.model.stop_training, self.is_cut = any(stops + cuts), any(cuts)

    def _rate(self):
        """The learning rate, which callbacks may set; None of a schedule."""
        rate = getattr(self.model.optimizer, "learning_rate", None)
        # As text, of which two that are no numbers are equal.
        return repr(float(rate)) if keras_variables.is_variable(rate) else None


def _raise_of_rates(rates):
    listed = ", ".join(f"rank {rank}: {r}" for rank, r in enumerate(rates))
    raise ValueError(
        "The learning rates of the ranks differ at the end of an epoch, and "
        f"so do their weights. Received: {listed}. Have callbacks set the same "
        "rate on every rank, as by `logs`, which are the same on all."
    )
