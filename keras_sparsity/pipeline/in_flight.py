"""Training steps without a flush: several mini-batches are in flight."""

import tensorflow as tf

from keras_sparsity._tf import keras_functional, keras_losses
from keras_sparsity.global_batch import loss_scale
from keras_sparsity.pipeline.late_logs import LateLogs
from keras_sparsity.pipeline.micro_batches import MicroBatches
from keras_sparsity.pipeline.stage import Pass, floats
from keras_sparsity.pipeline.store import Store


class InFlight:
    """Training steps of a stage; each is one turn of the pipeline.

    In turn t, stage k of N runs the forward pass of mini-batch t, then the
    backward pass of mini-batch t - (N - 1 - k), which the stage behind has run
    in its turn t - 1. Gradients leave a stage in the turn after, so that no
    message is under way between turns. A backward pass computes the layers
    again, with its own weights. Of each mini-batch a rank computes its own
    pieces; a stage's gradients are summed over its ranks.

    Args:
        model: the whole model.
        stage: this rank's `Stage`.
        num_stages: N.
        objective: `Objective`.
        logs: `Logs`.
        versions: `Versions` of the stage.
        together: `Together`.

    References:
        SpecTrain (arXiv:1809.02839), 3; PipeDream (arXiv:1806.03377), 3.2.
    """

    def __init__(
        self, model, stage, num_stages, objective, logs, versions, together
    ):
        self._model, self._stage = model, stage
        self._together = together
        self._num_pieces, self._own = model.distribute_strategy.pieces
        self._num_stages, self._objective = num_stages, objective
        self._logs, self._versions = logs, versions
        self._num_ahead = num_stages - 1 - stage.number
        part = stage.part.model
        weights = {id(variable) for variable in part.weights}
        # Those of random generators: layers that are computed again draw the
        # same numbers again.
        self._states = [v for v in part.variables if id(v) not in weights]
        self._functional = keras_functional.functional_of(model)
        self._passes = None  # before the first one
        received = floats(stage.received.specs[: len(stage.part.received)])
        self._results = Store(1, [*received, tf.TensorSpec([None])])
        # The numbers of examples, and unknown sizes, of the sent tensors.
        self._sizes = Store(
            self._num_ahead + 1, [tf.TensorSpec([None], tf.int32)]
        )
        # A message of the stage behind.
        self._arrived = Store(
            1, [*self._floats_sent, tf.TensorSpec([None], tf.float32)]
        )
        self._late_logs = LateLogs(stage.number)
        with tf.init_scope():
            self._turn = tf.Variable(0, trainable=False)
        self._draining_turn = tf.function(
            lambda: model.distribute_strategy.run(self._turn_of_drain)
        )

    def train(self, data):
        """A turn, traced.

        Args:
            data: a batch, as `train_step` gets it.

        Returns:
            float32 vector of the logs of N - 1 turns ago, on all ranks alike.
        """
        stage, own = self._stage, self._own
        batches = MicroBatches(self._functional, data, 1, self._num_pieces)
        received, loss = stage.receive(batches.size(own), own)
        self._send_result()
        if stage.is_last:
            row = self._both_passes(batches, received, loss)
        else:
            is_full = self._turn >= self._num_ahead
            if not tf.executing_eagerly():
                # They arrive during the forward pass.
                tf.cond(is_full, self._await_gradients, lambda: False)
            row = self._forward(batches, received, loss)
            if tf.executing_eagerly():
                # The stage behind sends them when it has this pass's outputs.
                tf.cond(is_full, self._await_gradients, lambda: False)
            row = tf.cond(is_full, lambda: self._backward(None), lambda: row)
        self._turn.assign_add(1)
        self._together.combine_statistics(stage.part.model, batches.number(own))
        return self._late_logs.push(row)

    def drain(self):
        """Runs the backward passes of all mini-batches; eagerly.

        Every rank calls it, after the same number of turns.
        """
        if not int(self._turn):
            return
        for _ in range(self._num_stages - 1):
            self._draining_turn()
        self.clear()

    @property
    def num_turns(self):
        """The number of turns since the last drain.

        -1 if a step has failed midway.
        """
        turn = int(self._turn)
        num_passes = int(self._passes.size) if self._passes else 0
        has_result = turn > self._num_ahead and not self._stage.is_first
        is_whole = (
            num_passes == int(self._sizes.size) == min(turn, self._num_ahead)
            and int(self._results.size) == has_result
            and not int(self._arrived.size)
        )
        return turn if is_whole else -1

    def clear(self):
        """Forgets the mini-batches in flight; eagerly."""
        if self._passes:
            self._passes.clear()
        self._results.clear()
        self._sizes.clear()
        self._arrived.clear()
        self._late_logs.clear()
        self._turn.assign(0)

    def _turn_of_drain(self):
        self._send_result()
        if not self._stage.is_last:
            # As in a step, the sum over ranks combines their parts.
            with loss_scale.of_own_part():
                tf.cond(
                    (self._turn >= self._num_ahead) & (self._passes.size > 0),
                    self._drained,
                    lambda: tf.zeros([self._logs.size]),
                )
        self._turn.assign_add(1)

    def _send_result(self):
        """Sends the gradients and logs of the turn before."""
        if self._stage.is_first:
            return

        def send():
            *gradients, row = self._results.take()
            self._stage.before.send_gradients(gradients, [row])
            return True

        tf.cond(self._results.size > 0, send, lambda: False)

    def _await_gradients(self):
        """Keeps the message of the stage behind: the oldest mini-batch's."""
        (sizes,) = self._sizes.take()
        sent = self._stage.sent
        shapes = sent.shapes(sizes[0], sizes[1:])
        like = [
            tf.ensure_shape(tf.zeros(shape, spec.dtype), spec.shape)
            for shape, spec in zip(shapes, sent.specs, strict=True)
        ]
        self._arrived.put(
            self._stage.behind.receive_gradients(
                floats(like[: len(sent.tensors)]), [tf.zeros([self._logs.size])]
            )
        )
        return True

    @property
    def _floats_sent(self):
        """`tf.TensorSpec`s of the sent tensors that have gradients."""
        sent = self._stage.sent
        return floats(sent.specs[: len(sent.tensors)])

    def _forward(self, batches, received, loss):
        """A forward pass; returns the logs that this stage can tell."""
        stage = self._stage
        inputs, *labels = batches.part(self._own)
        share = batches.share(self._own)
        weights = self._versions.forward(
            tf.minimum(self._turn, self._num_ahead)
        )
        states = [tf.convert_to_tensor(v.value) for v in self._states]
        with weights.given() as scope:
            outputs, losses = stage.compute(inputs, received, True)
        own = self._objective.of_training(labels, outputs, losses, share)
        self._assign_updates(scope)
        stage.send(outputs, loss if own is None else loss + own)
        sizes = stage.sent.unknown_sizes(stage.sent.with_masks(outputs))
        number = batches.size(self._own)[None]
        self._sizes.put(
            [number if sizes is None else tf.concat([number, sizes], 0)]
        )
        kept = self._versions.kept(weights)
        self._store_of_passes(kept).put(
            [
                *(inputs[place] for place in stage.part.inputs),
                *stage.received.with_masks(received),
                *states,
                *kept,
                share,
            ]
        )
        return self._logs.of_batch(None, batches, None)

    def _backward(self, num_later):
        """The oldest mini-batch's backward pass; returns its logs."""
        inputs, received, states, kept, share = self._taken()
        weights = self._versions.backward(kept, num_later)
        found, _ = self._computed(
            inputs, None, received, share, weights, states
        )
        # The weights are read before gradients can update them. A store keeps
        # this order: TensorFlow's graph optimizer drops the dependency of an
        # update on a read where it first finds a path by a shape between them,
        # and then takes the shape for a constant.
        with tf.control_dependencies(found.outputs):
            *upstream, row = self._arrived.take()
        self._finish(found, upstream, row)
        return tf.ensure_shape(row, [self._logs.size])

    def _drained(self):
        """A backward pass while the pipeline empties; returns its logs."""
        self._await_gradients()
        return self._backward(self._passes.size - 1)

    def _both_passes(self, batches, received, loss):
        """The last stage's turn: its passes have the same weights."""
        own_pieces, together = self._own, self._together
        inputs, *labels = batches.part(own_pieces)
        weights = self._versions.forward(0)
        found, own = self._computed(
            inputs, labels, received, batches.share(own_pieces), weights, None
        )
        row = self._logs.of_batch(
            together.total(loss + own),
            batches,
            lambda: [
                together.whole([output], [batches.number(own_pieces)])
                for output in found.outputs
            ],
        )
        self._finish(found, [], row)
        return row

    def _computed(self, inputs, labels, received, share, weights, states):
        """A recorded `Pass` and its loss; with `states`, of one made again."""
        stage = self._stage
        others = []
        if states is not None:
            others = zip(self._states, states, strict=True)
        with tf.GradientTape() as tape:
            tape.watch([*weights.tensors, *floats(received)])
            with weights.given(others) as scope:
                outputs, losses = stage.compute(inputs, received, True)
            own = self._objective.of_training(labels, outputs, losses, share)
            to_derive = own
            if own is not None:
                to_derive = self._together.scaled(own)
        if states is None:
            self._assign_updates(scope)
        return Pass(tape, weights.values, received, outputs, to_derive), own

    def _finish(self, found, upstream, row):
        """Updates the weights; keeps the message to the stage before."""
        gradients, of_received = found.gradients(upstream)
        gradients = self._together.summed(gradients)
        strategy = self._model.distribute_strategy
        updating = self._versions.updating(gradients)
        with updating, strategy.gradients_summed():
            self._stage.updates.apply(gradients)
        if not self._stage.is_first:
            self._results.put([*of_received, row])

    def _store_of_passes(self, kept):
        """The `Store` of the passes in flight, made for the first one.

        Args:
            kept: list, as `Versions.kept` returns it.
        """
        if self._passes is None:
            part = self._stage.part
            inputs = [self._functional.inputs[i] for i in part.inputs]
            self._passes = Store(
                self._num_ahead + 1,
                [
                    *map(_spec, inputs),
                    *self._stage.received.specs,
                    *map(_spec, self._states),
                    *map(_spec, kept),
                    tf.TensorSpec([]),
                ],
            )
        return self._passes

    def _assign_updates(self, scope):
        """Statistics, random states and losses by output, as they changed."""
        losses = keras_losses.loss_metrics(self._model)
        for variable in [
            *self._stage.part.model.non_trainable_variables,
            *(v for metric in losses for v in metric.variables),
        ]:
            value = scope.get_current_value(variable)
            if value is not None:
                variable.assign(value)

    def _taken(self):
        """The oldest entry: `(inputs, received, states, kept, share)`."""
        stage = self._stage
        values = iter(self._passes.take())
        inputs = {place: next(values) for place in stage.part.inputs}
        received = stage.received.without_masks(
            [next(values) for _ in stage.received.specs]
        )
        states = [next(values) for _ in self._states]
        *kept, share = values
        return inputs, received, states, kept, share


def _spec(tensor):
    return tf.TensorSpec(tensor.shape, tensor.dtype)
