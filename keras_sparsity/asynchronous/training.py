"""One `fit` with variables at servers: its epochs, on all ranks together."""

import contextlib
import logging
import pickle
import threading
import weakref

import keras
import tensorflow as tf

from keras_sparsity._tf import (
    keras_models,
    keras_optimizers,
    keras_variables,
)
from keras_sparsity._tf.current_variable import make_current
from keras_sparsity.asynchronous import batches, meeting, rule, servers
from keras_sparsity.asynchronous.changes import Changes
from keras_sparsity.asynchronous.own_values import OwnValues
from keras_sparsity.asynchronous.registry import Members
from keras_sparsity.asynchronous.store import Store
from keras_sparsity.asynchronous.taking import Taking
from keras_sparsity.asynchronous.waiting import noted
from keras_sparsity.asynchronous.worker import Worker
from keras_sparsity.data.fingerprints import check_alike
from keras_sparsity.global_batch import metrics as global_metrics
from keras_sparsity.global_batch import random_states

# Of a `fit` that has ended by an error; what they have at servers is freed when
# the next one begins, as others may still use it before.
_given_up = []
_warned = weakref.WeakSet()  # layers


class Training:
    """A model's training by this worker, from its weights on rank 0.

    All ranks make it, and call `end_epoch` and `end`, together.

    Args:
        number: which `Training` of this process it is.

    Attributes:
        store: `Store`.
        worker: `Worker`.
        taking: `Taking`.
        logs: dict of this worker's last step of an epoch, as callbacks get it.
        num_steps: the number of the steps that this worker has made in it.
        has_all_metrics: whether the metrics of each rank had their variables
            at the last `end_epoch`.
    """

    def __init__(self, model, number):
        self._model, self._number = model, number
        strategy, optimizer = model.distribute_strategy, model.optimizer
        self._collectives = strategy.collectives
        self._seen = None  # at the last `record`
        self._members = None  # by which this worker leaves after an error
        self.logs, self.num_steps = {}, 0
        self._is_begun = False
        layers, variables = _looked_up(model), model.trainable_variables
        _warn_of_whole(model, self._collectives)
        rule.check(
            optimizer,
            strategy.optimizer_options["sparse_updates"],
            [layer.name for layer in layers],
        )
        rule.check_constraints(variables)
        if not optimizer.built:
            optimizer.build(variables)
        keras_optimizers.check_knows(optimizer, variables)
        self._servers = servers.started(self._collectives)
        # All ranks have come here, and so have given up.
        while _given_up:
            _given_up.pop().free()
        self.store = Store(
            self._servers.cluster,
            self._collectives.rank,
            optimizer,
            variables,
            [layer.embeddings for layer in layers],
            strategy.max_staleness,
            strategy.staleness_aware,
            strategy.delay_compensation,
            f"training/{number}",
            strategy.options.wire,
        )
        self.worker = Worker(model, layers, self.store)
        self.taking = Taking(self)
        self._own_values = OwnValues(model)
        self.changes = Changes(self.store, self._own_values, self._collectives)
        self._servers.begin(self.store)
        self.worker.begin()

    def _begin(self):
        # Not before: a checkpoint may have been read since.
        self._upload()
        own = self._own_values.variables
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

    def record(self):
        """This worker's part of the epoch so far, as bytes.

        It is that of the batches whose pushes have ended: without the last one
        while its push is under way. Then it is called once.
        """
        pushing, before = self.worker.pushing, self._seen
        has_ended = pushing.has_ended(self.worker.batch)
        self.note_step()
        seen = self._seen if has_ended else before
        return self._recorded(seen, pushing.staleness)

    def note_step(self):
        """Notes the state behind the last step, for a later record."""
        metrics = global_metrics.sent(self._model.metrics)
        logs = {k: v for k, v in self.logs.items() if isinstance(v, float)}
        values = [value.numpy() for value in metrics]
        self._seen = self.worker.batch, values, logs, self.num_steps

    def record_of_noted(self, staleness):
        """The record when the push of the step that was noted has ended.

        From any thread, until the next step is noted.

        Args:
            staleness: that of all pushes by then.
        """
        return self._recorded(self._seen, staleness)

    def _recorded(self, seen, staleness):
        batch, values, logs, num_steps = seen
        contents = pickle.dumps(
            {
                "rank": self._collectives.rank,
                "metrics": values,
                "logs": logs,
                "names": list(self.logs),
                "steps": num_steps,
                "staleness": dict(staleness),
                "waiting_seconds": self.store.waiting_seconds,
                "servers": self.store.traffic,
            }
        )
        return batches.record(batch, contents)

    # All ranks together.

    def begin_epoch(self, epoch, progress):
        """Begins an epoch, of which processes may take part that are new."""
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
            self._servers.begin_epoch(self.store, self._number, epoch)
        self._tell_new(joins is not None, progress)
        if not self._is_begun:
            self._is_begun = True
            for variable in self._model.variables:
                if random_states.is_own(variable):
                    random_states.fold_rank(variable, self._collectives.rank)
            self.changes.begin()
        self.worker.begin_epoch()
        self.taking.begin_epoch()
        self.logs, self.num_steps = {}, 0

    def comes_back(self):
        """Whether this process is to take the place of a lost server."""
        is_new = meeting.joining(self._collectives) is not None
        return is_new and self._collectives.is_server

    def serve_steps(self, is_saved):
        """The steps of an epoch begin, or go on; on a server.

        Args:
            is_saved: whether the epoch began with a checkpoint.
        """
        if self.comes_back():
            self.store.take_place(self._collectives.rank)
            meeting.joining(self._collectives).take_place()
            self._is_begun = True
        elif is_saved:
            # All other calls at the beginning of the epoch have ended.
            self._servers.begin_returns()

    def _tell_new(self, is_new, progress):
        """All begin together; gives new processes what they do not know."""
        rank, gather = self._collectives.rank, self._collectives.gather_objects
        own = self._own_values.variables
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

    def begin_steps(self):
        """Begins the steps of an epoch, when callbacks have begun it."""
        if not self.comes_back():  # The others have settled theirs.
            self.changes.settle()
        self._own_values.begin_epoch()

    def end_epoch(self, fingerprints):
        """Takes the weights after all updates, and all workers' own values.

        Returns their version, and the records of all workers that took a batch.

        Args:
            fingerprints: `Fingerprints` of the batches that this worker read.

        Raises:
            ValueError: on every rank, if workers have read different ones.
        """
        is_server = self._collectives.is_server
        if is_server:
            noted(self._collectives.rank, self.store.wait_until_over)
            self._servers.end_returns()
        else:
            self.worker.pushing.wait()
            self.taking.settle()
            self.store.leave(self.record())
            self.store.finish()
        of_ranks = self._collectives.gather_objects(
            {
                "rank": self._collectives.rank,
                "batches": {} if is_server else fingerprints.latest(),
                "own": (self.num_steps, self._own_values.changed()),
                "metrics": len(global_metrics.sent(self._model.metrics)),
            },
            "asynchronous/epoch",
        )
        self.has_all_metrics = len({each["metrics"] for each in of_ranks}) == 1
        check_alike({each["rank"]: each["batches"] for each in of_ranks})
        self.worker.pushing.staleness.clear()
        self.store.begin_figures()
        version = self.store.download()
        self._own_values.combine([each["own"] for each in of_ranks])
        self.changes.begin()
        contents = map(batches.contents_of, self.store.records())
        records = [pickle.loads(each) for each in contents if each]
        # Before its first batch a worker's metrics may have no variables.
        return version, [each for each in records if each["steps"]]

    def give_up(self):
        """After an error: the others do not wait for this worker's batch."""
        self.worker.release(raises=False)
        if self._collectives.size == 1 and self._is_begun:
            # As in stock Keras, the program may go on with the model.
            self.store.download()
        _given_up.append(self)
        if not self._collectives.is_server:
            # In a thread, as a server may be gone.
            threading.Thread(target=self._leave_out, daemon=True).start()

    def _leave_out(self):
        of_store = self.store.name, self.store.numbers, self.store.bound
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            self._members = Members(self._servers.cluster, *of_store)
            self._members.leave_out(self._collectives.rank)

    def end(self):
        """Ends a `fit`; all ranks together."""
        self._collectives.barrier("asynchronous/end")
        self.free()

    def free(self):
        """Frees the servers' memory, and the session with them."""
        self._servers.end(self.store)
        self.store.close()
        if self._members is not None:
            self._members.close()


