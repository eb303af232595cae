"""Saves the whole training state while a model trains, and resumes from it."""

import contextlib
import functools
import os
import random

import keras

from keras_sparsity._tf import (
    checks,
    keras_callbacks,
    keras_input,
    random_seeds,
)
from keras_sparsity.callbacks.epoch_steps import EpochSteps
from keras_sparsity.callbacks.save_times import SaveTimes, saves_within
from keras_sparsity.callbacks.stopping import Stopping
from keras_sparsity.checkpoint import (
    folder,
    index,
    input_facts,
    lock,
    state,
    storage,
)
from keras_sparsity.checkpoint.found import FoundCheckpoint
from keras_sparsity.checkpoint.replay import replay
from keras_sparsity.collectives import startup
from keras_sparsity.global_batch import random_states


class ShardedCheckpoint(keras.callbacks.Callback):
    """Saves all state in `directory` while a model trains, and resumes it.

    Each rank writes its partitions of the sharded tables with their slots,
    and its random states; rank 0 writes the state that all ranks share. Of a
    model in stages each rank writes the weights and slots of its own stage. No
    rank ever holds a whole table. A checkpoint is complete or absent, whenever
    the processes are killed.

    The same script, started again, goes on where the last complete checkpoint
    was made, also in the middle of an epoch: weights, slots, metrics, random
    states, the input's position, `EarlyStopping`, `ReduceLROnPlateau` and
    `ModelCheckpoint`, and `History` are as they were. On as many processes
    the result is the same to the bit as that of a run that saves in the same
    steps; the number of processes, of partitions and of stages may change.
    Without a flush, all mini-batches come back before a checkpoint. The guide
    "Saving and resuming" lists the state that starts anew.

    While the model's weights have NaN, or are infinite and the loss is no
    number, nothing is written, and rank 0 says so once: the latest checkpoint
    stays the one to go on from.

    The kernel keeps a second training out of the directory until this one
    has ended, however it does. A checkpoint may come from someone else: its
    values are compared with the model first, and no code of it is run.

    The input's position is found by reading it once more up to there. Its
    order must be the same: seed it (`keras.utils.set_random_seed`), or start
    the processes by `keras-sparsity run --max-restarts`, which keeps the
    ranks' common seed (or set KERAS_SPARSITY_SEED). Arrays need neither.

    Args:
        directory: folder that all ranks see, made if it is not there; one for
            each `fit`.
        every_steps: save after so many steps, too; choose a multiple of
            `steps_per_execution`.
        every_seconds: save after so many seconds, too. A checkpoint is made
            at the end of each epoch and of the training, too.
        keep: how many of the latest complete checkpoints to keep.
        resume: whether to go on from the latest one. If False, the directory
            must have none.

    Raises:
        OSError: on every rank, if a rank cannot write (a full disk): training
            ends, earlier checkpoints stay. Also if another training holds
            the directory.
        ValueError: on every rank, if the latest checkpoint is damaged or of
            another model, or if `logs` have a value that is neither a number,
            a string nor an array, list or dict of them.

    Example:

    >>> import tempfile
    >>> checkpoint = ShardedCheckpoint(
    ...     tempfile.mkdtemp(), every_seconds=600)

    References:
        `keras.callbacks.BackupAndRestore`, which resumes a training of one
        process in the same way.
    """

    def __init__(
        self,
        directory,
        every_steps=None,
        every_seconds=None,
        keep=2,
        resume=True,
    ):
        super().__init__()
        checks.path("directory", directory, "the path of a folder")
        self.directory = os.fspath(directory)
        if every_steps is not None:
            checks.positive_integer("every_steps", every_steps, ", or None")
        if every_seconds is not None:
            checks.positive_number("every_seconds", every_seconds, ", or None")
        checks.positive_integer("keep", keep)
        checks.boolean("resume", resume)
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.keep = keep
        self.resume = resume
        self._collectives = None
        self._left = lambda: self._collectives
        self._found = None  # a `FoundCheckpoint`, until all is restored
        self._lock = contextlib.ExitStack()

    def restore(self, model):
        """Gives a model the state of the latest checkpoint, without training.

        For evaluation or `ks.export`. Every rank calls it.

        Args:
            model: the model, built; with its optimizer if it was compiled.

        Returns:
            Path of the checkpoint.

        Raises:
            FileNotFoundError: if the directory has no complete one.
            ValueError: if it is damaged, or of another model.
        """
        checks.check(
            isinstance(model, keras.Model), "model", model, "a `keras.Model`"
        )
        communicator = startup.left()
        found = storage.latest(self.directory, communicator)
        if not found:
            raise FileNotFoundError(
                f"No complete checkpoint in {self.directory}. Expected "
                "folders named like epoch-00001-step-0000000."
            )
        sections = ["model"]
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            if not optimizer.built:
                # Keras's own makes slots nowhere else.
                with model.distribute_strategy.scope():
                    optimizer.build(model.trainable_variables)
            sections.append("optimizer")
        storage.restore(model, *found, communicator, sections)
        return found[0]

    # Called by an adopted model's `fit`, before Keras's own.

    @property
    def num_ended(self):
        """The number of epochs of this `fit` that were saved."""
        return self._latest[0] - self._first if self._latest else 0

    def has(self, epoch):
        """Whether the latest one is of the beginning of an epoch."""
        return self._latest == (epoch, 0)

    def begin(
        self, model, callbacks, arguments, communicator=None, trains=True
    ):
        """Looks for a checkpoint to resume from.

        Args:
            arguments: `fit`'s, by name.
            communicator: the `Collectives` of the processes that take part, by
                default the strategy's.
            trains: whether they may train, and so write.

        Returns:
            The epoch in which `fit` is to begin.
        """
        everyone = model.distribute_strategy.collectives
        self._collectives = communicator or everyone
        if trains:
            # The new process of a lost rank 0 holds it when it joins.
            self._hold_directory(everyone)
            lock.check_is_shared(self.directory, self._collectives)
        first = arguments.get("initial_epoch", 0)
        self._begin(callbacks, first)
        self._of_input = input_facts.given(arguments)
        found = storage.latest(self.directory, self._collectives, True)
        if not found:
            return first
        if trains and not self.resume:
            raise ValueError(
                f"The directory {self.directory} has checkpoints of an "
                "earlier training, which resume=False would overwrite. Use "
                "another directory, or resume=True to go on from them."
            )
        return self._go_on(found, first, arguments)

    def _go_on(self, found, first, arguments):
        """Takes the checkpoint found; the epoch in which `fit` is to begin."""
        self._found = FoundCheckpoint(*found, arguments.get("epochs", 1))
        position = self._found.position
        if position["epoch"] < first:
            raise ValueError(
                f"The latest checkpoint in {self.directory} is of epoch "
                f"{position['epoch']}, and `fit` was told to begin later. "
                f"Received: initial_epoch={first}. Use a directory for each "
                "training."
            )
        keras_callbacks.append_logs(self._others)
        self._latest = position["epoch"], position["step"]
        self._found.tell(self._collectives.rank == 0, arguments.get("x"))
        if self._found.has_ended:
            return max(arguments.get("epochs", 1), position["epoch"])
        return position["epoch"]

    def join(self, model, callbacks, epoch, order_seed):
        """Saves what other processes save, from the end of an epoch on.

        Called while these wait, and save nothing. Takes the `order_seed` of
        this launch, and returns that of the order of the others' arrays.
        """
        self._collectives = model.distribute_strategy.collectives
        # The lock of a lost rank 0 went with it.
        self._hold_directory(self._collectives)
        self._begin(callbacks, epoch - 1)
        self._found, self._epoch = None, epoch - 1
        names = folder.complete(self.directory)
        if names:
            path = os.path.join(self.directory, names[-1])
            # An earlier launch may have begun the training.
            order_seed = index.read(path, True)["position"]["order_seed"]
        self._order_seed = order_seed
        return order_seed

    def _hold_directory(self, communicator):
        held = lock.held(self.directory, communicator)
        self._lock.enter_context(held)

    def _begin(self, callbacks, first):
        self._others = [c for c in callbacks if c is not self]
        self._epoch_iterator = self._latest = None
        self._first, self._epoch = first, None  # None: none has begun
        self._epoch_steps = EpochSteps(self)
        self._logs, self._of_input = {}, {}
        self._said_spoiled = self._is_cut = self._has_rest = False

    def end(self):
        """Lets other trainings have the directory, when `fit` has ended."""
        self._lock.close()

    def order_seed(self, seed):
        """The seed of the order of arrays: that of the first run.

        Args:
            seed: the seed of this one, None for stock Keras's orders.
        """
        if self._found:
            seed = self._found.position["order_seed"]
        elif seed is None and random_seeds.global_seed() is None:
            seed = random.SystemRandom().randrange(2**62)
        self._order_seed = seed
        return seed

    def use_input(self, epoch_iterator, first_is_enough=False):
        """Takes Keras's iterator of `fit`'s batches; see `replay`."""
        self._epoch_iterator = epoch_iterator
        self._first_is_enough = first_is_enough

    def use_collectives(self, left):
        """Takes the processes that save from now on, of which some may be lost.

        Args:
            left: function that returns the `Collectives` of those that are
                left; every rank calls it.
        """
        self._left, self._collectives = left, left()

    # Called by Keras.

    def on_train_begin(self, logs=None):
        if self._collectives is None:
            raise ValueError(
                "ShardedCheckpoint saves models that were compiled inside of "
                "`strategy.scope()`, with a strategy of this library, such as "
                "`strategy = ks.HybridStrategy()`. Received: the model "
                f"'{self.model.name}'."
            )
        self._save_times = SaveTimes(self.every_steps, self.every_seconds)
        if not (found := self._found):
            return
        sections = "model", "optimizer", "prediction"
        found.restore(self.model, self._collectives, sections)
        found.tell_of_input(self._input_facts())
        states = found.host_states(self._collectives)
        if found.has_ended:
            random_states.set_host_states(states)
            return

        def go_on():
            # Python has drawn its numbers for batches again.
            if not keras_input.is_read_by_python(self._epoch_iterator):
                random_states.set_host_states(states)

        replay(
            self._epoch_iterator,
            found.position["epoch"] - self._first,
            found.position["step"],
            go_on,
            self._first_is_enough,
        )

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._epoch_steps.begin()
        if self._found:
            self._epoch_steps.begin(self._found.position["step"])
            self._restore_progress()
        elif epoch > self._first:
            # Not at the end of the one before, which now all have seen.
            self._save(epoch)

    def on_train_batch_end(self, batch, logs=None):
        self._logs = logs
        # Not by `batch`: Keras's versions count executions differently.
        self._save_times.add_steps(self._epoch_steps.add_execution())
        in_epoch = self.params.get("steps")
        # A callback has ended this run, as by a clock, not the training.
        self._is_cut = self.model.stop_training
        if in_epoch and self._epoch_steps.number >= in_epoch:
            return  # There is more to come before the epoch is saved.
        self._has_rest = self._is_cut and saves_within(self.model)
        if self._save_times.is_due(self._collectives) or self._has_rest:
            self._save(self._epoch, self._epoch_steps.number)

    def on_epoch_end(self, epoch, logs=None):
        of_all = [c.is_cut for c in self._others if isinstance(c, Stopping)]
        self._is_cut = any(of_all or [self._is_cut])

    def on_train_end(self, logs=None):
        if self._found:  # it had ended
            # Keras has set the weights to their averages, if there are any.
            self._found.restore(self.model, self._collectives, ("model",))
            self._restore_progress()
        elif self._epoch is not None and not self._has_rest:
            self._save(self._epoch + 1, has_begun=False)

    def _restore_progress(self):
        self._found.restore_progress(
            self.model, self._collectives, self._others
        )
        self._found = None

    def _save(self, epoch, step=0, has_begun=True):
        if (epoch, step) == self._latest:
            return
        history = self.model.history
        position = {
            "epoch": epoch,
            "step": step,
            "has_begun": has_begun,
            "has_stopped": bool(self.model.stop_training) and not self._is_cut,
            "seed": random_seeds.global_seed(),
            "order_seed": self._order_seed,
            "input": self._input_facts(),
            "history": [history.epoch, history.history],
            "callbacks": keras_callbacks.learnt(self._others),
        }
        loss = (self._logs or {}).get("loss")
        save = functools.partial(
            *(storage.save, self.model, self.directory, position),
            keep=self.keep,
            is_doubtful=not state.is_finite(loss),
        )
        while True:
            try:
                spoiled = save(communicator=self._collectives)
                break
            except storage.RanksLost:
                self._collectives = self._left()
        self._save_times.restart()
        if spoiled is None:
            self._latest = epoch, step
        else:
            self._say_spoiled(spoiled, loss)

    def _input_facts(self):
        of_run = self._of_input, self.params, self._collectives
        return input_facts.of_run(*of_run)

    def _say_spoiled(self, weight, loss):
        if not self._said_spoiled and self._collectives.rank == 0:
            self._said_spoiled = True
            storage.say_spoiled(weight, loss, self.directory, self._latest)
