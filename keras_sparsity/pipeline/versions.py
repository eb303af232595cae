"""The weights that the passes of a schedule without a flush compute with."""

import abc
import contextlib
import dataclasses
import functools

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_functional, keras_variables
from keras_sparsity._tf.current_variable import read_by
from keras_sparsity.stages.prediction import predictor_of


@dataclasses.dataclass
class Weights:
    """The weights that a pass computes with.

    Attributes:
        variables: the stage's, as `Stage.variables`.
        values: list in their order: tensors; the variable itself, of which a
            pass reads the rows that it looks up.
        readers: of those that are read by rows, see `read_by`.
        noted: list of the rows that a pass has read, if its backward pass
            needs them.
    """

    variables: list
    values: list
    readers: dict = dataclasses.field(default_factory=dict)
    noted: list = dataclasses.field(default_factory=list)

    @property
    def tensors(self):
        """Those values that are tensors."""
        return [
            value
            for value in self.values
            if not keras_variables.is_variable(value)
        ]

    @contextlib.contextmanager
    def given(self, others=()):
        """Context in which layers compute with these values.

        Args:
            others: pairs of more variables and their values.

        Yields:
            The `Assigned`.

        Raises:
            ValueError: if a layer assigns one of these variables.
        """
        pairs = [
            (variable, value)
            for variable, value in zip(self.variables, self.values, strict=True)
            if not keras_variables.is_variable(value)
        ]
        scope = Assigned([*pairs, *others], collect_losses=True)
        with read_by(self.readers), scope:
            yield scope
        trained = {id(variable) for variable in self.variables}
        for variable in scope.variables:
            if id(variable) in trained:
                _raise_of_assigned(variable)


class Assigned(keras.StatelessScope):
    """The values that layers assign in a pass.

    Attributes:
        variables: list of the assigned variables, also of those that no layer
            holds: `keras.random.normal(shape)` draws by one of Keras's own.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.variables = []

    def add_update(self, update):
        if not any(update[0] is variable for variable in self.variables):
            self.variables.append(update[0])
        super().add_update(update)


def _raise_of_assigned(variable):
    raise ValueError(
        "Without a flush passes compute with copies of the trained weights, "
        "and a value that a layer assigns in a pass would be lost. Received: "
        f"a layer that assigns '{variable.path}', as "
        '`keras.layers.SpectralNormalization` does. Use the schedule "1f1b" '
        'or "gpipe", or leave the layer out.'
    )


class Versions(abc.ABC):
    """Chooses the weights of a stage's passes.

    Args:
        by_rows: list of the variables of `Embedding`s, of which a pass reads
            the rows that it looks up; by default all that are updated so.
    """

    def __init__(self, stage, turns, by_rows=None):
        self._stage, self.turns = stage, turns
        if by_rows is None:
            by_rows = stage.updates.by_rows
        self._by_rows = by_rows
        self._ids_by_rows = {id(variable) for variable in by_rows}

    def forward(self, num_in_flight, num_later=None):
        """The `Weights` of a forward pass.

        Args:
            num_in_flight: int32 scalar, the number of earlier mini-batches
                that have not come back to the stage.
            num_later: int32 scalar, the number of later mini-batches; None:
                more will come.
        """
        del num_in_flight, num_later
        return self._weights(tf.convert_to_tensor)

    def kept(self, weights):
        """Of a forward pass's weights, those that its backward pass needs."""
        del weights
        return []

    @abc.abstractmethod
    def backward(self, kept, num_later):
        """The `Weights` of a backward pass.

        Args:
            kept: list, as `kept` has returned it.
            num_later: int32 scalar: the number of updates that will follow
                until the pipeline is empty; None if it goes on.
        """

    @property
    def copied(self):
        """List of the variables that are held a second time, for each copy."""
        return []

    def updating(self, gradients):
        """Context of an update of the stage's variables by these gradients."""
        del gradients
        return contextlib.nullcontext()

    @property
    def _whole(self):
        """The variables that are given to a pass as a whole."""
        return [
            variable
            for variable in self._stage.variables
            if id(variable) not in self._ids_by_rows
        ]

    def _weights(self, value_of, rows_of=None):
        """`Weights` by a function of each variable that is given whole.

        Args:
            value_of: that function.
            rows_of: function of each other one and the numbers of rows without
                duplicates, None for all; None: its rows are read as they are
                by then.
        """
        variables = self._stage.variables
        readers = {}
        if rows_of is not None:
            readers = {
                id(v.value): _Reader(functools.partial(rows_of, v))
                for v in self._by_rows
            }
        return Weights(
            variables,
            [
                v if id(v) in self._ids_by_rows else value_of(v)
                for v in variables
            ],
            readers,
        )


