"""The steps of a model whose stages live on the ranks."""

import contextlib
import dataclasses

import tensorflow as tf

from keras_sparsity._tf import (
    contexts,
    custom_gradients,
    keras_functional,
    keras_scopes,
)
from keras_sparsity.global_batch import loss_scale, mixing
from keras_sparsity.pipeline import dense_inputs
from keras_sparsity.pipeline.flushed import FlushedRun
from keras_sparsity.pipeline.in_flight import InFlight
from keras_sparsity.pipeline.links import Crossing
from keras_sparsity.pipeline.logs import Logs
from keras_sparsity.pipeline.objective import Objective
from keras_sparsity.pipeline.together import Together
from keras_sparsity.stages.schedule import Kind
from keras_sparsity.training.binding import Binding


class Steps(Binding):
    """Steps in which each rank runs the passes of its stage.

    Logs and predictions are the same on all ranks: those of the last stage.

    Args:
        schedule: the `Schedule` of a batch's micro-batches.
        versions: `Versions`, for training without a flush; else None.
        limit: the `Limit` of the stages' memory, or None.
        head_sums: `HeadSums`, or None.

    Attributes:
        mixing: `Mixing` of the model.
        is_in_step: whether a step is traced, or runs eagerly.
    """

    def __init__(
        self,
        model,
        stage,
        schedule,
        versions=None,
        limit=None,
        head_sums=None,
    ):
        self._stage, self._schedule, self._limit = stage, schedule, limit
        self._functional = keras_functional.functional_of(model)
        self.is_in_step = False
        names = ["train_step", "test_step", "predict_step"]
        super().__init__(model, [*names, "get_metrics_result"])
        peers = model.distribute_strategy.peers
        self.mixing = mixing.of_passes(model, peers)
        self._objective = Objective(
            model, stage.is_last, peers.size, self.mixing.tell
        )
        self._logs = Logs(
            model,
            self._objective,
            self._stock["get_metrics_result"],
            stage,
            peers,
        )
        self._together = Together(
            getattr(model, "optimizer", None),
            self._collectives,
            peers,
            stage.are_spread,
            head_sums,
            stage.columns is not None,
        )
        self._in_flight = versions and InFlight(
            model,
            stage,
            self._objective,
            self._logs,
            versions,
            self._together,
            self.mixing,
        )

    @property
    def _last(self):
        return self._collectives.size - 1

    @property
    def columns(self):
        """The `Columns` of the stage, or None."""
        return self._stage.columns

    def unbind(self):
        self.settle_columns()
        super().unbind()

    def settle_columns(self):
        """Gives each rank of a tail the columns of all; eagerly."""
        if self.columns is not None:
            self.columns.settle()

    def settle(self):
        """Makes all weights those of the steps so far; eagerly, on all ranks.

        See `end_passes`.
        """
        self.settle_columns()
        self.end_passes()

    def end_passes(self):
        """Ends all backward passes; eagerly, on all ranks.

        After a step that has failed midway their mini-batches are forgotten.
        """
        if self._in_flight is None or self._collectives.size == 1:
            return
        turns = self._collectives.gather_objects(
            self._in_flight.num_turns, name="pipeline/turns"
        )
        if turns[0] >= 0 and len(set(turns)) == 1:
            self._drain()
        else:
            self._in_flight.clear()

    def forget_logs(self):
        """The next steps show no logs of earlier ones; eagerly.

        Without mini-batches in flight.
        """
        if self._in_flight:
            self._in_flight.late_logs.clear()

    @property
    def shows_logs(self):
        """Whether the last step has shown logs, and not 0 in their place."""
        return self._in_flight is None or self._in_flight.late_logs.are_known

    def _drain(self):
        if not self._in_flight.num_turns:
            return
        with self._in_step([]):
            self._in_flight.drain()
        (row,) = self._of_all([self._logs.row()], "pipeline/newest_logs")
        self._in_flight.late_logs.show(row)

    def check_compiled(self):
        """Raises ValueError if the model was compiled outside of the scope."""
        self._stage.updates.check_is_of(self._model)

    def check_trains(self):
        """Raises ValueError if other weights were trained in `compile`."""
        self._stage.updates.check_trains(self._model)

    def train_step(self, data):
        self.check_compiled()
        self.check_trains()
        waits = self._in_flight is not None and self._collectives.size > 1
        if waits or self._limit:
            dense_inputs.refuse_ragged(self._functional, data)
        first = [self._limit.checked(data)] if self._limit else []
        with self._in_step(data), tf.control_dependencies(first):
            if self._in_flight:
                return self._logs.packed(self._in_flight.train(data))
            run = self._run(self._schedule, data, True)
            gradients = self._together.summed(run.gradients)
            gradients = self._together.agreed(gradients)
            with self._model.distribute_strategy.gradients_summed():
                self._stage.updates.apply(gradients)
            if self.columns is not None:
                self.columns.note_step()
            self._together.combine_statistics(
                self._stage.part.model, run.num_examples
            )
            return self._logs_of(run)

    def test_step(self, data):
        with self._in_step(data):
            return self._logs_of(self._run(self._forward, data, False))

    def predict_step(self, data):
        with self._in_step(data):
            run = self._run(self._forward, data, None)
            outputs, _ = Crossing(tuple(self._functional.outputs)).broadcast(
                self._collectives,
                run.outputs(),
                run.batches.num_examples,
                self._last,
            )
            return self._objective.packed(outputs)

    def get_metrics_result(self):
        # In a step, those of all ranks are put together at its end.
        if self.is_in_step or keras_scopes.in_symbolic_scope():
            return self._stock["get_metrics_result"]()
        if self._in_flight:
            self._drain()
        logs = self._logs.result()
        values = self._of_all(
            [tf.convert_to_tensor(value) for value in logs.values()],
            "pipeline/metrics",
        )
        values = [value.numpy() for value in values]
        return {
            name: value if value.ndim else float(value)
            for name, value in zip(logs, values, strict=True)
        }

    @property
    def _forward(self):
        """The forward passes of the schedule."""
        return dataclasses.replace(
            self._schedule,
            stages=tuple(
                tuple(task for task in tasks if task.kind is Kind.FORWARD)
                for tasks in self._schedule.stages
            ),
        )

    @contextlib.contextmanager
    def _in_step(self, data):
        """Context of a step.

        Nothing in it runs before its batch has come: where the number of
        batches is unknown, the last step finds none, and must leave no receiver
        waiting for a message.
        """
        arrived = tf.nest.flatten(data, expand_composites=True)
        with (
            contexts.attribute(self, "is_in_step", True),
            tf.control_dependencies(
                [each for each in arrived if each is not None]
            ),
            # Shares of a batch are summed by the schedule.
            loss_scale.of_own_part(),
        ):
            yield
        custom_gradients.forget_with(self._model)

    def _run(self, schedule, data, training):
        run = FlushedRun(
            self._model,
            self._stage,
            self._objective,
            schedule,
            data,
            training,
            self._together,
            self.mixing,
        )
        run.run()
        return run

    def _logs_of(self, run):
        """The logs after a whole batch, on all ranks."""
        row = self._logs.of_batch(run.loss, run.batches, run.outputs)
        (row,) = self._of_all([row], "pipeline/logs")
        return self._logs.packed(row)

    def _of_all(self, logs, name):
        """Tensors of each stage's logs as those of all, on all ranks."""
        if not self._logs.are_spread:
            return self._collectives.broadcast(logs, self._last, name=name)
        if self._model.distribute_strategy.peers.rank:
            logs = list(map(tf.zeros_like, logs))  # the first one's count
        return self._collectives.all_reduce(logs, name=name)
