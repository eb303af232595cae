"""Turns in which activations are used as soon as they come."""

import tensorflow as tf

from keras_sparsity.data.empty_parts import run_if
from keras_sparsity.pipeline.flushed import operations


class MessagesInTurn:
    """A stage's messages and passes in a turn, without `messages_ahead`.

    In turn t all stages run the forward passes of mini-batch t. Messages of a
    micro-batch travel while the next one is computed. The arguments and methods
    are those of `MessagesAhead`.
    """

    def __init__(self, stage, passes, turns, logs, turn):
        self._stage, self._passes = stage, passes
        self._logs, self._turn = logs, turn
        self._num_ahead = turns.num_ahead(stage.number)

    def turn(self, batches):
        arrived = self._receive(batches)
        self._send_results()
        if self._stage.is_last:
            row = self._passes.both(batches, arrived)
        else:
            row = self._passes_of_two(batches, arrived)
        self._passes.combine_statistics(batches)
        return row

    def draining_turn(self):
        self._send_results()
        if not self._stage.is_last:
            tf.cond(
                (self._turn >= self._num_ahead) & (self._num_waiting > 0),
                self._drained,
                lambda: tf.zeros([self._logs.size]),
            )

    def choose_layout(self):
        """0: a turn that drains needs no mini-batch."""
        return 0

    def holds(self, turn):
        """Whether all is as after so many turns: nothing waits here."""
        return turn >= 0

    def clear(self):
        pass

    @property
    def _num_waiting(self):
        return self._passes.waiting[0].passes.size

    def _passes_of_two(self, batches, arrived):
        is_full = self._turn >= self._num_ahead
        if not tf.executing_eagerly():
            # They arrive during the forward passes.
            messages = self._gradients_of_behind(is_full)
        outputs = self._passes.forward(
            batches,
            arrived,
            lambda _, outputs, loss: self._stage.send(outputs, loss),
            tf.minimum(self._turn, self._num_ahead),
        )
        if tf.executing_eagerly():
            # The stage behind sends them when it has these passes' outputs.
            messages = self._gradients_of_behind(is_full)
        # What the stage behind waits for is computed first.
        with tf.control_dependencies(outputs):
            return tf.cond(
                is_full,
                lambda: self._passes.backward(messages, None),
                lambda: tf.zeros([self._logs.size]),
            )

    def _receive(self, batches):
        """List of each micro-batch's `(received tensors, loss so far)`."""
        arrived, earlier = [], []
        for place in self._passes.places:
            # One after the other: together, the first one would be as late as
            # the last one.
            with tf.control_dependencies(earlier):
                received, loss = self._stage.receive(batches.size(place), place)
            earlier = operations([*received, loss])
            arrived.append((received, loss))
        return arrived

    def _send_results(self):
        """Sends the gradients and logs of the turn before."""
        if self._stage.is_first:
            return
        for waiting in self._passes.waiting:
            run_if(waiting.results.size > 0, waiting.send_result)

    def _gradients_of_behind(self, is_full):
        """List of each micro-batch's message: the oldest mini-batch's.

        Args:
            is_full: whether there is one; else the tensors are empty.
        """
        messages, earlier = [], []
        for waiting in self._passes.waiting:
            with tf.control_dependencies(earlier):
                message = tf.cond(
                    is_full,
                    lambda waiting=waiting: waiting.receive_gradients(
                        self._logs.size
                    ),
                    waiting.no_gradients,
                )
            earlier = operations(message)
            messages.append(message)
        return messages

    def _drained(self):
        """Backward passes while the pipeline empties; returns their logs."""
        messages = [
            each.receive_gradients(self._logs.size)
            for each in self._passes.waiting
        ]
        return self._passes.backward(messages, self._num_waiting - 1)
