"""One `fit`: pulls before each step, pushes instead of updates."""

import contextlib
import pickle
import time
import types

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._tf import (
    keras_models,
    keras_optimizers,
    keras_variables,
    patches,
    tf_graphs,
)
from keras_sparsity._tf.current_variable import make_current, read_by
from keras_sparsity.asynchronous import batches, meeting, rule, servers
from keras_sparsity.asynchronous.pulled_rows import PulledRows, rows_of
from keras_sparsity.asynchronous.pushing import Pushing
from keras_sparsity.asynchronous.store import Store
from keras_sparsity.collectives.startup import single_process
from keras_sparsity.global_batch import metrics as global_metrics
from keras_sparsity.global_batch import random_states
from keras_sparsity.placement import slices
from keras_sparsity.tables import foreseen
from keras_sparsity.training import scouting
from keras_sparsity.update.clip import Clipping

# Between two looks of a dedicated server at the workers' epoch.
_LOOK_SECONDS = 0.1


class Training:
    """A model's training by this worker, from its weights on rank 0.

    All ranks make it, and call `end_epoch` and `end`, together.

    Args:
        model: a built model.
        number: which `Training` of this process it is.

    Attributes:
        store: `Store`.
        pushing: `Pushing`.
    """

    def __init__(self, model, number):
        self._model, self._optimizer = model, model.optimizer
        self._number = number
        strategy = model.distribute_strategy
        self._collectives = strategy.collectives
        self._layers = _looked_up(model)
        rule.check(
            self._optimizer,
            strategy.optimizer_options["sparse_updates"],
            [layer.name for layer in self._layers],
        )
        variables = model.trainable_variables
        rule.check_constraints(variables)
        if not self._optimizer.built:
            self._optimizer.build(variables)
        self._servers = servers.started(self._collectives)
        self.store = Store(
            self._servers,
            self._collectives.rank,
            self._optimizer,
            variables,
            [layer.embeddings for layer in self._layers],
            strategy.max_staleness,
            strategy.staleness_aware,
            strategy.delay_compensation,
            f"training/{number}",
            strategy.options.wire,
        )
        self._wire = strategy.options.wire
        self._compensates = strategy.delay_compensation is not None
        self._keepers = [self._keeper(layer) for layer in self._layers]
        # By the `id`s of what reads them.
        self._readers = {id(k.variable.value): k for k in self._keepers}
        self.batch = batches.NONE  # the number of the one in training
        # Whether this worker waits for slower ones before a step.
        self.is_bounded = True
        self._versions = []  # of what this step has pulled
        self._is_pushed = False  # in the step under way
        # A worker without others trains as stock Keras does.
        self.pushing = Pushing(self._collectives.num_workers > 1)
        self._seen = None  # at the last `record`
        self._is_begun = False
        if self._servers.is_first:
            self.store.create()
        self._servers.add(self.store)
        # In place of the optimizer's own, until `release`.
        self._optimizer.__dict__["apply"] = self._push

    def _begin(self):
        # Not before: a checkpoint may have been read since.
        self._upload()
        own = self._own_values()
        values = self._collectives.broadcast(
            [tf.convert_to_tensor(v.value) for v in own],
            name="asynchronous/begin",
        )
        for variable, value in zip(own, values, strict=True):
            variable.assign(value)

    def _upload(self):
        """Gives the servers the values of the first worker that is left."""
        rank, name = self._collectives.rank, "asynchronous/upload"
        first, ranks = None, self._collectives.gather_objects(rank, name)
        while first not in ranks:
            first = ranks[0]
            if rank == first:
                self.store.upload()
            ranks = self._collectives.gather_objects(rank, name)

    def _own_values(self):
        """Variables that no rule updates, such as moving averages."""
        return [
            v
            for v in self._model.non_trainable_variables
            if not random_states.is_own(v) and tf.as_dtype(v.dtype).is_floating
        ]

    def _keeper(self, layer):
        variable = layer.embeddings

        read = self.store.rows_of(variable)

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

    # A step.

    def step(self, step, batch):
        """A training step on rows at servers.

        Those of the ids that the batch tells come with the other weights.

        Args:
            step: function of a batch, that of the model.
            batch: structure of tensors.

        Returns:
            The step's logs.
        """

        def reading(batch):
            self._is_pushed = False
            refusing = patches.assignments_are_told(self._refuse_assigned)
            with read_by(self._readers), refusing:
                return step(batch)

        with self._keeping():
            scouted, lookups, is_all = None, {}, True
            if self._keepers and not tf.executing_eagerly():
                is_first = self._collectives.rank == 0
                told = self._model, reading, batch, is_first
                scouted = scouting.scouted_step(*told)
            if scouted is not None:
                lookups, is_all = scouted.known(), scouted.knows_all()
            rows = self._pull(list(lookups.values()), is_all)
            if not lookups:
                return reading(batch)
            given = scouted.given(dict(zip(lookups, rows, strict=True)))
            with foreseen.by(given):
                return reading(batch)

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
        dense = self.store.dense
        keepers = [keeper for keeper, *_ in lookups]
        wires = [self._wire(variable.dtype) for variable in dense]

        def begun():
            self._begin_step(True)
            return np.int64(0)

        def pulled(*ids):
            if is_all:
                self._begin_step(False)
            return self._pulled(keepers, ids, is_all and self.is_bounded)

        if not is_all:
            begin = tf.numpy_function(begun, [], tf.int64, stateful=True)
            for keeper in self._keepers:
                keeper.begin_trace(begin)
        dtypes = [
            tf.int64,
            *(wire.dtype for wire in wires),
            *(keeper.wire.dtype for keeper in keepers),
        ]
        # Eagerly a single result comes without a list.
        version, *values = tf.nest.flatten(
            tf.numpy_function(
                *(pulled, [ids for _, ids, _ in lookups], dtypes),
                stateful=True,
            )
        )
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

    def _begin_step(self, waits):
        for keeper in self._keepers:
            keeper.forget()
        self._versions = []
        if waits and self.is_bounded:
            self.store.wait()

    def _pulled(self, keepers, ids, waits):
        version, *values = self.store.pull(
            waits,
            [(k.variable, i) for k, i in zip(keepers, ids, strict=True)],
        )
        self._versions.append(version)
        rows = values[len(values) - len(ids) :]
        for keeper, *pulled in zip(keepers, ids, rows, strict=True):
            keeper.keep(*pulled)
        return [version, *values]

    def _push(self, grads, trainable_variables=None):
        """In place of `optimizer.apply`."""
        if self._is_pushed:
            raise ValueError(
                "A step applies gradients twice, and servers take one push of "
                "each batch. Received: a second `optimizer.apply`. Apply all "
                'gradients by one call, or use `delay="fixed"`.'
            )
        self._is_pushed = True
        if trainable_variables is None:
            trainable_variables = keras_optimizers.built_variables(
                self._optimizer
            )
        grads, variables = keras_optimizers.without_missing_gradients(
            self._optimizer, list(grads), list(trainable_variables)
        )
        push = self.store.pusher(variables)
        of_rows = {id(keeper.variable): keeper for keeper in self._keepers}
        keepers = [of_rows.get(id(variable)) for variable in variables]

        def pushed(rate, *values):
            values, sent = iter(values), []
            for keeper, part in zip(keepers, parts, strict=True):
                part = [next(values) for _ in part]
                sent += part if keeper is None else keeper.looked_up(*part)
            version = min(self._versions)
            self.pushing.begin(push, self.batch, version, rate, *sent)
            return np.int64(0)

        # Gradients may not depend on the rows that these look up.
        arriving = sum((keeper.arriving for keeper in self._keepers), [])
        with tf.control_dependencies([*tf_graphs.calls_so_far(), *arriving]):
            parts = self._parts(grads, variables, keepers)
            rate = tf.cast(self._optimizer.learning_rate, tf.float32)
            sent = [rate, *sum(parts, [])]
            tf.numpy_function(pushed, sent, tf.int64, stateful=True)

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

    def record(self):
        """This worker's part of the epoch so far, as bytes.

        It is that of the batches whose pushes have ended: without the last one
        while its push is under way. Then it is called once.
        """
        has_ended = self.pushing.has_ended(self.batch)
        metrics = global_metrics.sent(self._model.metrics, self._collectives)
        seen = self.batch, [value.numpy() for value in metrics]
        batch, values = seen if has_ended else self._seen
        self._seen = seen
        contents = pickle.dumps(
            {
                "rank": self._collectives.rank,
                "metrics": values,
                "staleness": dict(self.pushing.staleness),
                "waiting_seconds": self.store.waiting_seconds,
                "servers": self.store.traffic,
            }
        )
        return batches.record(batch, contents)

    # All ranks together.

    def begin_epoch(self, epoch, progress):
        """Begins an epoch, of which processes may take part that are new.

        Args:
            epoch: its number.
            progress: this rank's `Progress`.
        """
        joins = meeting.joining(self._collectives)
        if joins:
            joins.join()
            self._collectives.barrier("asynchronous/epoch/ended")
            # It may be the one that saves them next.
            self.store.download()
        else:
            if not self._is_begun:
                self._begin()
                epoch = None
            # All have read the values and the records of the last one.
            self._collectives.barrier("asynchronous/epoch/ended")
            told = self._collectives, self._number, epoch
            self._servers.begin_epoch(self.store, meeting.admitting(*told))
        self._is_begun = True
        self._tell_new(joins is not None, progress)
        self.batch, self.is_bounded = batches.NONE, True

    def _tell_new(self, is_new, progress):
        """All begin together; gives new processes what they do not know."""
        rank, gather = self._collectives.rank, self._collectives.gather_objects
        own = self._own_values()
        while True:
            ranks = gather((rank, is_new), "asynchronous/epoch/begin")
            if not any(new for _, new in ranks):
                return
            # Again, if this rank is lost meanwhile. Servers are not new.
            first = min(each for each, new in ranks if not new)
            told = progress.state(own) if rank == first else None
            for state in filter(None, gather(told, "asynchronous/joined")):
                if is_new:
                    progress.take(state, own)
                is_new = False

    def end_epoch(self):
        """Takes the weights after all updates, and means of own values.

        Returns:
            The version of the weights, and the records of all workers that took
            a batch.
        """
        is_server = self._collectives.is_server
        if is_server:
            while not self.store.is_over():
                time.sleep(_LOOK_SECONDS)
        else:
            self.pushing.wait()
            self.store.leave(self.record())
            self.store.finish()
        own = [] if is_server else self._own_values()
        of_ranks = self._collectives.gather_objects(
            (
                [keras.ops.convert_to_numpy(v) for v in own],
                bool(self._model.stop_training),
            ),
            "asynchronous/epoch",
        )
        self.pushing.staleness.clear()
        self.store.begin_figures()
        if any(stops for _, stops in of_ranks):
            self._model.stop_training = True
        version = self.store.download()
        values = [values for values, _ in of_ranks if values]
        for variable, *of_each in zip(self._own_values(), *values, strict=True):
            variable.assign(np.mean(of_each, 0, of_each[0].dtype))
        contents = map(batches.contents_of, self.store.records())
        records = [pickle.loads(each) for each in contents if each]
        # Before its first batch a worker's metrics may have no variables.
        return version, [each for each in records if each["staleness"]]

    def end(self):
        """Frees the servers' variables."""
        self._collectives.barrier("asynchronous/end")
        self._servers.remove(self.store)
        if self._servers.is_first:
            self.store.destroy()
        self.store.close()

    def release(self, raises):
        """Gives the optimizer its own updates back; see `Pushing.close`."""
        self._optimizer.__dict__.pop("apply", None)
        self.pushing.close(raises)


def _looked_up(model):
    """The `Embedding`s that read rows of a trained variable of their own."""
    stock = keras.layers.Embedding
    found = []
    for layer in keras_models.all_layers(model):
        if not isinstance(layer, stock) or type(layer).call is not stock.call:
            continue
        variable = layer.embeddings
        # A tensor, if the layer has LoRA or was quantized.
        if keras_variables.is_variable(variable) and variable.trainable:
            # It may have been made outside of the scope.
            make_current(variable.value)
            found.append(layer)
    return found
