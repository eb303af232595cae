"""Turns in which the messages of the turn before travel."""

import tensorflow as tf

from keras_sparsity.data.empty_parts import run_if
from keras_sparsity.pipeline.unread import Unread
from keras_sparsity.pipeline.waiting import Waiting


class MessagesAhead:
    """A stage's messages and passes in a turn, with `messages_ahead`.

    See `Turns`. Between passes and messages are `Store`s, so that neither waits
    for the other: in a traced function a pass within a condition is one
    operation, which waits for all that uses the same resources.

    Args:
        turn: int32 `tf.Variable`, the number of earlier turns.
    """

    def __init__(self, stage, passes, turns, logs, turn):
        self._stage, self._passes = stage, passes
        self._waiting = passes.waiting
        self._logs, self._turn = logs, turn
        self._num_ahead = turns.num_ahead(stage.number)
        self._forward = turns.forward(stage.number)
        self._backward = turns.backward(stage.number)
        self._unread = Unread(stage, self._forward)

    def turn(self, batches):
        """A turn that begins with the `MicroBatches` of a mini-batch, traced.

        Returns:
            float32 vector of the newest logs that this stage knows.
        """
        checks = self._unread.checked(batches, self._turn)
        with tf.control_dependencies(checks):
            self._unread.put(batches, self._turn)
            return self._turn_of(batches)

    def draining_turn(self):
        """A turn without another mini-batch, traced."""
        self._turn_of(None)

    def choose_layout(self):
        """The layout of the mini-batches in flight, for turns that drain."""
        return self._unread.choose_layout()

    def holds(self, turn):
        """Whether all mini-batches that have been read are there."""
        return self._unread.holds(turn)

    def clear(self):
        """Forgets the mini-batches in flight; eagerly."""
        self._unread.clear()

    def _turn_of(self, batches):
        """A turn; `batches` are those of its mini-batch, or None."""
        number = self._unread.num_batches if batches is None else None
        now = _Now(tf.convert_to_tensor(self._turn), number)
        is_forward, is_backward = (
            now.has(self._forward),
            now.has(self._backward),
        )
        is_asked = now.has(self._backward - 1)
        arrived = upstream = sizes = []
        if not self._stage.is_first:
            arrived = [w.arrived.take_if(is_forward) for w in self._waiting]
            run_if(now.has(self._backward + 1), self._take_results)
        if not self._stage.is_last:
            run_if(now.has(self._forward + 1), self._take_outputs)
            upstream = [w.upstream.take_if(is_backward) for w in self._waiting]
            sizes = [w.take_sizes_if(is_asked) for w in self._waiting]
        row, outputs = self._forward_passes(batches, arrived, now)
        self._meet_neighbours(sizes, now)
        if self._stage.is_last:
            return row
        # Of one pass after the other, less is held at once.
        with tf.control_dependencies(outputs):
            return self._logs_if(
                is_backward,
                lambda: self._passes.backward(
                    upstream, now.num_later(self._backward)
                ),
            )

    def _forward_passes(self, batches, arrived, now):
        """The forward passes; at the last stage both.

        Returns:
            The logs of the last stage, and operations that make the last
            outputs.
        """
        passes, delay = self._passes, self._forward

        def run(function, *args):
            own = self._unread.take() if delay else batches
            here = self._arrived_of(arrived)
            found = function(own, here, *args, now.num_later(delay))
            passes.combine_statistics(own)
            return found

        def forward():
            number = tf.minimum(now.turn - delay, self._num_ahead)
            return run(passes.forward, Waiting.keep_outputs, number)

        if self._stage.is_last:
            both = self._logs_if(now.has(delay), lambda: run(passes.both))
            return both, []
        if now.has(delay) is True:
            return None, forward()
        run_if(now.has(delay), forward)
        return None, []

    def _meet_neighbours(self, sizes, now):
        """Sends and receives messages.

        In this order, without a trace: neighbours meet at their link, those of
        the first link at first.
        """
        if not self._stage.is_first:
            run_if(now.has(self._forward - 1), self._receive)
            run_if(now.has(self._backward + 1), self._send_back)
        if not self._stage.is_last:
            run_if(now.has(self._forward + 1), self._send)
            run_if(
                now.has(self._backward - 1),
                lambda: self._receive_gradients(sizes),
            )

    def _logs_if(self, condition, passes):
        def no_logs():
            return tf.zeros([self._logs.size])

        if isinstance(condition, bool):
            return passes() if condition else no_logs()
        return tf.cond(condition, passes, no_logs)

    def _arrived_of(self, messages):
        """List of each micro-batch's `(received tensors, loss so far)`.

        Tensors of the function that is traced, for its tapes.
        """
        if self._stage.is_first:
            return [([], tf.zeros([])) for _ in self._waiting]
        found = []
        for message in messages:
            *values, loss = map(tf.identity, message)
            found.append((self._stage.received.without_masks(values), loss))
        return found

    def _take_results(self):
        for waiting in self._waiting:
            waiting.returned.put(waiting.results.take())

    def _take_outputs(self):
        for waiting in self._waiting:
            waiting.leaving.put(waiting.outputs.take())

    def _send_back(self):
        for waiting in self._waiting:
            waiting.send_back(waiting.returned.take())

    def _send(self):
        sent = self._stage.sent
        for waiting in self._waiting:
            *values, loss = waiting.leaving.take()
            self._stage.send(sent.without_masks(values), loss)

    def _receive(self):
        """Receives the activations that the next turn uses."""
        batches, stage = self._unread.take_size(), self._stage
        for place, waiting in zip(
            self._passes.places, self._waiting, strict=True
        ):
            received, loss = stage.receive(batches.size(place), place)
            waiting.arrived.put([*stage.received.with_masks(received), loss])

    def _receive_gradients(self, sizes):
        """Receives the gradients that the next turn uses."""
        for waiting, of_one in zip(self._waiting, sizes, strict=True):
            waiting.upstream.put(
                waiting.receive_gradients(self._logs.size, of_one)
            )


class _Now:
    """The mini-batches that passes and messages of a turn are about.

    Args:
        turn: int32 scalar, the number of earlier turns.
        number: int32 scalar, the number of mini-batches; None: more will come.
    """

    def __init__(self, turn, number):
        self.turn, self._number = turn, number

    def has(self, delay):
        """Whether there is one that is read so many turns earlier."""
        if not delay:
            return self._number is None
        if self._number is None:
            return self.turn >= delay
        return (self.turn >= delay) & (self.turn < self._number + delay)

    def num_later(self, delay):
        """The number of mini-batches behind it, if that is known."""
        if self._number is None:
            return None
        return self._number - 1 - (self.turn - delay)
