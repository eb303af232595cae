"""Tensors of a micro-batch in flight, until its backward pass."""

import tensorflow as tf

from keras_sparsity.pipeline.stage import floats
from keras_sparsity.pipeline.store import Store


class Waiting:
    """`Store`s of one micro-batch of each mini-batch in flight.

    Args:
        stage: this rank's `Stage`.
        functional: the model's `Functional`.
        states: list of the variables of random generators.
        num_ahead: the number of stages behind this one.

    Attributes:
        passes: `Store` of the tensors that a pass computes with.
        results: `Store` of the message to the stage before.
    """

    def __init__(self, stage, functional, states, num_ahead):
        self._stage, self._num_states = stage, len(states)
        inputs = [functional.inputs[place] for place in stage.part.inputs]
        self.passes = Store(
            num_ahead + 1,
            [
                *(tf.TensorSpec(each.shape, each.dtype) for each in inputs),
                *stage.received.specs,
                *(tf.TensorSpec(each.shape, each.dtype) for each in states),
                tf.TensorSpec([]),
            ],
        )
        # The numbers of examples, and unknown sizes, of the sent tensors.
        self._sizes = Store(num_ahead + 1, [tf.TensorSpec([None], tf.int32)])
        self.results = Store(1, _message(stage.received))

    @property
    def message(self):
        """`tf.TensorSpec`s of a message of the stage behind."""
        return _message(self._stage.sent)

    def put_pass(self, inputs, received, states, share):
        """Keeps what a backward pass computes with.

        Args:
            inputs, received: as `Stage.compute` takes them.
            states: list of the values of the states before the pass.
            share: the micro-batch's share of the mini-batch.
        """
        stage = self._stage
        self.passes.put(
            [
                *(inputs[place] for place in stage.part.inputs),
                *stage.received.with_masks(received),
                *states,
                share,
            ]
        )

    def take_pass(self):
        """The oldest entry: `(inputs, received, states, share)`."""
        stage = self._stage
        values = iter(self.passes.take())
        inputs = {place: next(values) for place in stage.part.inputs}
        received = stage.received.without_masks(
            [next(values) for _ in stage.received.specs]
        )
        states = [next(values) for _ in range(self._num_states)]
        return inputs, received, states, next(values)

    def put_sizes(self, num_examples, outputs):
        """Keeps the sizes of the gradients that will come."""
        sent = self._stage.sent
        sizes = sent.unknown_sizes(sent.with_masks(outputs))
        number = num_examples[None]
        self._sizes.put(
            [number if sizes is None else tf.concat([number, sizes], 0)]
        )

    def receive_gradients(self, num_logs):
        """The message of the stage behind, of the oldest mini-batch.

        Args:
            num_logs: the number of the values of its logs.
        """
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
        return [
            tf.zeros([size or 0 for size in spec.shape], spec.dtype)
            for spec in self.message
        ]

    def send_result(self):
        """Sends the gradients and logs of the turn before."""
        *gradients, row = self.results.take()
        self._stage.before.send_gradients(gradients, [row])
        return True

    def holds(self, num_passes, num_results):
        """Whether it has so many entries."""
        return (
            int(self.passes.size) == int(self._sizes.size) == num_passes
            and int(self.results.size) == num_results
        )

    def clear(self):
        """Forgets all; eagerly."""
        for store in (self.passes, self._sizes, self.results):
            store.clear()


def _message(crossing):
    """`tf.TensorSpec`s of the gradients of a `Crossing`, and of logs."""
    tensors = crossing.specs[: len(crossing.tensors)]
    return [*floats(tensors), tf.TensorSpec([None])]
