"""What comes before an adopted model's first step."""

import tensorflow as tf

from keras_sparsity import agreement, compat, random_states
from keras_sparsity.adoption.binding import Binding
from keras_sparsity.tables.table_variable import TableVariable


class FirstStep(Binding):
    """Builds the model, and gives every rank the same variables.

    Attributes:
        awaits_input: the `ShardedCheckpoint` that is to be shown the next
            `fit`'s input, or None.
    """

    def __init__(self, model):
        self._synchronised = None
        self._folded = set()
        self.awaits_input = None
        kinds = ["train", "test", "predict"]
        names = [f"make_{kind}_function" for kind in kinds]
        super().__init__(model, ["_maybe_symbolic_build", *names])

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Builds the model from the shapes of a batch, without reading one.

        Keras reads a batch and throws it away. A generator's cannot be read
        again, and what was prefetched meanwhile differs between the ranks.
        """
        if iterator is not None:
            data_batch = compat.batch_shapes(iterator)
            if self.awaits_input:
                self.awaits_input.use_input(iterator)
                self.awaits_input = None
        self._stock["_maybe_symbolic_build"](data_batch=data_batch)

    def make_train_function(self, *args, **kwargs):
        self._synchronise()
        return self._stock["make_train_function"](*args, **kwargs)

    def make_test_function(self, *args, **kwargs):
        self._synchronise()
        return self._stock["make_test_function"](*args, **kwargs)

    def make_predict_function(self, *args, **kwargs):
        self._synchronise()
        return self._stock["make_predict_function"](*args, **kwargs)

    def _synchronise(self):
        """Gives every rank rank 0's dense variables, once for each variable.

        Random layers then draw differently on each rank.
        """
        communicator = self._collectives
        variables = [
            v
            for v in self._model.variables
            if not (isinstance(v, TableVariable) and v.table.is_sharded)
        ]
        identity = tuple(id(v) for v in variables)
        if communicator.size == 1 or identity == self._synchronised:
            return
        communicator.check_equal(
            agreement.of_model(self._model),
            "The model and its optimizer",
            "Build the same model on every rank.",
        )
        folded = [v for v in variables if random_states.is_own(v)]
        synchronised = [v for v in variables if id(v) not in self._folded]
        values = communicator.broadcast(
            [tf.convert_to_tensor(v.value) for v in synchronised],
            name="model/variables",
        )
        for variable, value in zip(synchronised, values, strict=True):
            variable.assign(value)
        for variable in folded:
            if id(variable) not in self._folded:
                self._folded.add(id(variable))
                random_states.fold_rank(variable, communicator.rank)
        self._synchronised = identity
