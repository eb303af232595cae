"""The passes of one stage, in a step that is being traced."""

import tensorflow as tf

from keras_sparsity._tf import keras_losses
from keras_sparsity.pipeline.links import Crossing


class Stage:
    """A part of a model, between its neighbours.

    Args:
        number: its number, from 0.
        part: its `Part`.
        before, behind: `Link`s to the neighbours, None at an end.
    """

    def __init__(self, number, part, before, behind):
        self.number, self.part = number, part
        self.before, self.behind = before, behind
        self.received = Crossing(part.received)
        self.sent = Crossing(part.sent)

    @property
    def is_first(self):
        return self.before is None

    @property
    def is_last(self):
        return self.behind is None

    @property
    def variables(self):
        return self.part.model.trainable_variables

    def forward(self, inputs, num_examples, objective, training):
        """A forward pass.

        Args:
            inputs: the micro-batch's values of `part.inputs`.
            num_examples: the number of its examples.
            objective: function of the outputs and of the list of losses that
                the stage's layers and regularizers add. It gives the stage's
                own share of the loss, a scalar, or None.
            training: see `keras.Model.call`.

        Returns:
            `Pass`.
        """
        received = []
        if not self.is_first:
            received = self.before.receive_activations(
                self.received, num_examples
            )
        taken = [received[place] for place in self.part.taken]
        keras_losses.clear_losses(self.part.model)
        with tf.GradientTape() as tape:
            tape.watch([each for each in received if each.dtype.is_floating])
            made = self.part.compute([*inputs, *taken], training)
            values = {
                id(symbolic): value
                for symbolic, value in [
                    *zip(self.part.received, received, strict=True),
                    *zip(self.part.made, made, strict=True),
                ]
            }
            outputs = [values[id(symbolic)] for symbolic in self.part.sent]
            own = objective(outputs, list(self.part.model.losses))
        if not self.is_last:
            self.behind.send_activations(self.sent, outputs)
        return Pass(self, tape, received, outputs, own)


class Pass:
    """A forward pass, until its backward pass.

    Attributes:
        outputs: the tensors that the stage has sent; the model's outputs at
            the last stage.
        objective: the stage's own share of the loss, a scalar, or None.
    """

    def __init__(self, stage, tape, received, outputs, objective):
        self._stage, self._tape, self._received = stage, tape, received
        self.outputs, self.objective = outputs, objective

    def backward(self):
        """Sends the gradients of received tensors; returns the weights'."""
        stage = self._stage
        received = [x for x in self._received if x.dtype.is_floating]
        targets, upstream = [], []
        if self.objective is not None:
            targets.append(self.objective)
            upstream.append(tf.ones_like(self.objective))
        if not stage.is_last:
            floats = [x for x in self.outputs if x.dtype.is_floating]
            targets += floats
            upstream += stage.behind.receive_gradients(floats)
        gradients = self._tape.gradient(
            targets, [*stage.variables, *received], output_gradients=upstream
        )
        of_weights = gradients[: len(stage.variables)]
        if not stage.is_first:
            of_received = gradients[len(stage.variables) :]
            stage.before.send_gradients(
                [
                    tf.zeros_like(value) if gradient is None else gradient
                    for value, gradient in zip(
                        received, of_received, strict=True
                    )
                ]
            )
        return of_weights


def added(sums, gradients):
    """Sums of gradients, of which some may be None or `tf.IndexedSlices`."""
    if sums is None:
        return gradients
    return [
        _sum(total, gradient)
        for total, gradient in zip(sums, gradients, strict=True)
    ]


def _sum(total, gradient):
    if total is None or gradient is None:
        return gradient if total is None else total
    if isinstance(total, tf.IndexedSlices) and isinstance(
        gradient, tf.IndexedSlices
    ):
        return tf.IndexedSlices(
            tf.concat([total.values, gradient.values], 0),
            tf.concat([total.indices, gradient.indices], 0),
            total.dense_shape,
        )
    return tf.convert_to_tensor(total) + tf.convert_to_tensor(gradient)