class _Reader:
    """Gives rows of a variable by a function, see `read_by`."""

    def __init__(self, rows_of):
        self.rows = rows_of

    def whole(self):
        return self.rows(None)


class Vanilla(Versions):
    """Each pass with the weights of its moment."""

    def backward(self, kept, num_later):
        del kept, num_later
        return self._weights(tf.convert_to_tensor)


class Stashed(Versions):
    """Each backward pass with the weights of its forward pass.

    Of an `Embedding`, the rows that the forward pass has looked up.

    References:
        PipeDream (arXiv:1806.03377), 3.3 (weight stashing).
    """

    def __init__(self, stage, turns):
        # Rows that a layer reads within a call of its own, as in a loop, may
        # be known there alone.
        calls = keras_functional.functional_calls(stage.part.model)
        called = {
            id(variable)
            for call in calls
            if isinstance(call.operation, keras.layers.Embedding)
            for variable in call.operation.trainable_variables
        }
        by_rows = [v for v in stage.updates.by_rows if id(v) in called]
        super().__init__(stage, turns, by_rows)

    def forward(self, num_in_flight, num_later=None):
        del num_in_flight, num_later
        noted = []

        def note(variable, ids):
            value = variable.value
            rows = value.read_value() if ids is None else tf.gather(value, ids)
            noted.append(rows)
            return rows

        weights = self._weights(tf.convert_to_tensor, note)
        weights.noted = noted
        return weights

    def kept(self, weights):
        return [*weights.tensors, *weights.noted]

    @property
    def copied(self):
        return self._whole * self.turns.num_ahead(self._stage.number)

    def backward(self, kept, num_later):
        del num_later
        kept = iter(kept)
        # The pass reads the others, after these, in the same order as before.
        return self._weights(lambda v: next(kept), lambda v, ids: next(kept))


class Predicted(Versions):
    """Each pass with the weights that are expected some updates later.

    Of an `Embedding`, the rows that it looks up.

    Args:
        rule: the optimizer that updates the stage's variables, built.
        target: `"paper"`: when the mini-batch's round trip ends; or
            `"sequential"`: when the updates of all earlier mini-batches are
            made.
        decay: see `predictor_of`.

    References:
        SpecTrain (arXiv:1809.02839), equations 4 to 6.
    """

    def __init__(self, stage, turns, rule, target, decay):
        updates = stage.updates
        if updates.predictor is None:
            updates.predictor = predictor_of(rule, decay)
        self._predictor = updates.predictor
        super().__init__(stage, turns, self._predictor.by_rows(updates.by_rows))
        # Equation 6: until the mini-batch is back at the first stage.
        self._most_beyond = 0
        if target == "paper":
            self._most_beyond = turns.num_beyond(stage.number)

    def forward(self, num_in_flight, num_later=None):
        return self._ahead(num_in_flight + self._beyond(num_later))

    def backward(self, kept, num_later):
        del kept
        return self._ahead(self._beyond(num_later))

    def _beyond(self, num_later):
        if num_later is None or not self._most_beyond:
            return self._most_beyond
        return tf.minimum(num_later, self._most_beyond)

    @property
    def copied(self):
        # The predicted ones of the pass under way.
        return (
            self._whole + self._stage.variables * self._predictor.num_averages
        )

    def updating(self, gradients):
        return self._predictor.following(self._stage.variables, gradients)

    def _ahead(self, num_updates):
        def ahead(variable, ids=None):
            return self._predictor.ahead(variable, num_updates, ids)

        return self._weights(ahead, ahead)
