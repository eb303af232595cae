"""Steps that run all passes of a batch: with a flush, or forward alone."""

import tensorflow as tf

from keras_sparsity._tf import keras_functional
from keras_sparsity.data.empty_parts import run_if
from keras_sparsity.pipeline.micro_batches import MicroBatches, start
from keras_sparsity.pipeline.stage import Pass, floats
from keras_sparsity.stages.schedule import Kind


class FlushedRun:
    """One run of a schedule by this rank, traced.

    Args:
        data: a batch, as `train_step` gets it.
        training: True, False, or None of a prediction, which has no loss.

    Attributes:
        batches: `MicroBatches`.
        gradients: list of the stage's gradients, None before any.
        loss: float32 scalar, of the stages so far: of all at the last.
    """

    def __init__(
        self,
        model,
        stage,
        objective,
        schedule,
        data,
        training,
        together,
        mixing,
    ):
        self._stage, self._objective = stage, objective
        self._together, self._mixing = together, mixing
        self._tasks = schedule.stages[stage.number]
        if tf.executing_eagerly():
            # A message that is sent waits for its receiver: with passes in
            # turn, two stages would send to each other.
            order = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE
            self._tasks = sorted(
                self._tasks, key=lambda task: order.index(task.kind)
            )
        self._are_shared = schedule.num_pieces > 1
        self._training = training
        functional = keras_functional.functional_of(model)
        self.batches = MicroBatches(
            functional, data, schedule.num_batches, schedule.num_pieces
        )
        self._passes, self._outputs, self._counted = {}, {}, {}
        self._whole_outputs = None
        self.gradients, self.loss = None, tf.zeros([])
        self._previous = []

    def run(self):
        earlier = []
        for task in self._tasks:
            # It arrives while the task ahead computes.
            with tf.control_dependencies(earlier):
                arrived = self._arriving(task)
            earlier = self._previous
            # In the schedule's order, not TensorFlow's.
            with tf.control_dependencies(self._previous):
                if task.kind is Kind.FORWARD:
                    self._forward(task.batch, *arrived)
                elif task.kind is Kind.BACKWARD:
                    self._backward(task.batch, arrived)
        if not self._stage.is_last:
            return
        self.loss = self._together.total(self.loss)
        if self._training is False:
            # Of the whole batch, as in one process.
            self.loss += self._objective.of_outputs(
                self.batches.batch, self.outputs(), training=False
            )

    @property
    def num_examples(self):
        """int32 scalar: those that this rank computes."""
        return tf.add_n(
            [
                self.batches.number(task.batch)
                for task in self._tasks
                if task.kind is Kind.FORWARD
            ]
        )

    def outputs(self):
        """The outputs for the whole batch, at the last stage; else None.

        All ranks of this stage call it.
        """
        if self._stage.is_last and self._whole_outputs is None:
            numbers = [self.batches.number(place) for place in self._outputs]
            self._whole_outputs = [
                self._together.whole(each, numbers, self._in_order)
                for each in zip(*self._outputs.values(), strict=True)
            ]
        return self._whole_outputs

    def _in_order(self, rows):
        if not self._are_shared:
            return rows
        return self.batches.in_order(rows, len(next(iter(self._outputs))))

    def _arriving(self, task):
        """The message that a task waits for.

        Of a forward pass the received tensors and the loss, of a backward pass
        the list of the gradients of its outputs.
        """
        stage, batch = self._stage, task.batch
        if task.kind is Kind.FORWARD:
            return stage.receive(self.batches.size(batch), batch)
        if task.kind is Kind.UPDATE or stage.is_last:
            return []
        return stage.behind.receive_gradients(
            floats(self._passes[batch].outputs)
        )

    def _forward(self, batch, received, loss):
        inputs, *labels = self.batches.part(batch)
        stage, training = self._stage, bool(self._training)
        is_empty, before = self.batches.is_empty(batch), []
        if is_empty is not False:
            before = [tf.convert_to_tensor(v.value) for v in stage.states]
        self._counted[batch] = self._together.counted(
            self.batches, batch, first=start(self._tasks[0].batch)
        )
        with tf.GradientTape() as tape:
            tape.watch(floats(received))
            with self._looked_for(batch, [inputs, labels, received]):
                with self._together.counting(self._counted[batch]):
                    outputs, losses = stage.compute(inputs, received, training)
                own = self._own(batch, labels, outputs, losses)
            to_derive = own
            if own is not None and self._training:
                to_derive = self._together.scaled(own)
        if before:
            run_if(is_empty, lambda: _assign(stage.states, before))
        if own is not None:
            loss += own
        stage.send(outputs, loss)
        if stage.is_last:
            self._outputs[batch] = outputs
        self.loss += loss
        if self._training:
            self._passes[batch] = Pass(
                tape, stage.variables, received, outputs, to_derive
            )
        self._previous = operations(outputs)

    def _looked_for(self, batch, given):
        is_part = self.batches.is_part(batch)
        return self._mixing.looked_for(given if is_part else [])

    def _own(self, batch, labels, outputs, losses):
        """The stage's share of a micro-batch's loss."""
        share = self.batches.share(batch)
        if self._training is None:
            return None
        if self._training is False:
            return self._objective.of_layers(losses, share)
        return self._objective.of_training(labels, outputs, losses, share)

    def _backward(self, batch, upstream):
        found, stage = self._passes.pop(batch), self._stage
        gradients, of_received = self._together.gradients(
            found, upstream, self._counted[batch]
        )
        if not stage.is_first:
            stage.before.of(batch).send_gradients(of_received)
        self.gradients = added(self.gradients, gradients)
        made = [x for x in gradients if x is not None]
        self._previous = operations(made) or self._previous


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def operations(tensors):
    """The operations that make tensors; none eagerly: calls run in order."""
    if tf.executing_eagerly():
        return []
    return [getattr(each, "values", each).op for each in tensors]


def added(sums, gradients):
    """Sums of gradients, of which some may be None or `tf.IndexedSlices`."""
    if sums is None:
        return gradients
    return [
        _sum(total, gradient)
        for total, gradient in zip(sums, gradients, strict=True)
    ]


def _sum(total, gradient):
    if total is None or gradient is None:
        return gradient if total is None else total
    if isinstance(total, tf.IndexedSlices) and isinstance(
        gradient, tf.IndexedSlices
    ):
        return tf.IndexedSlices(
            tf.concat([total.values, gradient.values], 0),
            tf.concat([total.indices, gradient.indices], 0),
            total.dense_shape,
        )
    return tf.convert_to_tensor(total) + tf.convert_to_tensor(gradient)
