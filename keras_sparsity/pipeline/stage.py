"""The computation of one stage."""

import dataclasses
import functools
from contextlib import nullcontext

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_losses, keras_models
from keras_sparsity.global_batch import random_states
from keras_sparsity.pipeline import dense_inputs
from keras_sparsity.pipeline.links import Crossing
from keras_sparsity.pipeline.tables import is_spread
from keras_sparsity.training.joint_pull import JointPull


class Stage:
    """A part of a model, between its neighbours.

    Args:
        number: its number, from 0.
        before, behind: `Link`s to the neighbours, None at an end.
        options: `Options` of the rows of tables.
        rank: this process's, of those of the stage.

    Attributes:
        received, sent: `Crossing`s.
        columns: `Columns` of layers that its ranks divide, or None.
    """

    columns = None

    def __init__(self, number, part, before, behind, updates, options, rank):
        self.number, self.part, self.updates = number, part, updates
        self.before, self.behind = before, behind
        self.received = Crossing(part.received)
        self.sent = Crossing(part.sent)
        self._rank = rank
        self._joint_pull = JointPull(part.model, options)

    @property
    def is_first(self):
        return self.before is None

    @property
    def is_last(self):
        return self.behind is None

    @property
    def variables(self):
        return self.updates.trained

    @property
    def are_spread(self):
        """Of each of the variables, whether this rank has a part alone."""
        return [
            is_spread(variable)
            or (self.columns is not None and self.columns.has(variable))
            for variable in self.variables
        ]

    @functools.cached_property
    def states(self):
        """Variables that passes change: of statistics, of random generators.

        And those of recurrent layers and of layers' metrics. A list without
        weights that a layer has made to be trained, frozen or not.
        """
        model = self.part.model
        trained = keras_models.weights_that_were_trainable(model)
        ids = {id(variable) for variable in trained}
        return [
            *(v for v in model.non_trainable_variables if id(v) not in ids),
            *recurrent_states(model),
            *model.metrics_variables,
        ]

    def receive(self, num_examples, batch):
        """The message of the stage before: its tensors and the loss so far.

        Args:
            num_examples: the number of the micro-batch's examples.
            batch: the micro-batch's number, or a range.
        """
        if self.is_first:
            return [], tf.zeros([])
        link = self.before.of(batch)
        return link.receive_activations(self.received, num_examples)

    def send(self, outputs, loss):
        """Sends the tensors and the loss so far to the stage behind."""
        if not self.is_last:
            dense_inputs.check_sent(outputs, self.part.names[-1])
            self.behind.send_activations(self.sent, outputs, loss)

    def compute(self, inputs, received, training):
        """Makes the calls of the stage's layers.

        Args:
            inputs: the micro-batch's values of all of the model's inputs.
            received: list of the tensors that have come.
            training: see `keras.Model.call`.

        Returns:
            outputs: the tensors to be sent; at the last stage the model's.
            losses: list of those that layers and regularizers add.
        """
        keras_losses.clear_losses(self.part.model)
        outputs = self.outputs(inputs, received, training)
        return outputs, list(self.part.model.losses)

    def outputs(self, inputs, received, training):
        """As `compute`, without the losses."""
        part = self.part
        received = [
            self._with_logits(symbolic, value)
            for symbolic, value in zip(part.received, received, strict=True)
        ]
        given = [
            *(inputs[place] for place in part.inputs),
            *(received[place] for place in part.taken),
        ]
        columns = self.columns.in_calls() if self.columns else nullcontext()
        # Ranks that divide columns compute the same examples.
        draws = random_states.drawn_by_rank(0 if self.columns else self._rank)
        with self._joint_pull.in_next_run(), columns, draws:
            made = part.compute(given, training)
        values = {
            id(symbolic): value
            for symbolic, value in [
                *zip(part.arriving, given, strict=True),
                *zip(part.received, received, strict=True),
                *zip(part.made, made, strict=True),
            ]
        }
        outputs = [values[id(symbolic)] for symbolic in part.sent]
        if self.is_last:
            return outputs
        return [
            self._logits(symbolic, value)
            for symbolic, value in zip(part.sent, outputs, strict=True)
        ]

    def _logits(self, symbolic, value):
        """What travels in place of a tensor: its logits, if it has some."""
        if id(symbolic) not in self.part.logits_functions:
            return value
        logits = tf.identity(keras_losses.keras_logits(value))
        return _with_mask_of(value, logits)

    def _with_logits(self, symbolic, value):
        """The tensor in whose place a value has come."""
        function = self.part.logits_functions.get(id(symbolic))
        if function is None:
            return value
        return _with_mask_of(value, function(value))


def _with_mask_of(value, other):
    mask = keras_losses.keras_mask(value)
    if mask is not None:
        keras_losses.set_keras_mask(other, mask)
    return other


def recurrent_states(model):
    """Those of `recurrent_layers`; no layer's variables."""
    return [
        state
        for layer in recurrent_layers(model)
        for state in keras.tree.flatten(layer.states)
    ]


def recurrent_layers(model):
    """A model's `LSTM(stateful=True)` and the like."""
    return [
        layer
        for layer in keras_models.all_layers(model)
        if isinstance(layer, keras.layers.RNN) and layer.stateful
    ]


@dataclasses.dataclass
class Pass:
    """A forward pass that a tape has recorded, until its backward pass.

    Attributes:
        tape: `tf.GradientTape` of the pass.
        weights: the stage's trainable variables, or the tensors in their
            place, in the order of `Stage.variables`.
        received: list of the tensors that have come.
        outputs: list of the tensors that were sent.
        objective: the stage's own share of the loss, a scalar, scaled as its
            optimizer asks; or None.
    """

    tape: tf.GradientTape
    weights: list
    received: list
    outputs: list
    objective: tf.Tensor | None

    def gradients(self, upstream):
        """The gradients of weights, and of received tensors of floats.

        Args:
            upstream: list of the gradients of the outputs that are floats;
                empty at the last stage.
        """
        targets, given = [], []
        if self.objective is not None:
            targets.append(self.objective)
            given.append(tf.ones_like(self.objective))
        if upstream:
            targets += floats(self.outputs)
            given += upstream
        received = floats(self.received)
        gradients = self.tape.gradient(
            targets, [*self.weights, *received], output_gradients=given
        )
        num_weights = len(self.weights)
        return gradients[:num_weights], [
            tf.zeros_like(value) if gradient is None else gradient
            for value, gradient in zip(
                received, gradients[num_weights:], strict=True
            )
        ]


def floats(tensors):
    """Those that have gradients."""
    return [each for each in tensors if each.dtype.is_floating]
