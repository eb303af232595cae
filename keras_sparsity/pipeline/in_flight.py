"""Training steps without a flush: several mini-batches are in flight."""

import tensorflow as tf

from keras_sparsity.pipeline.logs import LateLogs
from keras_sparsity.pipeline.messages_ahead import MessagesAhead
from keras_sparsity.pipeline.messages_in_turn import MessagesInTurn
from keras_sparsity.pipeline.turn_passes import TurnPasses


class InFlight:
    """Training steps of a stage; each is one of the pipeline's `Turns`.

    In a turn a stage runs the forward passes of a mini-batch, then the
    backward passes of an earlier one: one of each for each of M micro-batches,
    all with the same weights, and one update. Gradients leave a stage in the
    turn after, so that no message is under way between turns.

    References:
        SpecTrain (arXiv:1809.02839), 3; PipeDream (arXiv:1806.03377), 3.2.

    Attributes:
        late_logs: `LateLogs`.
    """

    def __init__(
        self, model, stage, objective, logs, versions, together, mixing
    ):
        self._model, turns = model, versions.turns
        self._num_draining = turns.backward(0)
        self._num_before_logs = turns.backward(stage.number)
        with tf.init_scope():
            self._turn = tf.Variable(0, trainable=False)
        self._passes = TurnPasses(
            model, stage, objective, logs, versions, together, mixing
        )
        make = MessagesAhead if turns.messages_ahead else MessagesInTurn
        self._messages = make(stage, self._passes, turns, logs, self._turn)
        self.late_logs = LateLogs(
            turns.backward(0) - turns.backward(stage.number)
        )
        # By the layout of the mini-batches in flight.
        self._draining_turns = {}

    def train(self, data):
        """A turn, traced, that begins with the batch of a `train_step`.

        Returns:
            float32 vector of the logs of the mini-batch that has come back to
            the first stage, on all ranks alike. See `LateLogs`.
        """
        row = self._messages.turn(self._passes.batches(data))
        is_known = self._turn >= self._num_before_logs
        self._turn.assign_add(1)
        return self.late_logs.push(row, is_known)

    def drain(self):
        """Runs the passes of all mini-batches; eagerly, as in a step.

        Every rank calls it, after the same number of turns, at least one, and
        then `late_logs.show`.
        """
        layout = self._messages.choose_layout()
        if layout not in self._draining_turns:
            strategy = self._model.distribute_strategy
            self._draining_turns[layout] = tf.function(
                lambda: strategy.run(self._draining_turn), autograph=False
            )
        run = self._draining_turns[layout]
        if self._model.run_eagerly:
            run = run.python_function
        for _ in range(self._num_draining):
            run()
        self._clear_passes()

    @property
    def num_turns(self):
        """The number of turns since the last drain.

        -1 if a step has failed midway.
        """
        turn = int(self._turn)
        is_whole = self._passes.holds(turn) and self._messages.holds(turn)
        return turn if is_whole else -1

    def clear(self):
        """Forgets the mini-batches in flight, and all logs; eagerly."""
        self._clear_passes()
        self.late_logs.clear()

    def _clear_passes(self):
        self._passes.clear()
        self._messages.clear()
        self._turn.assign(0)

    def _draining_turn(self):
        self._messages.draining_turn()
        self._turn.assign_add(1)
