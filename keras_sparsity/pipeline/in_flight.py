"""Training steps without a flush: several mini-batches are in flight."""

import tensorflow as tf

from keras_sparsity._tf import keras_functional, keras_losses
from keras_sparsity.global_batch import loss_scale
from keras_sparsity.pipeline.flushed import added, operations
from keras_sparsity.pipeline.late_logs import LateLogs
from keras_sparsity.pipeline.micro_batches import MicroBatches
from keras_sparsity.pipeline.stage import Pass, floats
from keras_sparsity.pipeline.store import Store
from keras_sparsity.pipeline.waiting import Waiting


class InFlight:
    """Training steps of a stage; each is one turn of the pipeline.

    In turn t, stage k of N runs the forward passes of mini-batch t, then the
    backward passes of mini-batch t - (N - 1 - k), which the stage behind has
    run in its turn t - 1: one of each for each of M micro-batches, all with
    the same weights, and one update. Messages of a micro-batch travel while
    the next one is computed. Gradients leave a stage in the turn after, so
    that no message is under way between turns. A backward pass computes the
    layers again, with its own weights. Of each micro-batch a rank computes its
    own pieces; a stage's gradients are summed over its ranks.

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
        strategy = model.distribute_strategy
        self._num_parts = strategy.num_micro_batches
        self._num_pieces, own = strategy.pieces
        # This rank's pieces of each micro-batch.
        self._places = [
            range(first + own.start, first + own.stop)
            for first in range(
                0, self._num_parts * self._num_pieces, self._num_pieces
            )
        ]
        self._num_stages, self._objective = num_stages, objective
        self._logs, self._versions = logs, versions
        self._num_ahead = num_stages - 1 - stage.number
        part = stage.part.model
        weights = {id(variable) for variable in part.weights}
        # Those of random generators: layers that are computed again draw the
        # same numbers again.
        self._states = [v for v in part.variables if id(v) not in weights]
        self._functional = keras_functional.functional_of(model)
        self._waiting = [
            Waiting(stage, self._functional, self._states, self._num_ahead)
            for _ in self._places
        ]
        self._kept = None  # before the first pass
        self._arrived = Store(1, self._waiting[0].message)
        self._late_logs = LateLogs(stage.number)
        with tf.init_scope():
            self._turn = tf.Variable(0, trainable=False)
        self._draining_turn = tf.function(
            lambda: strategy.run(self._turn_of_drain)
        )

    def train(self, data):
        """A turn, traced.

        Args:
            data: a batch, as `train_step` gets it.

        Returns:
            float32 vector of the logs of N - 1 turns ago, on all ranks alike.
        """
        stage = self._stage
        batches = MicroBatches(
            self._functional, data, self._num_parts, self._num_pieces
        )
        arrived = self._receive(batches)
        self._send_results()
        if stage.is_last:
            row = self._both_passes(batches, arrived)
        else:
            is_full = self._turn >= self._num_ahead
            if not tf.executing_eagerly():
                # They arrive during the forward passes.
                messages = self._gradients_of_behind(is_full)
            row, outputs = self._forward(batches, arrived)
            if tf.executing_eagerly():
                # The stage behind sends them when it has these passes' outputs.
                messages = self._gradients_of_behind(is_full)
            # What the stage behind waits for is computed first.
            with tf.control_dependencies(outputs):
                row = tf.cond(
                    is_full,
                    lambda: self._backward(messages, None),
                    lambda: row,
                )
        self._turn.assign_add(1)
        self._together.combine_statistics(
            stage.part.model, tf.add_n(self._numbers(batches))
        )
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
        num_passes = min(turn, self._num_ahead)
        has_result = turn > self._num_ahead and not self._stage.is_first
        is_whole = not int(self._arrived.size) and all(
            each.holds(num_passes, has_result) for each in self._waiting
        )
        if self._kept is not None:
            is_whole = is_whole and int(self._kept.size) == num_passes
        return turn if is_whole else -1

    def clear(self):
        """Forgets the mini-batches in flight; eagerly."""
        for each in self._waiting:
            each.clear()
        if self._kept is not None:
            self._kept.clear()
        self._arrived.clear()
        self._late_logs.clear()
        self._turn.assign(0)

    def _numbers(self, batches):
        return [batches.number(place) for place in self._places]

    def _receive(self, batches):
        """List of each micro-batch's `(received tensors, loss so far)`."""
        arrived, earlier = [], []
        for place in self._places:
            # One after the other: together, the first one would be as late as
            # the last one.
            with tf.control_dependencies(earlier):
                received, loss = self._stage.receive(batches.size(place), place)
            earlier = operations([*received, loss])
            arrived.append((received, loss))
        return arrived

    def _turn_of_drain(self):
        self._send_results()
        if not self._stage.is_last:
            # As in a step, the sum over ranks combines their parts.
            with loss_scale.of_own_part():
                tf.cond(
                    (self._turn >= self._num_ahead)
                    & (self._waiting[0].passes.size > 0),
                    self._drained,
                    lambda: tf.zeros([self._logs.size]),
                )
        self._turn.assign_add(1)

    def _send_results(self):
        """Sends the gradients and logs of the turn before."""
        if self._stage.is_first:
            return
        for waiting in self._waiting:
            tf.cond(
                waiting.results.size > 0, waiting.send_result, lambda: False
            )

    def _gradients_of_behind(self, is_full):
        """List of each micro-batch's message: the oldest mini-batch's.

        Args:
            is_full: whether there is one; else the tensors are empty.
        """
        messages, earlier = [], []
        for waiting in self._waiting:
            with tf.control_dependencies(earlier):
                message = tf.cond(
                    is_full,
                    lambda waiting=waiting: waiting.receive_gradients(
                        self._logs.size
                    ),
                    waiting.no_gradients,
                )
            earlier = operations(message)
            messages.append(message)
        return messages

    def _forward(self, batches, arrived):
        """The forward passes.

        Returns:
            The logs that this stage can tell, and operations that make the
            last outputs.
        """
        weights = self._versions.forward(
            tf.minimum(self._turn, self._num_ahead)
        )
        earlier = []
        for place, waiting, arriving in zip(
            self._places, self._waiting, arrived, strict=True
        ):
            # In this order: the stage behind waits for the first one.
            with tf.control_dependencies(earlier):
                outputs = self._forward_of(
                    batches, place, waiting, weights, *arriving
                )
            earlier = operations(outputs)
        self._keep(weights)
        return self._logs.of_batch(None, batches, None), earlier

    def _keep(self, weights):
        """Keeps the weights that the mini-batch's backward passes need."""
        kept = self._versions.kept(weights)
        if not kept:
            return
        if self._kept is None:
            # Of looked-up rows, each mini-batch has another number.
            num_whole = len(weights.tensors)
            specs = [
                tf.TensorSpec(
                    each.shape
                    if place < num_whole
                    else [None, *each.shape[1:]],
                    each.dtype,
                )
                for place, each in enumerate(kept)
            ]
            self._kept = Store(self._num_ahead + 1, specs)
        self._kept.put(kept)

    def _forward_of(self, batches, place, waiting, weights, received, loss):
        """The forward pass of a micro-batch; returns its outputs."""
        stage = self._stage
        inputs, *labels = batches.part(place)
        share = batches.share(place)
        states = [tf.convert_to_tensor(v.value) for v in self._states]
        with weights.given() as scope:
            outputs, losses = stage.compute(inputs, received, True)
        own = self._objective.of_training(labels, outputs, losses, share)
        self._assign_updates(scope)
        stage.send(outputs, loss if own is None else loss + own)
        waiting.put_pass(inputs, received, states, share)
        waiting.put_sizes(batches.size(place), outputs)
        return outputs

    def _backward(self, messages, num_later):
        """The oldest mini-batch's backward passes; returns its logs."""
        kept = [] if self._kept is None else self._kept.take()
        weights = self._versions.backward(kept, num_later)
        sums, results, earlier = None, [], []
        for waiting, message in zip(self._waiting, messages, strict=True):
            with tf.control_dependencies(earlier):
                inputs, received, states, share = waiting.take_pass()
                found, _ = self._computed(
                    inputs, None, received, share, weights, states
                )
            earlier = operations(found.outputs)
            self._arrived.put(message)
            # The weights are read before gradients can update them. A store
            # keeps this order: TensorFlow's graph optimizer drops the
            # dependency of an update on a read where it first finds a path by
            # a shape between them, and then takes the shape for a constant.
            with tf.control_dependencies(found.outputs):
                *upstream, row = self._arrived.take()
            gradients, of_received = found.gradients(upstream)
            sums = added(sums, gradients)
            results.append(of_received)
        self._finish(sums, results, row)
        return tf.ensure_shape(row, [self._logs.size])

    def _drained(self):
        """Backward passes while the pipeline empties; returns their logs."""
        messages = [
            each.receive_gradients(self._logs.size) for each in self._waiting
        ]
        return self._backward(messages, self._waiting[0].passes.size - 1)

    def _both_passes(self, batches, arrived):
        """The last stage's turn: its passes have the same weights."""
        weights = self._versions.forward(0)
        sums, results, parts, earlier = None, [], [], []
        total = tf.zeros([])
        for place, (received, loss) in zip(self._places, arrived, strict=True):
            inputs, *labels = batches.part(place)
            with tf.control_dependencies(earlier):
                found, own = self._computed(
                    *(inputs, labels, received, batches.share(place)),
                    *(weights, None),
                )
                gradients, of_received = found.gradients([])
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

    def _whole(self, batches, parts):
        """The outputs for the whole batch.

        Args:
            batches: `MicroBatches`.
            parts: list of those of each micro-batch, lists.
        """
        width = len(self._places[0])
        return [
            self._together.whole(
                each,
                self._numbers(batches),
                lambda rows: batches.in_order(rows, width),
            )
            for each in zip(*parts, strict=True)
        ]

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

    def _finish(self, gradients, results, row):
        """Updates the weights; keeps the messages to the stage before."""
        gradients = self._together.summed(gradients)
        strategy = self._model.distribute_strategy
        updating = self._versions.updating(gradients)
        with updating, strategy.gradients_summed():
            self._stage.updates.apply(gradients)
        if not self._stage.is_first:
            for waiting, of_received in zip(
                self._waiting, results, strict=True
            ):
                waiting.results.put([*of_received, row])

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
