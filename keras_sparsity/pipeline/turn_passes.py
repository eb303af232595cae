"""The passes of a turn, without a flush: of all of a rank's micro-batches."""

import contextlib

import keras
import tensorflow as tf

from keras_sparsity._tf import (
    custom_gradients,
    keras_functional,
    keras_models,
    tf_graphs,
)
from keras_sparsity.pipeline.flushed import added, operations
from keras_sparsity.pipeline.micro_batches import MicroBatches
from keras_sparsity.pipeline.stage import Pass, floats
from keras_sparsity.pipeline.store import Store
from keras_sparsity.pipeline.waiting import Waiting


class TurnPasses:
    """Runs a stage's passes, all of a mini-batch with the same weights.

    A backward pass computes the layers again, with its own weights. Of each
    micro-batch a rank computes its own pieces; a stage's gradients are summed
    over its ranks.

    Attributes:
        places: list of this rank's pieces of each micro-batch, ranges.
        waiting: list of the `Waiting` of each micro-batch.
    """

    def __init__(
        self, model, stage, objective, logs, versions, together, mixing
    ):
        self._model, self._stage = model, stage
        self._together, self._mixing = together, mixing
        strategy = model.distribute_strategy
        self._num_parts = strategy.num_micro_batches
        self._num_pieces, own = strategy.pieces
        self.places = [
            range(first + own.start, first + own.stop)
            for first in range(
                0, self._num_parts * self._num_pieces, self._num_pieces
            )
        ]
        self._objective = objective
        self._logs, self._versions = logs, versions
        self._unread = _unread(stage.part.model)
        # The others that forward passes assign, known from the first one.
        # Layers that are computed again draw the same random numbers again.
        self._changed = []
        self._functional = keras_functional.functional_of(model)
        self.waiting = [
            Waiting(stage, self._functional, versions.turns)
            for _ in self.places
        ]
        self._kept = None  # before the first pass
        self._arrived = Store(self.waiting[0].message)

    def batches(self, data):
        """The `MicroBatches` of a batch, as `train_step` gets it."""
        return MicroBatches(
            self._functional, data, self._num_parts, self._num_pieces
        )

    def combine_statistics(self, batches):
        """Gives a stage's ranks the same moving statistics."""
        self._together.combine_statistics(
            self._stage.part.model, tf.add_n(self._numbers(batches))
        )

    def holds(self, turn):
        """Whether all stores have their entries after so many turns."""
        return all(each.holds(turn) for each in self._stores)

    def clear(self):
        """Forgets the mini-batches in flight; eagerly."""
        for each in self._stores:
            each.clear()

    @property
    def _stores(self):
        kept = [] if self._kept is None else [self._kept]
        return [*self.waiting, *kept, self._arrived]

    def forward(self, batches, arrived, send, *distance):
        """The forward passes.

        Args:
            batches: `MicroBatches`.
            arrived: list of each micro-batch's `(received tensors, loss)`.
            send: function of a micro-batch's `Waiting`, outputs and loss.
            distance: arguments of `Versions.forward`.

        Returns:
            The operations that make the last outputs.
        """
        weights = self._versions.forward(*distance)
        earlier, states = [], []
        for place, waiting, arriving in zip(
            self.places, self.waiting, arrived, strict=True
        ):
            # In this order: the stage behind waits for the first one.
            with tf.control_dependencies(earlier):
                outputs, before = self._forward_of(
                    batches, place, waiting, weights, *arriving, send
                )
            earlier = operations(outputs)
            states += before
        self._keep(states, weights)
        custom_gradients.forget_with(self._model)
        return earlier

    def _keep(self, states, weights):
        """Keeps what the mini-batch's backward passes need.

        Args:
            states: list of the values of `_changed` before each forward pass.
            weights: the `Weights` of these passes.
        """
        kept = [*states, *self._versions.kept(weights)]
        if not kept:
            return
        if self._kept is None:
            # Of looked-up rows, each mini-batch has another number.
            num_whole = len(states) + len(weights.tensors)
            specs = [
                tf.TensorSpec(
                    each.shape
                    if place < num_whole
                    else [None, *each.shape[1:]],
                    each.dtype,
                )
                for place, each in enumerate(kept)
            ]
            turns, number = self._versions.turns, self._stage.number
            self._kept = Store(
                specs, turns.forward(number), turns.backward(number)
            )
        self._kept.put(kept)

    def _forward_of(
        self, batches, place, waiting, weights, received, loss, send
    ):
        """The forward pass of a micro-batch.

        Returns:
            Its outputs, and list of the values of `_changed` before it.
        """
        stage = self._stage
        inputs, *labels = batches.part(place)
        share, number = batches.share(place), self._counted(batches, place)
        first = tf_graphs.num_operations()
        # Layers may take masks away, which the backward pass needs again.
        arrived = stage.received.with_masks(received)
        passing = self._passing(number, inputs, received)
        with weights.given() as scope, passing:
            outputs, losses = stage.compute(inputs, received, True)
        _check_draws(tf_graphs.drawing_operations(first))
        own = self._objective.of_training(labels, outputs, losses, share)
        self._changed = [
            v for v in scope.variables if id(v) not in self._unread
        ]
        before = [tf.convert_to_tensor(v.value) for v in self._changed]
        _assign_updates(scope, batches.is_empty(place))
        send(waiting, outputs, loss if own is None else loss + own)
        waiting.put_pass(inputs, arrived, share, number)
        waiting.put_sizes(batches.size(place), outputs)
        return outputs, before

    def backward(self, messages, num_later):
        """The oldest mini-batch's backward passes; returns its logs.

        Args:
            messages: list of the messages of the stage behind, of each
                micro-batch.
            num_later: see `Versions.backward`.
        """
        kept = [] if self._kept is None else self._kept.take()
        before = [[kept.pop(0) for _ in self._changed] for _ in self.waiting]
        weights = self._versions.backward(kept, num_later)
        sums, results, earlier = None, [], []
        for waiting, message, others in zip(
            self.waiting, messages, before, strict=True
        ):
            with tf.control_dependencies(earlier):
                inputs, received, share, number = waiting.take_pass()
                given = zip(self._changed, others, strict=True)
                found, *_ = self._computed(
                    inputs, None, received, share, number, weights, given
                )
            earlier = operations(found.outputs)
            self._arrived.put(message)
            # The weights are read before gradients can update them. A store
            # keeps this order: TensorFlow's graph optimizer drops the
            # dependency of an update on a read where it first finds a path by
            # a shape between them, and then takes the shape for a constant.
            with tf.control_dependencies(found.outputs):
                *upstream, row = self._arrived.take()
            gradients, of_received = self._together.gradients(
                found, upstream, number
            )
            sums = added(sums, gradients)
            results.append(of_received)
        self._finish(sums, results, row)
        return tf.ensure_shape(row, [self._logs.size])

    def both(self, batches, arrived, num_later=None):
        """The last stage's passes, with the same weights; returns the logs.

        Args:
            batches, arrived: as for `forward`.
            num_later: see `Versions.backward`.
        """
        weights = self._versions.forward(0, num_later)
        sums, results, parts, earlier = None, [], [], []
        total = tf.zeros([])
        for place, (received, loss) in zip(self.places, arrived, strict=True):
            inputs, *labels = batches.part(place)
            number = self._counted(batches, place)
            with tf.control_dependencies(earlier):
                found, own, scope = self._computed(
                    *(inputs, labels, received, batches.share(place)),
                    *(number, weights, ()),
                )
                _assign_updates(scope, batches.is_empty(place))
                gradients, of_received = self._together.gradients(
                    found, [], number
                )
            made = [each for each in gradients if each is not None]
            earlier = operations([*made, *of_received])
            sums = added(sums, gradients)
            results.append(of_received)
            parts.append(found.outputs)
            total += loss + own
        row = self._logs.of_batch(
            self._together.total(total),
            batches,
            lambda: self._whole(batches, parts),
        )
        self._finish(sums, results, row)
        return row

    def _numbers(self, batches):
        return [batches.number(place) for place in self.places]

    def _whole(self, batches, parts):
        """The outputs for the whole batch.

        Args:
            batches: `MicroBatches`.
            parts: list of those of each micro-batch, lists.
        """
        width = len(self.places[0])
        return [
            self._together.whole(
                each,
                self._numbers(batches),
                lambda rows: batches.in_order(rows, width),
            )
            for each in zip(*parts, strict=True)
        ]

    def _counted(self, batches, place):
        """See `Together.counted`."""
        first = self.places[0].start
        return self._together.counted(batches, place, first)

    @contextlib.contextmanager
    def _passing(self, number, *given):
        """Context of a pass of the layers, which are given such tensors."""
        with self._together.counting(number), self._looked_for(*given):
            yield

    def _looked_for(self, *given):
        is_part = len(self.places[0]) < self._num_parts * self._num_pieces
        return self._mixing.looked_for(given if is_part else [])

    def _computed(
        self, inputs, labels, received, share, number, weights, others
    ):
        """A recorded `Pass`, its loss, and the scope of `Weights.given`."""
        stage = self._stage
        with tf.GradientTape() as tape:
            tape.watch([*weights.tensors, *floats(received)])
            passing = self._passing(number, inputs, received)
            with weights.given(others) as scope, passing:
                outputs, losses = stage.compute(inputs, received, True)
            with self._looked_for(labels, outputs):
                own = self._objective.of_training(
                    labels, outputs, losses, share
                )
            to_derive = own
            if own is not None:
                to_derive = self._together.scaled(own)
        made = Pass(tape, weights.values, received, outputs, to_derive)
        return made, own, scope

    def _finish(self, gradients, results, row):
        """Updates the weights; keeps the messages to the stage before."""
        gradients = self._together.summed(gradients)
        strategy = self._model.distribute_strategy
        updating = self._versions.updating(gradients)
        with updating, strategy.gradients_summed():
            self._stage.updates.apply(gradients)
        if not self._stage.is_first:
            for waiting, of_received in zip(self.waiting, results, strict=True):
                waiting.results.put([*of_received, row])
        custom_gradients.forget_with(self._model)


def _check_draws(operations):
    if operations:
        raise ValueError(
            "Without a flush a backward pass computes the layers again, and "
            "operations of `tf.random` would draw other numbers then. "
            f"Received: {operations[0].type} '{operations[0].name}'. Use "
            "`keras.random`, whose draws are repeated, or the schedule "
            '"1f1b" or "gpipe".'
        )


def _assign_updates(scope, is_empty):
    """Statistics, random states, and what metrics have counted.

    Not by a micro-batch without examples.
    """
    for variable in scope.variables:
        value = scope.get_current_value(variable)
        if is_empty is not False:
            value = tf.where(is_empty, variable.value, value)
        variable.assign(value)


def _unread(part):
    """The `id`s of variables that a training pass does not read.

    Moving statistics, and what the layers' metrics have counted.
    """
    statistics = [
        variable
        for layer in keras_models.all_layers(part)
        if type(layer) is keras.layers.BatchNormalization
        and not getattr(layer, "renorm", False)  # which reads them
        for variable in layer.non_trainable_variables
    ]
    return {id(v) for v in [*statistics, *part.metrics_variables]}