def _embeddings(model, are_stock):
    """Those `Embedding`s that call as Keras's own, or those that do not."""
    stock = keras.layers.Embedding
    return [
        layer
        for layer in keras_models.all_layers(model)
        if isinstance(layer, stock)
        if (type(layer).call is stock.call) == are_stock
    ]


def _warn_of_whole(model, collectives):
    """Warns, once for each, of `Embedding`s whose tables travel whole."""
    for layer in _embeddings(model, are_stock=False):
        is_told = collectives.rank or layer in _warned
        if layer.trainable and not is_told:
            _warned.add(layer)
            logging.getLogger(__name__).warning(
                "Workers pull and push the whole table of '%s' in each step. "
                "Received: a %s, whose `call` may read more than the rows of "
                "its ids. Use `keras.layers.Embedding` itself, and compute on "
                "its output in another layer.",
                layer.name,
                type(layer).__name__,
            )


def _looked_up(model):
    """The `Embedding`s that read rows of a trained variable of their own."""
    found = []
    for layer in _embeddings(model, are_stock=True):
        variable = layer.embeddings
        # A tensor, if the layer has LoRA or was quantized.
        if keras_variables.is_variable(variable) and variable.trainable:
            # It may have been made outside of the scope.
            make_current(variable.value)
            found.append(layer)
    return found
