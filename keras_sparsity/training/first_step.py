"""Preparation of an adopted model's first step."""

import contextlib
import functools
import logging

import tensorflow as tf

from keras_sparsity._tf import keras_input, keras_models
from keras_sparsity.conversion.saving import tables_of
from keras_sparsity.data import following, stand_ins
from keras_sparsity.data.batches import unpacked
from keras_sparsity.global_batch import random_states
from keras_sparsity.health import agreement
from keras_sparsity.moves import moving
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.tables.table_variable import TableVariable
from keras_sparsity.training import embeddings, prefetching
from keras_sparsity.training.binding import Binding
from keras_sparsity.training.resuming import Input
from keras_sparsity.update import lookups
from keras_sparsity.update.start import synchronised_by

_FUNCTIONS = (
    "make_train_function",
    "make_test_function",
    "make_predict_function",
)


class FirstStep(Binding):
    """Builds the model, and gives every rank the same variables.

    Attributes:
        input: the `Input` of the next run.
        begins_fit: whether the next input is that of a `fit`.
    """

    def __init__(self, model, joint_pull, replicas):
        self._joint_pull = joint_pull
        self._replicas = replicas
        self.input = Input()
        self.begins_fit = False
        super().__init__(model, (), {keras_models.SYMBOLIC_BUILD: "build"})
        for name in _FUNCTIONS:
            self._bind(name, functools.partial(self._make_function, name))

    def build(self, iterator=None, data_batch=None):
        """Builds the model from the shapes of a batch."""
        begins_fit, self.begins_fit = self.begins_fit, False
        if iterator is not None:
            data_batch = self.input.shapes(iterator)
        # Some models have steps of their own alone, as adversarial ones.
        if keras_models.overrides(self._model, "call"):
            with self._optimizer_synchronises_the_model():
                self._build_from(stand_ins.without_counts(data_batch))
        strategy = self._model.distribute_strategy
        if begins_fit and self._collectives.size > 1 and strategy.prefetch:
            reason = prefetching.why_not(
                self._model, iterator, self._joint_pull.can_look_ahead
            )
            prefetching.tell(self._model, reason)
            if reason is None:
                keras_input.change_input(iterator, following.with_following)

    def _build_from(self, batch):
        """As Keras; code that needs values, or rows of ragged ones, waits."""
        model, context = self._model, contextlib.nullcontext
        inputs, _, _ = unpacked(batch)
        waits = model.run_eagerly or _is_composite(inputs)
        if waits and not keras_models.is_built(model):
            context = keras_models.losses_and_metrics_may_fail
            if not keras_models.can_be_called_on_shapes(model, inputs):
                context = keras_models.losses_and_metrics_wait
                with contextlib.suppress(Exception):  # which Keras explains
                    self._call_once(inputs)
        elif keras_models.overrides(
            model, "train_step", "test_step"
        ) and keras_models.has_all_weights(model):
            # Batches may be others than its inputs and labels.
            context = _tried
        with context(model):
            self._stock[keras_models.SYMBOLIC_BUILD](data_batch=batch)

    def _call_once(self, inputs):
        """Builds layers whose calls need values.

        On zeros, where only the shapes of a batch are known: to read a
        generator's batch would lose it. Not if sizes are unknown that weights
        may have.
        """
        specs = [
            leaf
            for leaf in tf.nest.flatten(inputs)
            if isinstance(leaf, tf.TypeSpec)
        ]
        if any(_may_size_weights(spec) for spec in specs):
            return
        if specs:
            inputs = stand_ins.zeros(stand_ins.nothing_of(inputs))
        with self._model.distribute_strategy.scope():
            self._model(inputs, training=False)

    def _make_function(self, name, *args, **kwargs):
        self._synchronise()
        self._build_optimizer()
        return self._stock[name](*args, **kwargs)

    def _build_optimizer(self):
        """Builds an optimizer that is to keep the rows of tables.

        It keeps none that a function reads which was traced before. Keras
        builds it before `fit` and `evaluate`, but not before `predict`.
        """
        model = self._model
        optimizer = getattr(model, "optimizer", None)
        if (
            not isinstance(optimizer, HybridOptimizer)
            or optimizer.built
            or optimizer.is_compiled_by_xla
            or not keras_models.has_all_weights(model)
        ):
            return
        variables = model.trainable_variables
        if any(
            optimizer.may_keep_rows_of(v) and not optimizer.updates_rows_of(v)
            for v in variables
        ):
            with (
                model.distribute_strategy.scope(),
                self._optimizer_synchronises_the_model(),
            ):
                optimizer.build(variables)

    def _optimizer_synchronises_the_model(self):
        """While entered, an optimizer that is built has the model synchronised.

        The optimizer would otherwise compare and broadcast its variables, and
        the model all of them again.
        """
        optimizer = getattr(self._model, "optimizer", None)
        if not isinstance(optimizer, HybridOptimizer):
            return contextlib.nullcontext()
        return synchronised_by(optimizer, self._synchronise)

    def _synchronise(self):
        """Gives every rank rank 0's whole variables, once for each variable.

        Random layers then draw differently on each rank.
        """
        communicator = self._collectives
        lookups.mark(keras_models.all_layers(self._model), communicator.size)
        if communicator.size == 1:
            return
        # Some may have been built since `compile`, outside of the scope.
        strategy = self._model.distribute_strategy
        embeddings.settle(self._model, strategy)
        moving.settle(self._model, strategy)
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
        self._warn_of_idle_servers()
        communicator.check_equal(
            agreement.of_model(self._model),
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

    def _warn_of_idle_servers(self):
        """Warns, on rank 0 and once, where servers have nothing to own."""
        communicator = self._collectives
        if not communicator.num_servers or self._replicas.synchronised:
            return
        tables = tables_of(self._model)
        if communicator.rank == 0 and not any(t.is_sharded for t in tables):
            logging.getLogger(__name__).warning(
                "%d dedicated servers have nothing to do: the model '%s' has "
                "no sharded table. Use `ks.layers.ShardedEmbedding` or "
                "`ks.shard_embeddings(model)`, with architecture 'ps' or "
                "'auto'; or start without servers.",
                communicator.num_servers,
                self._model.name,
            )


def _tried(model):
    """While entered, an error ends the build; the steps build what is left."""
    return contextlib.suppress(Exception)


def _is_composite(inputs):
    """Whether some are ragged or sparse: a symbolic build has dense ones."""
    kinds = tf.RaggedTensor, tf.SparseTensor
    return any(
        isinstance(leaf, (*kinds, tf.RaggedTensorSpec, tf.SparseTensorSpec))
        for leaf in tf.nest.flatten(inputs)
    )


def _may_size_weights(spec):
    """Whether weights may have a size of a batch that is not known."""
    if spec.shape.rank is None:
        return True
    return spec.dtype.is_floating and None in spec.shape[1:][-1:]
