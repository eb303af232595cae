"""Epochs that all workers pass through together, batch by batch."""

import keras

from keras_sparsity._tf import keras_input
from keras_sparsity.data import distribution


class Epochs(keras.callbacks.Callback):
    """Has `fit` take the batches that no other worker has taken.

    Every rank reads the whole dataset, in one order, and leaves out the
    batches of others: a faster worker takes more of them.

    Args:
        strategy: the `HybridStrategy`.
    """

    def __init__(self, strategy):
        super().__init__()
        self._strategy = strategy
        self._collectives = strategy.collectives
        self._iterator = self._training = None
        self._is_running = False

    def use(self, iterator):
        """Takes Keras's epoch iterator of the training data."""
        if keras_input.is_read_by_python(iterator):
            raise ValueError(
                'Under `delay="bounded"` each rank reads the whole dataset '
                "and leaves batches out. Received: a generator or a "
                "PyDataset. Give `fit` arrays or a `tf.data.Dataset`."
            )

        def check(dataset):
            if distribution.is_sharded(dataset):
                raise ValueError(
                    'Under `delay="bounded"` each rank reads the whole dataset '
                    "and leaves batches out. Received: a part of a dataset, "
                    "from `shard`. Give `fit` the dataset itself."
                )
            distribution.check_is_alike(dataset, self._collectives)

        keras_input.change_input(iterator, check)
        self._iterator = iterator

    def begin(self, training):
        """Takes the `Training`."""
        self._training = training

    def on_epoch_begin(self, epoch, logs=None):
        if self._collectives.rank == 0:
            self._training.store.reset_clocks()
        self._collectives.barrier("asynchronous/epoch/begin")
        keras_input.on_next_epoch(self._iterator, self._taken)
        self._is_running = True

    def _taken(self, stock):
        """The steps of an epoch that this worker takes."""
        claim = self._training.store.claim
        number = claim()
        for position, step in enumerate(stock()):
            if number >= (self._iterator.num_batches or number + 1):
                return
            if position == number:
                yield step
                number = claim()
            elif next(step[-1], None) is None:  # of an unknown length
                return

    def ends(self):
        """Whether an epoch's steps have ended; then ends it on all ranks."""
        if not self._is_running:
            return False
        self._is_running = False
        self._strategy.staleness = self._training.end_epoch()
        return True
