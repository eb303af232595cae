"""The plan of a model in stages, measured before it is trained."""

import collections
import dataclasses
import math

import keras
import tensorflow as tf

from keras_sparsity._tf import (
    custom_gradients,
    keras_functional,
    keras_optimizers,
    keras_variables,
    patches,
)
from keras_sparsity.board.stage_plan import PipelinePlan, StageCost
from keras_sparsity.layers import ordinary
from keras_sparsity.pipeline.memory import (
    lasting_bytes,
    num_passes,
    passing_bytes,
    with_all_outputs,
)
from keras_sparsity.pipeline.micro_batches import MicroBatches
from keras_sparsity.pipeline.stage import floats
from keras_sparsity.planning.transfer_cost import narrowest_index
from keras_sparsity.stages import timing
from keras_sparsity.stages.attempts import attempted
from keras_sparsity.stages.profile import num_bytes
from keras_sparsity.stages.simulation import simulate

# Passes of a stage are measured for so long, or for so many of the longest.
_MOST_SECONDS, _NUM_RUNS = 0.5, 20


class Planner:
    """Measures a model's stages on a real mini-batch; no variable changes.

    Args:
        schedule: the `Schedule` of a mini-batch's micro-batches.
        versions: `Versions`, for training without a flush; else None.
    """

    def __init__(self, model, stage, schedule, versions):
        self._model, self._stage = model, stage
        self._schedule, self._versions = schedule, versions
        self._turns = versions and versions.turns
        self._strategy = model.distribute_strategy
        # Of a rank.
        self._num_passes = num_passes(self._strategy, schedule, versions)

    def plan(self, batch):
        """The `PipelinePlan`, the same on all ranks; every rank calls it.

        Raises:
            AttemptError: on all ranks, if a stage's pass fails on one.
        """
        tensors, num_examples = self._arriving(batch)
        ranks, passes = self._strategy.collectives, []

        def trace():
            passes.extend(self._traced_passes(tensors))
            return max(timing.lasting_seconds(*each, 0) for each in passes)

        # All compute at once then, as in training: those of a machine share its
        # caches and its memory.
        longest = max(attempted(ranks, trace, "pipeline/traced_passes"))
        seconds = min(_MOST_SECONDS, _NUM_RUNS * longest)
        of_ranks = attempted(
            ranks, lambda: self._cost(tensors, passes, seconds), "pipeline/plan"
        )
        costs = [
            _largest([of_ranks[r] for r in self._strategy.ranks_of(stage)])
            for stage in range(self._schedule.num_stages)
        ]
        return PipelinePlan(
            schedule=self._strategy.schedule,
            num_examples=num_examples,
            num_micro_batches=self._num_passes,
            replicas=self._strategy.replicas,
            step_seconds=self._step_seconds(costs),
            stages=tuple(costs),
        )

    def _arriving(self, data):
        """The tensors that a micro-batch's passes take, and a batch's examples.

        `(tensors, number)`: the stage's inputs, then received tensors.
        """
        stage = self._stage
        functional = keras_functional.functional_of(self._model)

        @tf.function(autograph=False)
        def forward():
            return self._strategy.run(run)

        def run():
            batches, own = self._batches(functional, data)
            inputs, *_ = batches.part(own)
            received, loss = stage.receive(batches.size(own), own)
            arrived = stage.received.with_masks(received)
            outputs, _ = stage.compute(inputs, received, False)
            stage.send(outputs, loss)
            taken = [inputs[place] for place in stage.part.inputs]
            custom_gradients.forget_with(self)
            return [*taken, *arrived], batches.num_examples

        traced = []

        def trace():
            # A plan traces once: TensorFlow would warn of the fifth one's call.
            traced.append(forward.get_concrete_function())

        # A layer that raised on its rank alone would leave the others waiting
        # for its messages.
        attempted(self._strategy.collectives, trace, "pipeline/traced")
        tensors, number = traced[0]()
        return tensors, int(number)

    def _batches(self, functional, data):
        """A mini-batch's parts, and the place of this rank's first."""
        if self._versions:
            num_pieces, own = self._strategy.pieces
            number = self._num_passes
            return MicroBatches(functional, data, number, num_pieces), own
        schedule = self._schedule
        batches = MicroBatches(
            functional, data, schedule.num_batches, schedule.num_pieces
        )
        return batches, schedule.stages[self._stage.number][0].batch

    def _compute(self, tensors):
        inputs, received = self._divided(tensors)
        # Without losses: regularizers find no weights in a stateless scope.
        with patches.current_rows_are_taken():
            return self._stage.outputs(inputs, received, True)

    def _divided(self, tensors):
        """`(dict of inputs, list of received tensors with their masks)`."""
        places = self._stage.part.inputs
        values = tensors[: len(places)]
        received = self._stage.received.without_masks(tensors[len(places) :])
        return dict(zip(places, values, strict=True)), received

    def _traced_passes(self, tensors):
        """A forward pass, and one with its backward pass.

        Returns:
            List of functions, traced, and of their tensors.
        """

        def traced(function, tensors):
            return timing.traced(function, tensors), tensors

        told = self._compute, self._stage.variables, tensors
        return [
            timing.pass_seconds(*told, has_backward, traced)
            for has_backward in (False, True)
        ]

    def _cost(self, tensors, passes, seconds):
        """The costs of this stage.

        Args:
            passes: as `_traced_passes` returns them.
            seconds: for how long each is measured.
        """
        stage, number = self._stage, self._num_passes
        forward, both = (
            timing.lasting_seconds(*each, seconds) for each in passes
        )
        # Without a flush, only the last stage keeps its layers' outputs.
        is_computed_again = self._versions is not None and not stage.is_last
        backward = both if is_computed_again else max(both - forward, 0.0)
        _, received = self._divided(tensors)
        rows = self._rows(tensors)
        return StageCost(
            layers=stage.part.names,
            weight_bytes=num_bytes(stage.part.model.weights),
            gradient_bytes=num_bytes(stage.variables),
            forward_seconds=forward * number,
            backward_seconds=backward * number,
            update_seconds=self._update_seconds(rows),
            sent_bytes=number * self._sent_bytes(tensors),
            returned_bytes=number * _wire_bytes(stage.before, floats(received)),
            memory_bytes=self._memory(tensors),
            missed_updates=(
                self._turns.num_ahead(stage.number) if self._turns else 0
            ),
            ranks=self._strategy.ranks_of(stage.number),
            table_bytes=num_bytes(stage.updates.by_rows),
            row_bytes=sum(
                rows[id(v)]
                * (num_bytes([v]) // v.shape[0] + narrowest_index(v.shape[0]))
                for v in stage.updates.by_rows
            ),
        )

    def _rows(self, tensors):
        """The rows that a rank looks up in a mini-batch, at most.

        Returns:
            Dict from the `id`s of the variables that are updated by rows.
        """
        tables = {id(v): v for v in self._stage.updates.by_rows}
        looked_up = collections.Counter()
        model = self._stage.part.model
        calls = keras_functional.functional_calls(model) if tables else []
        for call, outputs in zip(calls, self._made(tensors), strict=False):
            own = ordinary.weight_of(call.operation)
            for variable in getattr(call.operation, "trainable_variables", []):
                # Of an `Embedding` that a layer holds, no number is known.
                number = math.inf
                if variable is own:
                    number = math.prod(outputs[0].shape[:-1])
                looked_up[id(variable)] += number * self._num_passes
        return {
            key: min(looked_up.get(key, math.inf), v.shape[0])
            for key, v in tables.items()
        }

    def _sent_bytes(self, tensors):
        if self._stage.is_last:
            return 0
        with keras.StatelessScope():
            outputs = self._compute(tensors)
        sent = self._stage.sent.with_masks(outputs)
        return _wire_bytes(self._stage.behind, sent)

    def _update_seconds(self, rows):
        optimizer, variables = self._model.optimizer, self._stage.variables
        if optimizer is None or not variables:
            return 0.0

        # Of copies, which go when it is measured; of tables, as many rows as
        # are updated.
        num_ranks = self._strategy.peers.size
        shapes = [
            (min(rows[id(v)] * num_ranks, v.shape[0]), *v.shape[1:])
            if id(v) in rows
            else v.shape
            for v in variables
        ]
        copies = [
            keras_variables.plain_like(v, tf.zeros(shape, v.dtype))
            for shape, v in zip(shapes, variables, strict=True)
        ]
        alike = keras_optimizers.unbuilt(optimizer)
        alike.build(copies)

        def update(gradients):
            alike.apply(gradients, copies)
            return []

        zeros = [tf.zeros(v.shape, v.dtype) for v in copies]
        return timing.median_seconds(update, zeros)

    def _memory(self, tensors):
        stage = self._stage
        lasting = lasting_bytes(stage, self._model.optimizer, self._versions)
        num_inputs = len(stage.part.inputs)
        return lasting + passing_bytes(
            self._schedule,
            stage.number,
            self._turns,
            self._num_passes,
            num_bytes(tensors[:num_inputs]),
            num_bytes(tensors[num_inputs:]),
            num_bytes(keras.tree.flatten(self._made(tensors))),
        )

    def _made(self, tensors):
        """List of the outputs of each call of a pass, lists."""
        part = self._stage.part
        inputs, received = self._divided(tensors)
        given = [*inputs.values(), *(received[i] for i in part.taken)]
        outputs = keras.tree.flatten(
            with_all_outputs(part).call(given, training=False)
        )
        made = iter(outputs)
        return [
            [next(made) for _ in call.outputs]
            for call in keras_functional.functional_calls(part.model)
        ]

    def _step_seconds(self, costs):
        if self._versions is not None:
            # Stages work on different mini-batches at once.
            return max(cost.seconds for cost in costs)
        number = self._num_passes
        return simulate(
            self._schedule,
            [cost.forward_seconds / number for cost in costs],
            [cost.backward_seconds / number for cost in costs],
            update_seconds=[cost.update_seconds for cost in costs],
        ).seconds


def _largest(costs):
    """The largest numbers of a stage's ranks, which wait for each other."""
    names = [field.name for field in dataclasses.fields(StageCost)]
    return StageCost(
        **{name: max(getattr(cost, name) for cost in costs) for name in names}
    )


def _wire_bytes(link, tensors):
    """Bytes of tensors as they travel."""
    return num_bytes(link.wire(each.dtype).encode(each) for each in tensors)
