"""The calls of one stage of a model."""

import dataclasses
import functools

import keras


@dataclasses.dataclass(frozen=True)
class Part:
    """The calls of one stage.

    Attributes:
        names: the names of its layers and operations, in the order of calls.
        inputs: the model's inputs that it takes, by their place in
            `model.inputs`. They do not travel: every rank reads the data.
        received, sent: the tensors that come from the stage before and go to
            the one behind, some of which this stage only hands on. The last
            stage sends the model's outputs, in their order.
        taken: those of `received` that its calls take, by their place.
        arriving: `inputs` and `taken` as tensors.
        made: the tensors that it computes for later stages and as outputs.
        model: `keras.Model` from a list of `arriving` to a list of `made`, with
            the layers, and so the weights, of the whole model.
        logits_functions: dict from the ids of the model's outputs that a
            softmax or sigmoid makes to that function. Between stages their
            logits travel, which losses use.
    """

    names: tuple
    inputs: tuple
    received: tuple
    sent: tuple
    taken: tuple
    arriving: tuple
    made: tuple
    model: keras.Model
    logits_functions: dict

    def compute(self, tensors, training=None):
        """Makes the calls; masks that tensors carry count.

        Args:
            tensors: list of `inputs` and `taken`.
            training: see `keras.Model.call`.

        Returns:
            List of the tensors `made`.
        """
        return keras.tree.flatten(self._calls(tensors, training=training))

    @functools.cached_property
    def _calls(self):
        return _Calls(self.model)


class _Calls(keras.layers.Layer):
    """Calls a model, without masks that the model would pass on or warn of.

    Those of the outputs are the layers' own. A layer is needed around them, as
    Keras tells the layers of layers by the outermost one whether they train.
    """

    def __init__(self, model):
        super().__init__(autocast=False, name=model.name)
        self._model = model
        self.built = True

    def call(self, tensors, training=None):
        return self._model.call(tensors, training=training)

    def compute_mask(self, inputs, previous_mask):
        return None
