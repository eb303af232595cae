"""Epochs that all workers pass through together, batch by batch."""

import functools
import time

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_input
from keras_sparsity.asynchronous.batches import LOST, NONE
from keras_sparsity.asynchronous.letters import raise_of_lost
from keras_sparsity.asynchronous.meeting import left
from keras_sparsity.asynchronous.waiting import noted
from keras_sparsity.board.epoch_figures import EpochFigures
from keras_sparsity.checkpoint.replay import replay
from keras_sparsity.data import distribution, marks
from keras_sparsity.data.fingerprints import Fingerprints

# Between two looks at the batches of others, at the end of an epoch.
_LOOK_SECONDS = 0.02


class Epochs(keras.callbacks.Callback):
    """Has `fit` take the batches that no other worker has taken.

    Every rank reads the whole dataset, in one order, and leaves out the
    batches of others: a faster worker takes more of them.

    Args:
        checkpoint: the `ShardedCheckpoint` of this `fit`, or None.
        num_read: how many epochs others have read before this process joins.

    Attributes:
        is_running: whether an epoch has begun and not ended.
        is_in_steps: whether a worker takes its steps, after all callbacks'
            `on_epoch_begin`.
    """

    def __init__(self, strategy, checkpoint, progress, num_read):
        super().__init__()
        self._progress, self._num_read = progress, num_read
        self._checkpoint = checkpoint
        self._strategy = strategy
        self._collectives = strategy.collectives
        self._fingerprints = Fingerprints(strategy.collectives)
        self._iterator = self._training = None
        self.is_running = self._has_begun = self.is_in_steps = False

    def use(self, iterator):
        """Takes Keras's epoch iterator of the training data."""
        if keras_input.is_read_by_python(iterator):
            raise ValueError(
                'Under `delay="bounded"` each rank reads the whole dataset '
                "and leaves batches out. Received: batches that Python makes, "
                "as a generator or a PyDataset does. Give `fit` arrays or a "
                "`tf.data.Dataset`."
            )

        def read_alike(dataset):
            if marks.is_sharded(dataset):
                raise ValueError(
                    'Under `delay="bounded"` each rank reads the whole dataset '
                    "and leaves batches out. Received: a part of a dataset, "
                    "from `shard`. Give `fit` the dataset itself."
                )
            told = self._fingerprints, self._collectives
            return distribution.read_alike(dataset, *told)

        keras_input.change_input(iterator, read_alike)
        self._iterator = iterator
        if self._checkpoint is not None:
            self._checkpoint.use_input(iterator, first_is_enough=True)

    def begin(self, training):
        """Takes the `Training`."""
        self._training = training

    def on_epoch_begin(self, epoch, logs=None):
        self._has_begun, self._epoch = True, epoch
        # A server that comes back does so behind this, which others have done.
        if not self._training.comes_back():
            self._training.begin_epoch(epoch, self._progress)
            self._tell_checkpoint()
        if self._num_read:
            replay(self._iterator, self._num_read, 0, lambda: None, True)
            self._num_read = 0
        keras_input.on_next_epoch(self._iterator, self._taken)
        self.is_running = True

    def on_train_batch_end(self, batch, logs=None):
        self._training.logs = logs
        self._training.num_steps += 1

    def on_train_end(self, logs=None):
        if not self._has_begun and self._checkpoint is not None:
            self._pass(self._checkpoint.num_ended)
        self._tell_checkpoint()

    def _pass(self, num_epochs):
        """Brings a dataset to the order in which a later `fit` reads it.

        Processes that have trained in these epochs may read it, too.
        """
        if not self._collectives.is_server:
            for _ in range(num_epochs):
                steps = keras_input.steps(self._iterator)
                _Reader(steps, self._iterator).draw_order()

    def _tell_checkpoint(self):
        if self._checkpoint is not None:
            self._checkpoint.use_collectives(
                functools.partial(left, self._collectives)
            )

    def _taken(self, stock):
        """The steps of an epoch that this worker takes."""
        self._training.begin_steps()
        if self._collectives.is_server:
            saved = self._checkpoint
            self._training.serve_steps(saved and saved.has(self._epoch))
            return
        self.is_in_steps = True
        reader = _Reader(stock(), self._iterator)
        while (number := self._next(reader)) is not None:
            step = reader.step(number)
            if step is None:
                self._training.worker.pushing.wait()
                self._training.store.end_data(reader.num_batches)
            else:
                yield step
                self._training.worker.end_step()
        reader.draw_order()

    def refuse_assigned(self, variable):
        """Raises ValueError if a callback assigns what servers have."""
        if (
            self.is_in_steps
            and tf.executing_eagerly()
            and not self.model.run_eagerly  # where steps assign what they pull
            and any(variable is each for each in self._training.store.variables)
        ):
            raise ValueError(
                "Within an epoch servers have the weights, and a value that "
                "is assigned here would be lost at the next pull. Received: a "
                f"callback that assigns '{variable.path}'. Assign it in "
                "`on_epoch_begin` or `on_epoch_end`."
            )

    def _next(self, reader):
        """The number of a batch, None if all workers' batches are done.

        At the end it waits for the others', one of which may be lost.
        """
        training, worker = self._training, self._training.worker
        number, _ = self._take(reader)
        if number == NONE:
            worker.pushing.wait()
            if worker.is_bounded:
                # Others wait for it no more.
                worker.is_bounded = False
                training.store.finish()
            rank = self._collectives.rank
            number = noted(rank, lambda: self._await(reader))
        return None if number == NONE else number

    def _await(self, reader):
        """A number that is handed out again; `NONE` if no worker holds one."""
        while True:
            number, held = self._take(reader)
            if number != NONE or not held:
                return number
            time.sleep(_LOOK_SECONDS)

    def _take(self, reader):
        """`Store.take`."""
        training = self._training
        number, held = training.taking.next()
        if number == LOST:
            raise_of_lost(self._collectives.rank)
        reader.keep(held)
        if number != NONE:
            training.worker.batch = number
        return number, held

    def end(self):
        """Ends an epoch whose steps have ended, on all ranks.

        Returns:
            The records of the workers that took a batch of it.
        """
        self.is_running = self.is_in_steps = False
        version, records = self._training.end_epoch(self._fingerprints)
        figures = EpochFigures.of_records(version, records)
        self._strategy.epoch_figures = figures
        self._strategy.staleness = figures.staleness
        return records


