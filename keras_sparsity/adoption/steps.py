"""One step of an adopted model, on this rank's part of the batch."""

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity import compat, empty_parts, losses, metrics
from keras_sparsity.adoption.binding import Binding, in_place_of
from keras_sparsity.data.following import Followed


class Steps(Binding):
    """Steps whose losses, logs and predictions are of the whole batch."""

    def __init__(self, model, joint_pull):
        self._is_in_step = False
        self._is_in_keras_loss = False
        self._joint_pull = joint_pull
        names = ["call", "train_step", "test_step", "predict_step"]
        names.append("get_metrics_result")
        names.append("compute_loss")
        private = {}
        if compat.losses_are_scaled():
            private[compat.STEP_LOSS] = "compute_step_loss"
        super().__init__(model, names, private)

    def call(self, *args, **kwargs):
        if not args or self._collectives.size == 1:
            return self._stock["call"](*args, **kwargs)
        with losses.of_own_part():
            if self._is_in_step:
                return empty_parts.call(self._call, *args, **kwargs)
            return self._call(*args, **kwargs)

    def _call(self, inputs, *args, **kwargs):
        with self._joint_pull.entered():
            return self._stock["call"](inputs, *args, **kwargs)

    def compute_step_loss(self, *args, **kwargs):
        """What Keras's own steps call."""
        was_in_loss, self._is_in_keras_loss = self._is_in_keras_loss, True
        try:
            return self._stock[compat.STEP_LOSS](*args, **kwargs)
        finally:
            self._is_in_keras_loss = was_in_loss

    def compute_loss(self, *args, **kwargs):
        """The loss, with a gradient that the ranks' sum makes whole.

        Within, losses are divided by the number of replicas, as in Keras 3.6
        and later, whose own steps multiply the value again. A step of the
        user's own, which does not, gets it undivided.
        """
        num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if num_replicas == 1:
            return self._stock["compute_loss"](*args, **kwargs)
        with losses.as_keras_multiplies():
            loss = self._divided_loss(*args, **kwargs)
        if self._is_in_keras_loss:
            return loss
        return loss + tf.stop_gradient(loss) * (num_replicas - 1)

    def _divided_loss(self, *args, **kwargs):
        stock = self._stock["compute_loss"]
        if compat.losses_are_scaled():
            return stock(*args, **kwargs)
        of_keras = keras.Model.compute_loss

        def divided(*args, **kwargs):
            """Of Keras 3.5, which does not divide what layers add."""
            loss = of_keras(self._model, *args, **kwargs)
            added = [tf.reduce_sum(x) for x in self._model.losses]
            share = 1 / tf.distribute.get_strategy().num_replicas_in_sync
            return loss - tf.add_n(added) * (1 - share) if added else loss

        if getattr(stock, "__func__", None) is of_keras:
            return divided(*args, **kwargs)
        with in_place_of("compute_loss", self._model, divided):
            return stock(*args, **kwargs)

    def train_step(self, batch):
        self._check_optimizer()
        following = None
        if isinstance(batch, Followed):
            batch, following = batch
        _, labels, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with self._joint_pull.training(labels, following):
            logs = self._logs_of("train_step", batch)
        if self._collectives.size > 1:
            empty_parts.combine_statistics(
                self._model, batch, self._collectives
            )
        return logs

    def test_step(self, batch):
        return self._logs_of("test_step", batch)

    def _step(self, name, batch):
        was_in_step, self._is_in_step = self._is_in_step, True
        try:
            return self._stock[name](batch)
        finally:
            self._is_in_step = was_in_step

    def _logs_of(self, name, batch):
        if self._is_in_step or self._collectives.size == 1:
            return self._step(name, batch)
        with metrics.results_are_global(
            self._metrics, self._collectives
        ) as results:
            logs = self._step(name, batch)
        return self._means(logs, results)

    def _means(self, logs, results):
        """Logs with the ranks' means of what is no metric's result."""
        of_metrics = {id(result) for result in results}
        leaves = [
            x.value if compat.is_variable(x) else x
            for x in tf.nest.flatten(logs)
        ]
        own = {
            i: tf.convert_to_tensor(x)
            for i, x in enumerate(leaves)
            if id(x) not in of_metrics and _is_number(x)
        }
        # One dtype, so that they travel together.
        are_narrow = all(
            x.dtype.is_floating and x.dtype.size <= 4 for x in own.values()
        )
        wide = tf.float32 if are_narrow else tf.float64
        means = self._collectives.all_reduce(
            [tf.cast(x, wide) for x in own.values()],
            op="mean",
            name="model/logs",
        )
        for (i, x), mean in zip(own.items(), means, strict=True):
            leaves[i] = tf.cast(mean, x.dtype if x.dtype.is_floating else wide)
        return tf.nest.pack_sequence_as(logs, leaves)

    def get_metrics_result(self):
        # In a step, each metric's `result` is the global one already.
        if self._is_in_step or compat.in_symbolic_scope():
            return self._stock["get_metrics_result"]()
        built = self._metrics()
        if len(built) < len(self._model.metrics):
            return metrics.global_results(built, self._collectives)
        return metrics.global_results(
            built, self._collectives, self._stock["get_metrics_result"]
        )

    def _metrics(self):
        """The model's metrics, but for those that no step has updated.

        A step of the user's own may do without what `compile` was given.
        """
        return [m for m in self._model.metrics if getattr(m, "built", True)]

    def predict_step(self, batch):
        outputs = self._step("predict_step", batch)
        if self._collectives.size == 1:
            return outputs
        return tf.nest.map_structure(
            lambda part: _whole_batch(part, self._collectives), outputs
        )


def _is_number(value):
    if isinstance(value, tf.Tensor | tf.Variable):
        dtype = value.dtype
        return dtype.is_floating or dtype.is_integer or dtype.is_bool
    return np.asarray(value).dtype.kind in "biuf"


def _whole_batch(part, communicator):
    """All ranks' parts of a batch of predictions, in order."""
    if isinstance(part, tf.RaggedTensor):
        return tf.RaggedTensor.from_row_lengths(
            _whole_batch(part.values, communicator),
            _whole_batch(part.row_lengths(), communicator),
        )
    part = tf.convert_to_tensor(part)
    if part.shape.rank == 0:
        part = part[tf.newaxis]
    return communicator.all_gather(part, name="model/predict")
