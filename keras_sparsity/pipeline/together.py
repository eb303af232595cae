"""What ranks add up in a step, and the decisions of all stages by it."""

import contextlib

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_losses
from keras_sparsity.data import empty_parts
from keras_sparsity.layers import sampled_softmax_loss
from keras_sparsity.pipeline.micro_batches import start
from keras_sparsity.placement import slices


class Together:
    """Sums over a stage's ranks; with a flush, norms and finiteness over all.

    Args:
        peers: `Collectives` of the ranks of the same stage.
        are_spread: of each gradient, whether it is one of rows that this rank
            has alone, and of all ranks already.
        head_sums: `HeadSums`, by which dense gradients of a head are summed;
            None: by AllReduce.
        are_alike: whether each rank of the stage computes the whole batch, so
            that their sums are means.
    """

    def __init__(
        self,
        optimizer,
        collectives,
        peers,
        are_spread,
        head_sums=None,
        are_alike=False,
    ):
        self._are_alike = are_alike
        self._optimizer, self._collectives = optimizer, collectives
        self._peers, self._are_spread = peers, are_spread
        self._head_sums = head_sums
        scaling = keras.optimizers.LossScaleOptimizer
        self._may_skip = isinstance(optimizer, scaling)
        rule = optimizer.inner_optimizer if self._may_skip else optimizer
        self._largest_norm = getattr(rule, "global_clipnorm", None)

    def counted(self, batches, place, first):
        """The number of a part's examples in sums that its layers make.

        Args:
            batches: `MicroBatches`.
            place: that of the part.
            first: the start of this rank's first place. Of the stage's first
                rank it is 0, so that this has, at the same time, the part so
                many places before.

        Returns:
            int32 scalar. 0 of a stand-in example; but 1 where all ranks of the
            stage have one, as there are no batch statistics of nothing.
        """
        earliest = batches.number(start(place) - first)
        return tf.where(earliest > 0, batches.number(place), 1)

    def counting(self, number):
        """Context of a pass: sums over the stage's ranks leave out stand-ins.

        Such as those of `BatchNormalization(synchronized=True)`.

        Args:
            number: as `counted` returns it.
        """
        if self._peers.size == 1 or self._are_alike:
            return contextlib.nullcontext()
        counts = tf.stack([number, number])
        return empty_parts.computing_on(empty_parts.Part(counts, self._peers))

    def gradients(self, made, upstream, number):
        """The gradients of a `Pass`; of a stand-in zeros.

        Through sums over the stage's ranks, a stand-in that does not count has
        a gradient, too.

        Args:
            upstream: as for `Pass.gradients`.
            number: as `counted` returns it.
        """
        with self.counting(number):
            gradients, received = made.gradients(upstream)
            received = empty_parts.of_examples(received)
            # Those that are spread are of all ranks already.
            own = {
                place: gradient
                for place, gradient in enumerate(gradients)
                if gradient is not None and not self._are_spread[place]
            }
            own = empty_parts.of_examples(own)
        return [own.get(i, g) for i, g in enumerate(gradients)], received

    def scaled(self, loss):
        """The loss whose gradients the optimizer takes."""
        return self._optimizer.scale_loss(loss)

    def summed(self, gradients):
        """The sums of the gradients of a stage's ranks.

        Args:
            gradients: list of the rank's; the same of them are None, and the
                same `tf.IndexedSlices`, on all of these ranks.

        Returns:
            List, without duplicate rows, each of which is a step to Keras.
        """
        is_at_server = self._head_sums is not None
        if is_at_server and self._head_sums.is_tail:
            is_at_server = False  # these are of the tail
            self._head_sums.serve()
        gradients = [slices.merged(gradient) for gradient in gradients]
        if self._peers.size == 1:
            return gradients
        sent, others = [], []
        for place, gradient in enumerate(gradients):
            if gradient is not None and not self._are_spread[place]:
                is_of_rows = isinstance(gradient, tf.IndexedSlices)
                is_sent = is_at_server and not is_of_rows
                (sent if is_sent else others).append(place)
        sums = self._all_reduced([gradients[place] for place in others])
        if self._are_alike:
            sums = [_times(each, 1 / self._peers.size) for each in sums]
        if is_at_server:
            sums += self._head_sums.summed([gradients[place] for place in sent])
        found = dict(zip([*others, *sent], sums, strict=True))
        return [
            slices.merged(found.get(i, gradient))
            for i, gradient in enumerate(gradients)
        ]

    @staticmethod
    def _all_reduced(gradients):
        if not gradients:
            return []
        # The replicas of the rank's strategy are the ranks of its stage.
        return tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, gradients
        )

    def total(self, loss):
        """The sum of a float32 scalar over the ranks of this stage."""
        if self._peers.size == 1 or self._are_alike:
            return loss
        (loss,) = self._peers.all_reduce([loss], name="pipeline/loss")
        return loss

    def whole(self, parts, numbers, in_order=lambda rows: rows):
        """An output for the whole batch, without stand-ins.

        With its mask and logits, and as a loss takes it that knows the layer.

        Args:
            parts: list of the outputs of this rank, which carry these.
            numbers: list of int32 scalars, the numbers of their examples.
            in_order: function of all ranks' rows, in rank order, that gives
                them in the order of the batch.
        """
        whole = in_order(self._of_peers(parts, numbers))
        for carried, set_carried in [
            (keras_losses.keras_mask, keras_losses.set_keras_mask),
            (keras_losses.keras_logits, keras_losses.set_keras_logits),
        ]:
            of_parts = list(map(carried, parts))
            if of_parts[0] is not None:
                of_whole = in_order(self._of_peers(of_parts, numbers))
                set_carried(whole, of_whole)
        sampled_softmax_loss.pass_on(parts[0], whole)
        return whole

    def _of_peers(self, parts, numbers):
        parts = [
            part[:number] for part, number in zip(parts, numbers, strict=True)
        ]
        own = tf.concat(parts, 0)
        if self._peers.size == 1 or self._are_alike:
            return own
        return self._peers.all_gather(own, name="pipeline/outputs")

    def combine_statistics(self, model, num_examples):
        """Gives a stage's ranks the mean of their moving statistics."""
        if self._peers.size > 1:
            empty_parts.combine_statistics(model, num_examples, self._peers)

    def agreed(self, gradients):
        """Gradients with which each rank's optimizer decides as one for all.

        Args:
            gradients: list, as `summed` returns it.

        Returns:
            Where the loss is scaled and any rank's gradients are not finite:
            gradients that are not. Else gradients whose norm over all ranks is
            at most `global_clipnorm`, so that clipping a rank's by themselves
            changes nothing.
        """
        if not (self._may_skip or self._largest_norm):
            return gradients
        scale = self.scaled(tf.ones([]))
        num_bad, squares = [tf.zeros([])], [tf.zeros([])]
        for gradient, is_spread in zip(
            gradients, self._are_spread, strict=True
        ):
            if gradient is None:
                continue
            values = getattr(gradient, "values", gradient)
            values = tf.cast(values, tf.float32)
            num_bad.append(tf.reduce_sum(_is_bad(values)))
            square = tf.reduce_sum(tf.square(values / scale))
            # Of others all ranks of a stage have the same gradients.
            squares.append(square if is_spread else square / self._peers.size)
        num_bad, squares = self._collectives.all_reduce(
            [tf.add_n(num_bad), tf.add_n(squares)], name="pipeline/norm"
        )
        factor = tf.ones([])
        if self._largest_norm:
            factor = self._largest_norm / tf.maximum(
                tf.sqrt(squares), self._largest_norm
            )
        if self._may_skip:
            factor = tf.where(num_bad > 0, float("nan"), factor)
        return [
            gradient if gradient is None else _times(gradient, factor)
            for gradient in gradients
        ]


def _is_bad(values):
    return tf.cast(~tf.math.is_finite(values), tf.float32)


def _times(gradient, factor):
    return slices.mapped(
        lambda values: values * tf.cast(factor, values.dtype), gradient
    )
