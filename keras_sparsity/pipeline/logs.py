"""The logs of a step, as one vector, and those that are shown late."""

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_losses, keras_models
from keras_sparsity.global_batch.metrics import global_results


class Logs:
    """A model's loss and metrics, which the last stage computes.

    But those that a layer holds, which the layer's stage counts.

    Args:
        stock_result: the model's own `get_metrics_result`.
        stage: the `Stage` of this rank.
        peers: `Collectives` of the ranks of this stage.

    Attributes:
        are_spread: whether the logs of all stages are summed, where layers hold
            metrics; else they are those of the last one.
    """

    def __init__(self, model, objective, stock_result, stage, peers):
        self._model, self._objective = model, objective
        self._result, self._is_last = stock_result, stage.is_last
        self._peers = peers
        self._own = stage.part.model.metrics
        own = set(map(id, self._own))
        held = [
            metric
            for layer in keras_models.all_layers(model)
            # Keras ignores those of a model within the model.
            if not isinstance(layer, keras.Model)
            for metric in layer.metrics
        ]
        self._elsewhere = [each for each in held if id(each) not in own]
        self.are_spread = bool(held)

    def of_batch(self, loss, batches, outputs):
        """float32 vector of the logs after a batch, see `result`.

        Args:
            loss: float32 scalar.
            batches: `MicroBatches` of the batch.
            outputs: a function that gives the outputs for all of it.
        """
        if self._is_last:
            self._count(loss, batches, outputs)
        return self.row()

    def row(self):
        """float32 vector of the logs so far, see `result`."""
        if not (self._is_last or self._own):
            return tf.zeros([self.size])
        return tf.concat(
            [
                tf.reshape(tf.cast(value, tf.float32), [-1])
                for value in self.result().values()
            ],
            0,
        )

    def _count(self, loss, batches, outputs):
        keras_losses.loss_tracker(self._model).update_state(
            loss, sample_weight=batches.num_examples
        )
        x, y, sample_weight = batches.batch
        self._model.compute_metrics(
            x,
            y,
            self._objective.packed(outputs()),
            sample_weight=sample_weight,
        )

    def result(self):
        """A dict of the values, over all ranks of the stage.

        Each of them has computed its part of the loss by output and of what
        layers count, and other metrics of the whole batch. Those that another
        stage counts are 0. All ranks of the stage call it.
        """
        metrics = self._own
        if self._is_last:
            metrics = metrics + keras_losses.loss_metrics(self._model)
        found = global_results(metrics, self._peers, self._result)
        is_own = self._are_own()
        return {
            name: value if is_own[name] else tf.zeros_like(value)
            for name, value in found.items()
        }

    def _are_own(self):
        """Dict from names to whether this stage counts the metric.

        Of metrics of one name Keras shows the last.
        """
        own, elsewhere = (
            set(map(id, metrics)) for metrics in (self._own, self._elsewhere)
        )
        found = {}
        for metric in self._model.metrics:
            is_own = id(metric) in own
            if self._is_last:  # which has those that no layer holds, too
                is_own = id(metric) not in elsewhere
            found.update(dict.fromkeys(_names(metric), is_own))
        return found

    @property
    def size(self):
        """The number of values."""
        return sum(self._sizes())

    def packed(self, row):
        """The dict of logs that such a vector holds."""
        values = tf.split(row, self._sizes())
        return {
            name: tf.reshape(part, shape)
            for (name, shape), part in zip(
                self._shapes().items(), values, strict=True
            )
        }

    def _sizes(self):
        return [shape.num_elements() for shape in self._shapes().values()]

    def _shapes(self):
        # Eagerly, metrics that have seen nothing may give Python numbers.
        return {
            name: tf.convert_to_tensor(value).shape
            for name, value in self._result().items()
        }


def _names(metric):
    result = metric.result()
    return list(result) if isinstance(result, dict) else [metric.name]


class LateLogs:
    """The vectors of logs that a stage knows and does not show yet.

    They travel from the last stage with gradients. All stages show those of
    the mini-batch that has come back to the first one: N - 1 steps ago, or
    4 (N - 1) with `messages_ahead`. Where none has come back since all have,
    those that all stages knew then; 0 at first.

    Args:
        number: the steps between knowing and showing them.
    """

    def __init__(self, number):
        self._number, self._rows = number, None

    def push(self, row, is_known):
        """Takes the newest vector; returns the one to show.

        Args:
            row: the vector.
            is_known: whether it is one, of a mini-batch that has come back.
        """
        row = _marked(row)
        if self._rows is None:
            with tf.init_scope():
                zeros = tf.zeros([self._number + 1, row.shape[0]])
                self._rows = tf.Variable(zeros, trainable=False)
        newest = tf.where(is_known, row, self._rows[-1])
        rows = tf.concat([self._rows[1:], newest[None]], 0)
        self._rows.assign(rows)
        return rows[0, :-1]

    @property
    def are_known(self):
        """Whether those that the last step has shown are of a mini-batch."""
        return self._rows is not None and bool(self._rows[0, -1] > 0)

    def show(self, row):
        """Takes the newest vector, which all stages know; eagerly."""
        self._rows.assign(tf.broadcast_to(_marked(row), self._rows.shape))

    def clear(self):
        """Forgets all; eagerly."""
        if self._rows is not None:
            self._rows.assign(tf.zeros_like(self._rows))


def _marked(row):
    """A vector of logs, marked as known by a last element that is not 0."""
    return tf.concat([row, [1.0]], 0)
