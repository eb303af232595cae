"""The steps of a model whose stages live on the ranks."""

import contextlib

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_functional, keras_losses, keras_scopes
from keras_sparsity.pipeline.links import Crossing
from keras_sparsity.pipeline.micro_batches import MicroBatches
from keras_sparsity.pipeline.stage import added
from keras_sparsity.placement import slices
from keras_sparsity.stages.schedule import Kind, Schedule
from keras_sparsity.training.binding import Binding


class Steps(Binding):
    """Steps in which each rank runs the passes of its stage.

    Logs and predictions are the same on all ranks: those of the last stage.

    Args:
        model: an adopted model.
        stage: this rank's `Stage`.
        schedule: the `Schedule` of a training step.
    """

    def __init__(self, model, stage, schedule):
        self._stage, self._schedule = stage, schedule
        self._functional = keras_functional.functional_of(model)
        self._is_in_step = False
        names = ["train_step", "test_step", "predict_step"]
        super().__init__(model, [*names, "get_metrics_result"])

    @property
    def _last(self):
        return self._collectives.size - 1

    def train_step(self, data):
        with self._in_step():
            run = _Run(self._model, self._stage, self._schedule, data, True)
            run.run()
            if self._stage.variables:
                # Stock Keras would take each duplicate row for a step.
                gradients = [
                    slices.merged(gradient)
                    if isinstance(gradient, tf.IndexedSlices)
                    else gradient
                    for gradient in run.gradients
                ]
                self._model.optimizer.apply(gradients, self._stage.variables)
            return self._logs(run)

    def test_step(self, data):
        with self._in_step():
            run = _Run(self._model, self._stage, self._forward, data, False)
            run.run()
            return self._logs(run)

    def predict_step(self, data):
        with self._in_step():
            run = _Run(self._model, self._stage, self._forward, data, None)
            run.run()
            outputs = self._of_last(run.outputs(), run.batches.num_examples)
            return keras.tree.pack_sequence_as(self._functional.output, outputs)

    @property
    def _forward(self):
        """The forward passes of the schedule."""
        return Schedule(
            self._schedule.num_batches,
            tuple(
                tuple(task for task in tasks if task.kind is Kind.FORWARD)
                for tasks in self._schedule.stages
            ),
        )

    @contextlib.contextmanager
    def _in_step(self):
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False

    def _of_last(self, outputs, num_examples):
        """The last stage's outputs, on all ranks."""
        crossing = Crossing(tuple(self._functional.outputs))
        if not self._stage.is_last:
            outputs = None
        return crossing.broadcast(
            self._collectives, outputs, num_examples, self._last
        )

    def _logs(self, run):
        """The logs of a step: the ranks' losses together, and the metrics."""
        model = self._model
        tracker = keras_losses.loss_tracker(model)
        if self._stage.is_last:
            x, y, sample_weight = run.batches.batch
            outputs = keras.tree.pack_sequence_as(
                self._functional.output, run.outputs()
            )
            logs = model.compute_metrics(
                x, y, outputs, sample_weight=sample_weight
            )
        else:
            logs = model.get_metrics_result()
        logs = dict(logs)
        names = [name for name in logs if name != tracker.name]
        values = [tf.cast(logs[name], tf.float32) for name in names]
        if not self._stage.is_last:
            values = [tf.zeros_like(value) for value in values]
        loss, *values = self._collectives.all_reduce(
            [run.loss, *values], name="pipeline/logs"
        )
        tracker.update_state(loss, sample_weight=run.batches.num_examples)
        logs.update(zip(names, values, strict=True))
        logs[tracker.name] = tracker.result()
        return logs

    def get_metrics_result(self):
        logs = self._stock["get_metrics_result"]()
        # In a step, `_logs` puts those of all ranks together.
        if self._is_in_step or keras_scopes.in_symbolic_scope():
            return logs
        values = self._collectives.broadcast(
            [tf.convert_to_tensor(value) for value in logs.values()],
            root=self._last,
            name="pipeline/metrics",
        )
        values = [value.numpy() for value in values]
        return {
            name: value if value.ndim else float(value)
            for name, value in zip(logs, values, strict=True)
        }


class _Run:
    """One run of a schedule by this rank, traced.

    Attributes:
        batches: `MicroBatches`.
        gradients: list of the stage's gradients, None before any.
        loss: float32 scalar, the stage's share of the batch's loss.
    """

    def __init__(self, model, stage, schedule, data, training):
        self._model, self._stage = model, stage
        self._tasks = schedule.stages[stage.number]
        self._functional = keras_functional.functional_of(model)
        self._training = training
        self.batches = MicroBatches(
            self._functional, data, schedule.num_batches
        )
        self._passes, self._outputs = {}, {}
        self.gradients, self.loss = None, tf.zeros([])
        self._previous = []

    def run(self):
        for task in self._tasks:
            # In the schedule's order, not TensorFlow's.
            with tf.control_dependencies(self._previous):
                if task.kind is Kind.FORWARD:
                    self._forward(task.batch)
                elif task.kind is Kind.BACKWARD:
                    self._backward(task.batch)
        if self._training is False and self._stage.is_last:
            # Of the whole batch, as in one process.
            self.loss += self._loss(self.batches.batch, self.outputs())

    def outputs(self):
        """The outputs for the whole batch, at the last stage; else None."""
        if not self._stage.is_last:
            return None
        parts = [self._outputs[place] for place in sorted(self._outputs)]
        return [self._whole(each) for each in zip(*parts, strict=True)]

    def _whole(self, parts):
        """An output for the whole batch, with its mask, without stand-ins."""
        number = self.batches.num_examples
        whole = tf.concat(parts, 0)[:number]
        masks = [keras_losses.keras_mask(part) for part in parts]
        if masks[0] is not None:
            keras_losses.set_keras_mask(whole, tf.concat(masks, 0)[:number])
        return whole

    def _forward(self, batch):
        inputs, *labels = self.batches.part(batch)
        inputs = [inputs[place] for place in self._stage.part.inputs]

        def objective(outputs, losses):
            return self._objective(batch, labels, outputs, losses)

        found = self._stage.forward(
            inputs,
            self.batches.size(batch),
            objective,
            bool(self._training),
        )
        if self._training:
            self._passes[batch] = found
        if self._stage.is_last:
            self._outputs[batch] = found.outputs
        if found.objective is not None:
            self.loss += found.objective
        self._previous = [x.op for x in found.outputs]

    def _objective(self, batch, labels, outputs, losses):
        """A micro-batch's share of the loss, as far as this stage makes it."""
        if self._training is None:
            return None
        total = [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses]
        if self._stage.is_last and self._training:
            total.append(self._loss(labels, outputs))
        if not total:
            return None
        return tf.add_n(total) * self.batches.share(batch)

    def _loss(self, labels, outputs):
        """The loss of outputs, without those that layers add."""
        x, y, sample_weight = labels
        with keras_losses.losses_replaced(self._model, [tf.zeros([])]):
            loss = keras_losses.step_loss(
                self._model,
                x=x,
                y=y,
                y_pred=keras.tree.pack_sequence_as(
                    self._functional.output, outputs
                ),
                sample_weight=sample_weight,
                training=self._training,
            )
        return tf.cast(loss, tf.float32)

    def _backward(self, batch):
        gradients = self._passes.pop(batch).backward()
        self.gradients = added(self.gradients, gradients)
        self._previous = [
            x.op if isinstance(x, tf.Tensor) else x.values.op
            for x in gradients
            if x is not None
        ] or self._previous
