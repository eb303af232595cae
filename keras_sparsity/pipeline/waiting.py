"""Tensors of a micro-batch in flight, until its backward pass."""

import tensorflow as tf

from keras_sparsity.pipeline.stage import floats
from keras_sparsity.pipeline.store import Store, nothing


class Waiting:
    """`Store`s of one micro-batch of each mini-batch in flight.

    Attributes:
        passes: of the tensors that a pass computes with.
        results: of the message to the stage before.
        arrived, upstream: with `messages_ahead`, of messages that the next
            turn uses: from the stage before, and from the stage behind.
        outputs: then, of the message to the stage behind.
        leaving, returned: then, of messages that leave in the same turn: to
            the stage behind, and to the stage before.
    """

    def __init__(self, stage, functional, turns):
        self._stage = stage
        inputs = [functional.inputs[place] for place in stage.part.inputs]
        forward = turns.forward(stage.number)
        backward = turns.backward(stage.number)
        self.passes = Store(
            [
                *(tf.TensorSpec(each.shape, each.dtype) for each in inputs),
                *stage.received.specs,
                tf.TensorSpec([]),
                tf.TensorSpec([], tf.int32),
            ],
            forward,
            backward,
        )
        message = _message(stage.received)
        self.results = Store(message, backward, backward + (not stage.is_first))
        # Gradients arrive a turn ahead of the pass that uses them.
        asked = max(forward, backward - turns.messages_ahead)
        # The numbers of examples, and unknown sizes, of the sent tensors.
        self._sizes = Store([tf.TensorSpec([None], tf.int32)], forward, asked)
        self._stores = [self.passes, self.results, self._sizes]
        if turns.messages_ahead:
            arriving = max(0, forward - 1)
            loss = tf.TensorSpec([])
            self.arrived = Store(
                [*stage.received.specs, loss], arriving, forward
            )
            self.upstream = Store(self.message, asked, backward)
            sent = [*stage.sent.specs, loss]
            self.outputs = Store(sent, forward, forward + (not stage.is_last))
            self.leaving, self.returned = Store(sent), Store(message)
            self._stores += [self.arrived, self.upstream, self.outputs]
            self._stores += [self.leaving, self.returned]

    @property
    def message(self):
        """`tf.TensorSpec`s of a message of the stage behind."""
        return _message(self._stage.sent)

    def put_pass(self, inputs, arrived, share, number):
        """Keeps what a backward pass computes with.

        Args:
            inputs: as `Stage.compute` takes them.
            arrived: list of the received tensors, and then of their masks.
            share: the micro-batch's share of the mini-batch.
            number: as `Together.counted` returns it.
        """
        stage = self._stage
        self.passes.put(
            [
                *(inputs[place] for place in stage.part.inputs),
                *arrived,
                share,
                number,
            ]
        )

    def take_pass(self):
        """The oldest entry: `(inputs, received, share, number)`."""
        stage = self._stage
        values = iter(self.passes.take())
        inputs = {place: next(values) for place in stage.part.inputs}
        received = stage.received.without_masks(
            [next(values) for _ in stage.received.specs]
        )
        return inputs, received, *values

    def put_sizes(self, num_examples, outputs):
        """Keeps the sizes of the gradients that will come."""
        sent = self._stage.sent
        sizes = sent.unknown_sizes(sent.with_masks(outputs))
        number = num_examples[None]
        self._sizes.put(
            [number if sizes is None else tf.concat([number, sizes], 0)]
        )

    def keep_outputs(self, outputs, loss):
        """Keeps a message to the stage behind until the next turn."""
        self.outputs.put([*self._stage.sent.with_masks(outputs), loss])

    def take_sizes_if(self, condition):
        """The sizes of the oldest gradients, int32 vector; else empty."""
        (sizes,) = self._sizes.take_if(condition)
        return sizes

    def receive_gradients(self, num_logs, sizes=None):
        """The message of the stage behind, of the oldest mini-batch.

        Args:
            num_logs: the number of the values of its logs.
            sizes: those of its gradients; None: the oldest ones.
        """
        if sizes is None:
            (sizes,) = self._sizes.take()
        sent = self._stage.sent
        shapes = sent.shapes(sizes[0], sizes[1:])
        like = [
            tf.ensure_shape(tf.zeros(shape, spec.dtype), spec.shape)
            for shape, spec in zip(shapes, sent.specs, strict=True)
        ]
        return self._stage.behind.receive_gradients(
            floats(like[: len(sent.tensors)]), [tf.zeros([num_logs])]
        )

    def no_gradients(self):
        """A message without elements, in the place of one."""
        return nothing(self.message)

    def send_result(self):
        """Sends the gradients and logs of the turn before."""
        self.send_back(self.results.take())

    def send_back(self, message):
        """Sends gradients and logs to the stage before."""
        *gradients, row = message
        self._stage.before.send_gradients(gradients, [row])

    def holds(self, turn):
        """Whether all stores have their entries after so many turns."""
        return all(store.holds(turn) for store in self._stores)

    def clear(self):
        """Forgets all; eagerly."""
        for store in self._stores:
            store.clear()


def _message(crossing):
    """`tf.TensorSpec`s of the gradients of a `Crossing`, and of logs."""
    tensors = crossing.specs[: len(crossing.tensors)]
    return [*floats(tensors), tf.TensorSpec([None])]
