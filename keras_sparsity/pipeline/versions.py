"""The weights that the passes of a schedule without a flush compute with."""

import abc
import contextlib

import tensorflow as tf

from keras_sparsity.stages.prediction import predictor_of


class Versions(abc.ABC):
    """Chooses the weights of a stage's passes.

    Args:
        stage: the `Stage`.
    """

    def __init__(self, stage):
        self._stage = stage

    def forward(self, num_in_flight):
        """The weights of a forward pass, in the order of `Stage.variables`.

        Args:
            num_in_flight: int32 scalar, the number of earlier mini-batches
                that have not come back to the stage.
        """
        del num_in_flight
        return self._current()

    def kept(self, weights):
        """Of a forward pass's weights, those that its backward pass needs."""
        del weights
        return []

    @abc.abstractmethod
    def backward(self, kept, num_later):
        """The weights of a backward pass.

        Args:
            kept: list, as `kept` has returned it.
            num_later: int32 scalar: the number of updates that will follow
                until the pipeline is empty; None if it goes on.
        """

    @property
    def has_averages(self):
        """Whether each weight has an average, from which it is predicted."""
        return False

    def num_copies(self, num_ahead):
        """The number of copies of the stage's weights that are held at once.

        Args:
            num_ahead: the number of stages behind this one.
        """
        del num_ahead
        return 0

    @contextlib.contextmanager
    def updating(self):
        """Context of an update of the stage's variables."""
        yield

    def _current(self):
        return [tf.convert_to_tensor(v.value) for v in self._stage.variables]


class Vanilla(Versions):
    """Each pass with the weights of its moment."""

    def backward(self, kept, num_later):
        del kept, num_later
        return self._current()


class Stashed(Versions):
    """Each backward pass with the weights of its forward pass.

    References:
        PipeDream (arXiv:1806.03377), 3.3 (weight stashing).
    """

    def kept(self, weights):
        return weights

    def num_copies(self, num_ahead):
        return num_ahead

    def backward(self, kept, num_later):
        del num_later
        return kept


class Predicted(Versions):
    """Each pass with the weights that are expected some updates later.

    Args:
        stage: the `Stage`.
        rule: the optimizer that updates its variables, built.
        target: `"paper"`: when the mini-batch's round trip ends; or
            `"sequential"`: when the updates of all earlier mini-batches are
            made.
        decay: see `predictor_of`.

    References:
        SpecTrain (arXiv:1809.02839), equations 4 to 6.
    """

    def __init__(self, stage, rule, target, decay):
        super().__init__(stage)
        # Equation 6: until the mini-batch is back at the first stage.
        self._beyond = stage.number // 2 if target == "paper" else 0
        self._predictor = predictor_of(rule, decay)

    def forward(self, num_in_flight):
        return self._ahead(num_in_flight + self._beyond)

    def backward(self, kept, num_later):
        del kept
        if num_later is None:
            return self._ahead(self._beyond)
        return self._ahead(tf.minimum(num_later, self._beyond))

    @property
    def has_averages(self):
        return self._predictor.num_averages > 0

    def average(self, variable):
        """The Keras variable with the average of a weight's changes."""
        return self._predictor.average(variable)

    def num_copies(self, num_ahead):
        del num_ahead
        # The predicted ones of the pass under way.
        return 1 + self._predictor.num_averages

    def updating(self):
        return self._predictor.following(self._stage.variables)

    def _ahead(self, num_updates):
        return [
            self._predictor.ahead(v, num_updates) for v in self._stage.variables
        ]
