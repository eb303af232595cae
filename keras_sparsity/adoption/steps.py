"""One step of an adopted model, on this rank's part of the batch."""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity import (
    compat,
    empty_parts,
    losses,
    metrics,
    random_states,
)
from keras_sparsity.adoption.binding import Binding, in_place_of
from keras_sparsity.data import stand_ins
from keras_sparsity.data.following import Followed
from keras_sparsity.tables.row_wise import is_of_owners


class Steps(Binding):
    """Steps whose losses, logs and predictions are of the whole batch."""

    def __init__(self, model, joint_pull):
        self._is_in_step = False
        self._is_in_keras_loss = False
        self._adds_losses = False
        self._joint_pull = joint_pull
        names = ["call", "train_step", "test_step", "predict_step"]
        names.append("get_metrics_result")
        names.append("compute_loss")
        private = {}
        if compat.losses_are_scaled():
            private[compat.STEP_LOSS] = "compute_step_loss"
        if compat.ADDED_LOSS:
            private[compat.ADDED_LOSS] = "added_loss"
        super().__init__(model, names, private)

    def call(self, *args, **kwargs):
        if not args or self._collectives.size == 1:
            return self._stock["call"](*args, **kwargs)
        with losses.of_own_part(), self._joint_pull.entered():
            return self._stock["call"](*args, **kwargs)

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
        self._adds_losses = False
        with losses.as_keras_multiplies():
            loss = self._divided_loss(*args, **kwargs)
        if self._is_in_keras_loss:
            return loss
        value = tf.stop_gradient(loss) * num_replicas
        part = empty_parts.current()
        if self._adds_losses and part is not None:
            (value,) = self._collectives.all_reduce(
                empty_parts.selected(
                    [value * tf.cast(part.share, value.dtype)]
                ),
                name="model/loss",
            )
        return loss + tf.stop_gradient(value - loss)

    def _divided_loss(self, *args, **kwargs):
        stock = self._stock["compute_loss"]
        if compat.ADDED_LOSS:
            return stock(*args, **kwargs)
        of_keras = keras.Model.compute_loss

        def divided(*args, **kwargs):
            """Of Keras before 3.8, and 3.5, which divides nothing added."""
            share = 1
            if not compat.losses_are_scaled():
                share /= tf.distribute.get_strategy().num_replicas_in_sync
            added = [
                self._counted_loss(loss) * share for loss in self._model.losses
            ]
            with compat.losses_replaced(self._model, added):
                return of_keras(self._model, *args, **kwargs)

        if getattr(stock, "__func__", None) is of_keras:
            return divided(*args, **kwargs)
        with in_place_of("compute_loss", self._model, divided):
            return stock(*args, **kwargs)

    def added_loss(self, loss):
        """What Keras adds to the loss of a layer's, or of a regularizer."""
        return self._stock[compat.ADDED_LOSS](self._counted_loss(loss))

    def _counted_loss(self, loss):
        """What is added, with a gradient by this rank's share of the batch.

        The ranks' gradients are summed. So what a layer gives as the mean over
        the examples of its part is the mean over those of the batch, and what
        depends on weights only is what it is. Values that are logged need
        nothing: Keras weights each rank's by its number of examples.
        """
        part = empty_parts.current()
        if part is None or is_of_owners(loss):
            return loss  # divided by the number of replicas
        self._adds_losses = True
        return _with_slope(
            loss, tf.cast(part.share * self._collectives.size, loss.dtype)
        )

    def train_step(self, batch):
        self._check_optimizer()
        following = None
        if isinstance(batch, Followed):
            batch, *following = batch
        with self._counting(batch) as batch:
            _, labels, _ = keras.utils.unpack_x_y_sample_weight(batch)
            with self._joint_pull.training(labels, following):
                logs = self._logs_of("train_step", batch)
            if self._collectives.size > 1:
                empty_parts.combine_statistics(self._model, self._collectives)
        return logs

    def test_step(self, batch):
        with self._counting(batch) as batch:
            return self._logs_of("test_step", batch)

    @contextlib.contextmanager
    def _counting(self, batch):
        """While entered, the examples of this rank's part count, and no other.

        Yields:
            The batch that the step computes on.
        """
        if self._collectives.size == 1:
            yield batch
        elif empty_parts.current() is not None:  # within another step
            yield stand_ins.without_counts(batch)
        else:
            batch, counts = stand_ins.counted(batch)
            part = empty_parts.Part(counts, self._collectives)
            with empty_parts.computing_on(part):
                yield batch

    def _step(self, name, batch):
        was_in_step, self._is_in_step = self._is_in_step, True
        by_rank = contextlib.nullcontext()
        if self._collectives.size > 1 and not was_in_step:
            by_rank = random_states.drawn_by_rank(self._collectives.rank)
        try:
            with by_rank:
                return self._stock[name](batch)
        finally:
            self._is_in_step = was_in_step

    def _logs_of(self, name, batch):
        if self._is_in_step or self._collectives.size == 1:
            return self._step(name, batch)
        with metrics.results_are_global(
            self._metrics,
            self._collectives,
            functools.partial(compat.loss_metrics, self._model),
        ) as results:
            logs = self._step(name, batch)
        return self._means(logs, results)

    def _means(self, logs, results):
        """Logs with the ranks' means of what is no metric's result.

        Weighted by the ranks' numbers of examples.
        """
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
        if not own:
            return tf.nest.pack_sequence_as(logs, leaves)
        wide = tf.float32 if are_narrow else tf.float64
        number = tf.cast(empty_parts.current().number, wide)
        terms = [tf.cast(x, wide) * number for x in own.values()]
        *sums, total = self._collectives.all_reduce(
            empty_parts.selected([*terms, number]),
            name="model/logs",
        )
        for (i, x), value in zip(own.items(), sums, strict=True):
            mean = tf.math.divide_no_nan(value, total)
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
        with self._counting(batch) as batch:
            outputs = self._step("predict_step", batch)
            if self._collectives.size == 1:
                return outputs
            return tf.nest.map_structure(
                lambda part: _whole_batch(_cut(part), self._collectives),
                outputs,
            )


@tf.custom_gradient
def _with_slope(loss, slope):
    """A loss, whose gradient is `slope` times its own."""

    def gradient(upstream):
        return upstream * slope, None

    return tf.identity(loss), gradient


def _cut(part):
    """The rows of outputs that are of examples."""
    if not isinstance(part, tf.RaggedTensor):
        part = tf.convert_to_tensor(part)
        if part.shape.rank == 0:
            part = part[tf.newaxis]
    return empty_parts.cut(part)


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
    return communicator.all_gather(part, name="model/predict")
