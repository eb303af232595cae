"""Turns in which messages travel that the next turn uses."""

import tensorflow as tf

from keras_sparsity.pipeline.unread import Unread
from keras_sparsity.pipeline.waiting import Waiting


class MessagesAhead:
    """A stage's messages and passes in a turn, with `messages_ahead`.

    See `Turns`. Between passes and messages are `Store`s, so that neither waits
    for the other: in a traced function a pass within a condition is one
    operation, which waits for all that uses the same resources.

    Args:
        stage: this rank's `Stage`.
        passes: its `TurnPasses`.
        turns: `Turns`.
        logs: `Logs`.
        turn: int32 `tf.Variable`, the number of earlier turns.
    """

    def __init__(self, stage, passes, turns, logs, turn):
        self._stage, self._passes = stage, passes
        self._logs, self._turn = logs, turn
        self._num_ahead = turns.num_ahead(stage.number)
        self._forward = turns.forward(stage.number)
        self._backward = turns.backward(stage.number)
        self._unread = Unread(stage, self._forward)

    def turn(self, batches):
        """A turn that begins with a mini-batch, traced.

        Args:
            batches: its `MicroBatches`.

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
        stage, is_train = self._stage, batches is not None
        turn = tf.convert_to_tensor(self._turn)

        def has(delay):
            """Whether there is a mini-batch that was read so long ago."""
            if not delay:
                return is_train
            if is_train:
                return turn >= delay
            number = self._unread.num_batches
            return (turn >= delay) & (turn < number + delay)

        def num_later(delay):
            """The mini-batches behind it, when their number is known."""
            if is_train:
                return None
            return self._unread.num_batches - 1 - (turn - delay)

        is_forward, is_backward = has(self._forward), has(self._backward)
        arrived = [] if stage.is_first else self._arrived(is_forward)
        is_returned = is_asked = False
        if not stage.is_first:
            is_returned = has(self._backward + 1)
            _when(is_returned, self._take_results)
        if not stage.is_last:
            is_asked = has(self._backward - 1)
            upstream, sizes = self._upstream(is_backward, is_asked)

        def computed(passes, *args):
            own = self._unread.take() if self._forward else batches
            here = self._arrived_of(arrived)
            found = passes(own, here, *args, num_later(self._forward))
            self._passes.combine_statistics(own)
            return found

        def forward():
            distance = tf.minimum(turn - self._forward, self._num_ahead)
            return computed(
                self._passes.forward, Waiting.keep_outputs, distance
            )

        outputs = []
        if stage.is_last:
            row = self._logs_if(is_forward, lambda: computed(self._passes.both))
        elif is_forward is True:
            outputs = forward()
        else:
            _when(is_forward, forward)
        # In this order without a trace: neighbours meet at their link, those
        # of the first link at first.
        if not stage.is_first:
            _when(has(self._forward - 1), self._receive)
            _when(is_returned, self._send_back)
        if not stage.is_last:
            _when(is_forward, self._send)
            _when(is_asked, lambda: self._receive_gradients(sizes))
            # What the stage behind waits for is computed first.
            with tf.control_dependencies(outputs):
                row = self._logs_if(
                    is_backward,
                    lambda: self._passes.backward(
                        upstream, num_later(self._backward)
                    ),
                )
        return row

    def _logs_if(self, condition, passes):
        def no_logs():
            return tf.zeros([self._logs.size])

        if isinstance(condition, bool):
            return passes() if condition else no_logs()
        return tf.cond(condition, passes, no_logs)

    def _arrived(self, is_forward):
        """List of each micro-batch's message of the stage before."""
        return [
            each.arrived.take_if(is_forward) for each in self._passes.waiting
        ]

    def _arrived_of(self, messages):
        """List of each micro-batch's `(received tensors, loss so far)`.

        Tensors of the function that is traced, for its tapes.
        """
        if self._stage.is_first:
            return [([], tf.zeros([])) for _ in self._passes.waiting]
        found = []
        for message in messages:
            *values, loss = map(tf.identity, message)
            found.append((self._stage.received.without_masks(values), loss))
        return found

    def _upstream(self, is_backward, is_asked):
        """`(messages for the backward passes, sizes of the next ones)`."""
        waiting = self._passes.waiting
        return (
            [each.upstream.take_if(is_backward) for each in waiting],
            [each.take_sizes_if(is_asked) for each in waiting],
        )

    def _take_results(self):
        for waiting in self._passes.waiting:
            waiting.returned.put(waiting.results.take())

    def _send_back(self):
        for waiting in self._passes.waiting:
            waiting.send_back(waiting.returned.take())

    def _send(self):
        sent = self._stage.sent
        for waiting in self._passes.waiting:
            *values, loss = waiting.outputs.take()
            self._stage.send(sent.without_masks(values), loss)

    def _receive(self):
        """Receives the activations that the next turn uses."""
        batches, stage = self._unread.take_size(), self._stage
        for place, waiting in zip(
            self._passes.places, self._passes.waiting, strict=True
        ):
            received, loss = stage.receive(batches.size(place), place)
            waiting.arrived.put([*stage.received.with_masks(received), loss])

    def _receive_gradients(self, sizes):
        """Receives the gradients that the next turn uses."""
        for waiting, of_one in zip(self._passes.waiting, sizes, strict=True):
            waiting.upstream.put(
                waiting.receive_gradients(self._logs.size, of_one)
            )


def _when(condition, function):
    """Calls a function on a condition, a bool or a tensor."""

    def called():
        function()
        return True

    if isinstance(condition, bool):
        return called() if condition else False
    return tf.cond(condition, called, lambda: False)
