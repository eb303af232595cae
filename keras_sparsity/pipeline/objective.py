"""The loss, as far as one stage makes it."""

import contextlib

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_functional, keras_losses, patches
from keras_sparsity.pipeline import micro_batches
from keras_sparsity.tables import row_wise


class Objective:
    """A stage's share of a loss: terms of its layers; at the last, the loss.

    Args:
        is_last: whether the stage is the last one.
        num_ranks: the number of the stage's ranks.
        tell: function of a place and a text that warns of it once.
    """

    def __init__(self, model, is_last, num_ranks, tell):
        self._model, self._is_last = model, is_last
        self._num_ranks, self._tell = num_ranks, tell
        self._functional = keras_functional.functional_of(model)

    def of_training(self, labels, outputs, losses, share=1.0):
        """The scalar that a training step makes smaller.

        Args:
            labels: `(x, y, sample_weight)`.
            outputs: the stage's outputs; the model's at the last stage.
            losses: list of those that layers and regularizers add.
            share: the micro-batch's share of the batch.

        Returns:
            float32 scalar; None of a stage that adds nothing.
        """
        of_outputs = []
        if self._is_last:
            of_outputs.append(
                self.of_outputs(labels, outputs, training=True, share=share)
            )
        return self._total(losses, of_outputs, share)

    def of_layers(self, losses, share=1.0):
        """The part that does not depend on outputs."""
        return self._total(losses, [], share)

    def _total(self, losses, of_outputs, share):
        """This rank's share of losses; None of none."""
        of_examples = self._sums(
            loss for loss in losses if not row_wise.is_of_owners(loss)
        )
        of_examples += of_outputs
        # Each rank has the loss of the whole table, and the gradient of its
        # own rows as often.
        total = [
            loss / self._num_ranks
            for loss in self._sums(filter(row_wise.is_of_owners, losses))
        ]
        if of_examples:
            total.append(tf.add_n(of_examples) * share)
        return tf.add_n(total) if total else None

    def of_outputs(self, labels, outputs, training, share=None):
        """The loss of the model's outputs, without those that layers add.

        Args:
            labels, outputs: as for `of_training`.
            training: whether it is that of a training step.
            share: the micro-batch's share of the batch, by which it counts in
                the logs of each output's loss; None: all.
        """
        x, y, sample_weight = labels
        none = tf.zeros([], keras.config.floatx())
        with (
            keras_losses.losses_replaced(self._model, [none]),
            keras_losses.loss_metrics_of_share(self._model, share),
            self._counted(share),
        ):
            loss = keras_losses.step_loss(
                self._model,
                x=x,
                y=y,
                y_pred=self.packed(outputs),
                sample_weight=sample_weight,
                training=training,
            )
        return tf.cast(loss, tf.float32)

    def _counted(self, share):
        """While entered, losses that are not means over examples count whole.

        All losses are multiplied by the part's share of the examples. A sum
        has none, and of a mean over weights it is that of the weights.
        """
        reductions = "sum", "mean_with_sample_weight"
        others = [
            loss
            for loss in keras.tree.flatten(self._model.loss)
            if getattr(loss, "reduction", None) in reductions
        ]
        if share is None or not others:
            return contextlib.nullcontext()

        def make(stock):
            def call(loss, y_true, y_pred, sample_weight=None):
                value = stock(loss, y_true, y_pred, sample_weight)
                if not any(loss is each for each in others):
                    return value  # of a loss within another
                if loss.reduction != "sum":
                    of_weights = micro_batches.share_of_weights(sample_weight)
                    if of_weights is None:
                        return value
                    self._tell_of_mask(loss, y_pred, sample_weight)
                    value *= tf.cast(of_weights, value.dtype)
                # 0 of a stand-in for missing examples.
                divisor = tf.cast(share, value.dtype)
                return tf.math.divide_no_nan(value, divisor)

            return call

        return patches.LOSS_CALL.by(make)

    def _tell_of_mask(self, loss, y_pred, sample_weight):
        """Warns of weights that cannot be 0 where a mask is.

        Keras divides by the weights that are not masked, of which a part does
        not know the others'.
        """
        mask = keras_losses.keras_mask(y_pred)
        if mask is None:
            return
        given, expected = (
            [size for size in tensor.shape[1:] if size != 1]
            for tensor in (sample_weight, mask)
        )
        if len(given) < len(expected):
            self._tell(
                f"mask of {loss.name}",
                f"The loss '{loss.name}' of the model '{self._model.name}' "
                "divides by the weights that are not masked, and each pass of "
                "the model's stages is of a part of a batch, which counts by "
                "all of its weights: the result is another one than in one "
                f"process. Received: sample weights {sample_weight.shape}, and "
                f"an output with a mask {mask.shape}. Give weights of the "
                "mask's shape that are 0 where it masks, or use "
                "`ks.PipelineStrategy(num_micro_batches=1)` with one process "
                "for each stage.",
            )

    def packed(self, outputs):
        """A flat list of outputs in the model's structure."""
        return keras.tree.pack_sequence_as(self._functional.output, outputs)

    def _sums(self, losses):
        return [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses]
