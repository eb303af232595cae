"""What comes before an adopted model's first step."""

import tensorflow as tf

from keras_sparsity import agreement, compat, moves, random_states
from keras_sparsity.adoption.binding import Binding
from keras_sparsity.data import following
from keras_sparsity.data.stand_ins import without_counts
from keras_sparsity.tables.table_variable import TableVariable


class FirstStep(Binding):
    """Builds the model, and gives every rank the same variables.

    Attributes:
        awaits_input: the `ShardedCheckpoint` that is to be shown the next
            `fit`'s input, or None.
        begins_fit: whether the next input is that of a `fit`.
    """

    def __init__(self, model, joint_pull, replicas):
        self._joint_pull = joint_pull
        self._replicas = replicas
        self.awaits_input = None
        self.begins_fit = False
        kinds = ["train", "test", "predict"]
        names = [f"make_{kind}_function" for kind in kinds]
        super().__init__(model, names, {compat.SYMBOLIC_BUILD: "build"})

    def build(self, iterator=None, data_batch=None):
        """Builds the model from the shapes of a batch, without reading one.

        Keras reads a batch and throws it away. A generator's cannot be read
        again, and what was prefetched meanwhile differs between the ranks.
        """
        if iterator is not None:
            data_batch = compat.batch_shapes(iterator)
            if self.awaits_input:
                self.awaits_input.use_input(iterator)
                self.awaits_input = None
        self._stock[compat.SYMBOLIC_BUILD](
            data_batch=without_counts(data_batch)
        )
        begins_fit, self.begins_fit = self.begins_fit, False
        if (
            begins_fit
            and self._collectives.size > 1
            # Python is not asked for a batch before it is needed.
            and not compat.is_read_by_python(iterator)
            and self._joint_pull.can_look_ahead
        ):
            compat.change_input(iterator, following.with_following)

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
        """Gives every rank rank 0's whole variables, once for each variable.

        Random layers then draw differently on each rank.
        """
        communicator = self._collectives
        if communicator.size == 1:
            return
        # Some may have been built since `compile`, outside of the scope.
        strategy = self._model.distribute_strategy
        moves.settle(self._model, strategy)
        new = {
            id(v): v
            for v in self._model.variables
            if id(v) not in self._replicas.synchronised
        }
        if not new:
            return
        variables = [
            v
            for v in new.values()
            if not (isinstance(v, TableVariable) and v.table.is_sharded)
        ]
        communicator.check_equal(
            {
                **agreement.of_model(self._model),
                "strategy.architecture": strategy.architecture,
                "strategy.wire_dtype": strategy.wire_dtype,
                "strategy.local_aggregation": strategy.local_aggregation,
                "strategy.bucket_bytes": strategy.bucket_bytes,
                "strategy.prefetch": strategy.prefetch,
            },
            "The model and its optimizer",
            "Build the same model on every rank.",
        )
        self._replicas.check()  # of tables, which rank 0 has not whole
        self._replicas.synchronised.update(new)
        values = communicator.broadcast(
            [tf.convert_to_tensor(v.value) for v in variables],
            name="model/variables",
        )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
            if random_states.is_own(variable):
                random_states.fold_rank(variable, communicator.rank)