class _Reader:
    """Reads an epoch's batches in order, and finds those of given numbers.

    Batches that others hold are kept: they may be handed out again.

    Args:
        steps: Keras's steps of the epoch, as of `keras_input.steps`.
        epoch_iterator: Keras's epoch iterator.

    Attributes:
        position: the number of batches that were read.
    """

    def __init__(self, steps, epoch_iterator):
        self._steps, self._iterator = steps, epoch_iterator
        self._held, self._kept = (), {}
        self._num_numbers = None  # of a step: one in Keras 3.5
        self.position = 0

    @property
    def num_batches(self):
        """Of the data, whose end was found."""
        return self._iterator.num_batches or self.position

    def keep(self, held):
        """Takes the numbers of the batches that workers hold."""
        self._held = held
        self._kept = {n: b for n, b in self._kept.items() if n in held}

    def draw_order(self):
        """Reads a batch if none was: the next epoch's order depends on it."""
        if self.position == 0 and (step := next(self._steps, None)):
            next(step[-1], None)

    def step(self, number):
        """The step of a batch, None behind the last one."""
        if number in self._kept:
            return self._of(number, self._kept.pop(number))
        total = self._iterator.num_batches
        if total is not None and number >= total:
            # Keras begins the next epoch's iterator behind the last step, and
            # so many iterators must have begun on each rank.
            return None
        while self.position <= number:
            step = next(self._steps)
            self._num_numbers = len(step) - 1
            if total is not None and self.position == number:
                self.position += 1
                return step
            batch = next(step[-1], None)
            if batch is None:
                return None
            if self.position in self._held:
                self._kept[self.position] = batch
            self.position += 1
        return self._of(number, self._kept.pop(number))

    def _of(self, number, batch):
        iterator = keras_input.iterator_of(batch, self._iterator)
        return *[number] * self._num_numbers, iterator
