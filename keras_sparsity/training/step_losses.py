"""The loss of an adopted model's step, with this rank's share of it."""

import keras
import tensorflow as tf

from keras_sparsity._tf import contexts, keras_losses, patches
from keras_sparsity.data import empty_parts
from keras_sparsity.global_batch import loss_scale
from keras_sparsity.tables.row_wise import is_of_owners
from keras_sparsity.training.binding import Binding


class StepLosses(Binding):
    """A loss of the global batch, with a gradient that the ranks' sum makes."""

    def __init__(self, model):
        self._is_in_keras_loss = False
        self._adds_losses = False
        private = {}
        if keras_losses.losses_are_scaled():
            private[keras_losses.STEP_LOSS] = "compute_step_loss"
        if keras_losses.ADDED_LOSS:
            private[keras_losses.ADDED_LOSS] = "added_loss"
        super().__init__(model, ["compute_loss"], private)

    def compute_step_loss(self, *args, **kwargs):
        """The loss that Keras's own steps compute."""
        with contexts.attribute(self, "_is_in_keras_loss", True):
            return self._stock[keras_losses.STEP_LOSS](*args, **kwargs)

    def compute_loss(self, *args, **kwargs):
        """The loss, divided by the number of replicas for Keras's own steps.

        These multiply the value again (Keras 3.6 and later). A step of the
        user's own does not, and gets it undivided.
        """
        num_replicas = loss_scale.num_replicas()
        if num_replicas == 1:
            return self._stock["compute_loss"](*args, **kwargs)
        part = empty_parts.current()
        if part is not None and keras_losses.means_examples_plainly(
            self._model
        ):
            return self._mean_of_parts(part, num_replicas, args, kwargs)
        self._adds_losses = False
        with (
            loss_scale.as_keras_multiplies(),
            keras_losses.loss_metrics_multiplied(self._model, num_replicas),
        ):
            loss = self._divided_loss(*args, **kwargs)
        if self._is_in_keras_loss:
            return loss
        value = tf.stop_gradient(loss) * num_replicas
        if self._adds_losses and part is not None:
            (value,) = self._collectives.all_reduce(
                empty_parts.selected(
                    [value * tf.cast(part.share, value.dtype)]
                ),
                name="model/loss",
            )
        return loss + tf.stop_gradient(value - loss)

    def _mean_of_parts(self, part, num_replicas, args, kwargs):
        """A loss of means over examples, of which each rank has its part."""
        with loss_scale.of_own_part():
            loss = self._stock["compute_loss"](*args, **kwargs)
        loss *= tf.cast(part.share, loss.dtype)
        (value,) = self._collectives.all_reduce(
            empty_parts.selected([tf.stop_gradient(loss)]), name="model/loss"
        )
        if self._is_in_keras_loss:
            value /= num_replicas
        return loss + tf.stop_gradient(value - loss)

    def _divided_loss(self, *args, **kwargs):
        stock = self._stock["compute_loss"]
        if keras_losses.ADDED_LOSS:
            return stock(*args, **kwargs)
        of_keras = keras.Model.compute_loss

        def divided(*args, **kwargs):
            """Of Keras before 3.8, and 3.5, which divides nothing added."""
            share = 1
            if not keras_losses.losses_are_scaled():
                share /= loss_scale.num_replicas()
            added = [
                self._counted_loss(loss) * share for loss in self._model.losses
            ]
            with keras_losses.losses_replaced(self._model, added):
                return of_keras(self._model, *args, **kwargs)

        if getattr(stock, "__func__", None) is of_keras:
            return divided(*args, **kwargs)
        with patches.method_for("compute_loss", self._model, divided):
            return stock(*args, **kwargs)

    def added_loss(self, loss):
        """A layer's or regularizer's loss, as Keras adds it to the loss."""
        return self._stock[keras_losses.ADDED_LOSS](self._counted_loss(loss))

    def _counted_loss(self, loss):
        """An added loss, with a gradient by this rank's share of the batch.

        The ranks' gradients are summed. A layer's mean over the examples of
        its part so becomes the mean over those of the batch, and a loss of
        weights alone stays as it is. Logged values need nothing: Keras
        weights each rank's by its number of examples.
        """
        part = empty_parts.current()
        if part is None or is_of_owners(loss):
            return loss  # divided by the number of replicas
        self._adds_losses = True
        share = tf.cast(part.share * self._collectives.num_workers, loss.dtype)
        return _with_slope(loss, share)


@tf.custom_gradient
def _with_slope(loss, slope):
    """A loss, whose gradient is `slope` times its own."""

    def gradient(upstream):
        return upstream * slope, None

    return tf.identity(loss), gradient
