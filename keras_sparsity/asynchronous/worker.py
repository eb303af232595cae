"""A worker's step: weights are pulled before, gradients pushed after it."""

import contextlib
import types

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers, patches, tf_graphs
from keras_sparsity._tf.current_variable import read_by
from keras_sparsity._tf.numpy_functions import NumpyFunctions
from keras_sparsity.asynchronous import batches
from keras_sparsity.asynchronous.pulled_rows import PulledRows, rows_of
from keras_sparsity.asynchronous.pushing import Pushing
from keras_sparsity.asynchronous.waiting import noted
from keras_sparsity.collectives.startup import single_process
from keras_sparsity.placement import slices
from keras_sparsity.tables import foreseen
from keras_sparsity.training import scouting
from keras_sparsity.update.step import Clipping


class Worker:
    """Trains a model on its own batches, with weights and rows at servers.

    Args:
        layers: list of the model's `Embedding`s whose rows travel.

    Attributes:
        batch: the number of the batch in training.
        is_bounded: whether this worker waits for slower ones before a step.
        pushing: `Pushing`.
    """

    def __init__(self, model, layers, store):
        self._model, self._optimizer = model, model.optimizer
        self._store = store
        strategy = model.distribute_strategy
        self._rank = strategy.collectives.rank
        self._wire = strategy.options.wire
        self._compensates = strategy.delay_compensation is not None
        self._keepers = [self._keeper(layer) for layer in layers]
        # By the `id`s of what reads them.
        self._readers = {id(k.variable.value): k for k in self._keepers}
        self._numpy_function = NumpyFunctions()
        self._versions = []  # of the pulls of this step
        self._arrived = []  # a tensor that comes with the step's weights
        self._has_applied = False  # in the step in tracing
        self.pushing = Pushing(
            # A worker without others trains as stock Keras does.
            overlaps=strategy.collectives.num_workers > 1,
            # Else all wait for it.
            holds=strategy.max_staleness != 0,
        )
        self.begin_epoch()

    def begin_epoch(self):
        """Begins to wait for slower workers."""
        self.batch, self.is_bounded = batches.NONE, True
        self._has_pushed = False  # in the step under way

    def begin(self):
        """Pushes the gradients that the optimizer is to apply."""
        # In place of the optimizer's own, until `release`.
        self._optimizer.__dict__["apply"] = self._push

    def release(self, raises):
        """Gives the optimizer its own updates back; see `Pushing.close`."""
        self._optimizer.__dict__.pop("apply", None)
        self.pushing.close(raises)

    def _keeper(self, layer):
        variable = layer.embeddings
        read = self._store.rows_of(variable)

        def pull(ids):
            version, rows = read(ids)
            self._versions.append(version)
            return rows

        def read_version():
            # `_pull` assigns it.
            iterations = keras_optimizers.iterations(self._optimizer)
            return tf.convert_to_tensor(iterations.value)

        return PulledRows(
            *(variable, pull, read_version, layer.name, self._compensates),
            self._wire(variable.dtype),
        )

    def step(self, step, batch):
        """A training step on rows at servers.

        Those of the ids that the batch tells come with the other weights.
        Returns the logs of `step`, the model's.
        """

        def reading(batch):
            self._has_applied = False
            refusing = patches.assignments_are_told(self._refuse_assigned)
            with read_by(self._readers), refusing:
                return step(batch)

        with self._keeping():
            scouted, lookups, is_all = None, {}, True
            if self._keepers and not tf.executing_eagerly():
                told = self._model, reading, batch, self._rank == 0
                scouted = scouting.scouted_step(*told)
            if scouted is not None:
                lookups, is_all = scouted.known(), scouted.knows_all()
            rows = self._pull(list(lookups.values()), is_all)
            if not lookups:
                return reading(batch)
            given = scouted.given(dict(zip(lookups, rows, strict=True)))
            with foreseen.by(given):
                return reading(batch)

    def end_step(self):
        """Ends a step behind it; it may have pushed nothing."""
        if not self._has_pushed:
            self.pushing.wait()
            self._store.end_step()
        self._has_pushed = False

    def _refuse_assigned(self, variable):
        """Raises ValueError if servers have a variable that a step assigns."""
        if any(variable is each for each in self._model.trainable_variables):
            raise ValueError(
                "Servers have the trained variables, and a value that a step "
                "assigns here would be lost at the next pull. Received: a "
                f"layer or step that assigns '{variable.path}', as "
                "`keras.layers.SpectralNormalization` does. Leave it out, or "
                'use `delay="fixed"`.'
            )

    @contextlib.contextmanager
    def _keeping(self):
        """While entered, variables of rows are neither read whole nor set."""
        for keeper in self._keepers:
            keeper.variable.value.keeper = keeper
        try:
            yield
        finally:
            for keeper in self._keepers:
                keeper.variable.value.keeper = None
                keeper.end_trace()

    def _pull(self, lookups, is_all):
        """Pulls, by one request to each server.

        Args:
            lookups: list of `(PulledRows, ids, dtype)`.
            is_all: whether no other lookups are known to come; they pull their
                rows beside this request.

        Returns:
            The rows of each.
        """
        keepers = [keeper for keeper, *_ in lookups]
        dense = self._store.dense
        wires = [self._wire(variable.dtype) for variable in dense]

        def pulled(*values):
            if is_all:
                self._begin_step(False)
            ids = values[len(begun) :]
            return self._pulled(keepers, ids, is_all and self.is_bounded)

        begun = [] if is_all else [self._begin_traces()]
        wires_of_rows = [keeper.wire for keeper in keepers]
        dtypes = [wire.dtype for wire in [*wires, *wires_of_rows]]
        # Eagerly a single result comes without a list.
        version, *values = tf.nest.flatten(
            self._numpy_function(
                pulled,
                [*begun, *(ids for _, ids, _ in lookups)],
                [tf.int64, *dtypes],
                # Operations with state wait for each other: the other lookups'
                # ids may be drawn by one.
                stateful=is_all,
            )
        )
        self._arrived = [version]
        values, rows = values[: len(dense)], values[len(dense) :]
        for variable, wire, value in zip(dense, wires, values, strict=True):
            variable.assign(tf.ensure_shape(wire.decode(value), variable.shape))
        # Of which schedules make the learning rate.
        keras_optimizers.iterations(self._optimizer).assign(
            tf.ensure_shape(version, [])
        )
        rows = [k.wire.decode(r) for k, r in zip(keepers, rows, strict=True)]
        for keeper, of_lookup in zip(keepers, rows, strict=True):
            of_lookup.set_shape([None, keeper.dim])
        return rows

    def _begin_traces(self):
        """Has lookups to come pull their rows when the step has begun.

        Returns a tensor that is there by then.
        """

        def begun():
            self._begin_step(True)
            return np.int64(0)

        begin = self._numpy_function(begun, [], tf.int64)
        for keeper in self._keepers:
            keeper.begin_trace(begin)
        return begin

    def _begin_step(self, waits):
        for keeper in self._keepers:
            keeper.forget()
        self._versions = []
        if waits and self.is_bounded:
            self.pushing.let_go()
            noted(self._rank, self._store.wait)

    def _pulled(self, keepers, ids, waits):
        self.pushing.let_go()
        lookups = [(k.variable, i) for k, i in zip(keepers, ids, strict=True)]
        version, *values = noted(
            self._rank, lambda: self._store.pull(waits, lookups)
        )
        self._versions.append(version)
        rows = values[len(values) - len(ids) :]
        for keeper, *pulled in zip(keepers, ids, rows, strict=True):
            keeper.keep(*pulled)
        return [version, *values]

    def _push(self, grads, trainable_variables=None):
        """In place of `optimizer.apply`."""
        if self._has_applied:
            raise ValueError(
                "A step applies gradients twice, and servers take one push of "
                "each batch. Received: a second `optimizer.apply`. Apply all "
                'gradients by one call, or use `delay="fixed"`.'
            )
        self._has_applied = True
        if trainable_variables is None:
            trainable_variables = keras_optimizers.built_variables(
                self._optimizer
            )
        grads, variables = keras_optimizers.without_missing_gradients(
            self._optimizer, list(grads), list(trainable_variables)
        )
        push = self._store.pusher(variables)
        of_rows = {id(keeper.variable): keeper for keeper in self._keepers}
        keepers = [of_rows.get(id(variable)) for variable in variables]

        def pushed(rate, *values):
            values, sent = iter(values), []
            for keeper, part in zip(keepers, parts, strict=True):
                part = [next(values) for _ in part]
                sent += part if keeper is None else keeper.looked_up(*part)
            version, self._has_pushed = min(self._versions), True
            self.pushing.begin(push, self.batch, version, rate, *sent)
            return np.int64(0)

        # Gradients may not depend on weights, nor on the rows that these look
        # up.
        arriving = sum((k.arriving for k in self._keepers), self._arrived)
        with tf.control_dependencies([*tf_graphs.calls_so_far(), *arriving]):
            parts = self._parts(grads, variables, keepers)
            rate = tf.cast(self._optimizer.learning_rate, tf.float32)
            sent = [rate, *sum(parts, [])]
            self._numpy_function(pushed, sent, tf.int64)

    def _parts(self, grads, variables, keepers):
        """What a push carries of each variable, see `Store.pusher`."""
        ids, values = [], []
        for gradient, keeper in zip(grads, keepers, strict=True):
            ids.append([])
            if keeper is not None:
                gradient = slices.merged(rows_of(gradient))
                ids[-1] = [tf.cast(gradient.indices, tf.int64)]
                gradient = gradient.values
            values.append(tf.convert_to_tensor(gradient))
        parts = []
        for variable, keeper, rows, value in zip(
            variables, keepers, ids, self._clipped(values), strict=True
        ):
            wire = self._wire(variable.dtype)
            parts.append([*rows, wire.encode(value)])
            if self._compensates and rows:
                parts[-1].append(keeper.read(*rows))
            elif self._compensates:
                read = tf.convert_to_tensor(variable.value)
                parts[-1].append(wire.encode(read))
        return parts

    def _clipped(self, values):
        """Of one batch, a worker has all gradients."""
        wholes = [types.SimpleNamespace(whole=object()) for _ in values]
        clipping = Clipping(single_process(), [])
        return clipping.clip(self._optimizer, values, wholes)
