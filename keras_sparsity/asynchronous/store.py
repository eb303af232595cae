"""A model's variables at the servers, and the operations of a worker."""

import math

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity.asynchronous.batches import Batches
from keras_sparsity.asynchronous.cells import Cell, function_of, locked
from keras_sparsity.asynchronous.clocks import Clocks
from keras_sparsity.asynchronous.rule import updated
from keras_sparsity.asynchronous.stored import placed
from keras_sparsity.board.epoch_figures import ServerTraffic
from keras_sparsity.update.compensation import compensated


class Store:
    """The variables of a model in training.

    Each server holds whole variables with their slots, and counts the pushes
    that it has applied. A push, and a read of its variables, holds the
    server's mutex: what is read is the version that is named by the count.

    Args:
        servers: `Servers`.
        rank: this worker.
        optimizer: a built Keras optimizer.
        of_rows: the variables of which rows travel.
        bound: see `Clocks`.
        is_staleness_aware: whether a push's learning rate is divided by the
            number of updates since its pull.
        compensation: the strength of `compensated`, or None.
        name: begins the names by which workers share it.
    """

    def __init__(
        self,
        servers,
        rank,
        optimizer,
        variables,
        of_rows,
        bound,
        is_staleness_aware,
        compensation,
        name,
    ):
        self._is_staleness_aware = is_staleness_aware
        self._compensation = compensation
        self._optimizer, self._rank = optimizer, rank
        self._stored = placed(optimizer, variables, of_rows, servers.owners)
        self._of = {id(each.variable): each for each in self._stored}
        # Of the first server too, whose count is the version of the model.
        self._first = servers.owners[0]
        self._numbers = sorted({self._first, *(s.server for s in self._stored)})
        self._device, self._size = servers.device, servers.num_workers
        self._graph = tf.Graph()
        self._session = servers.session(self._graph)
        self._calls = {}
        with self._graph.as_default():
            self._make_cells(name)
            place = servers.device(self._first), self._size, rank
            self._clocks = Clocks(*place, bound, f"{name}/clocks")
            self._batches = Batches(*place, f"{name}/batches")
        self.begin_figures()
        # Called from another thread, when no other operation is made.
        self._call(("leave_out",), self._made_leave_out)

    def _make_cells(self, name):
        self._mutexes, self._counts = {}, {}
        self._lost, self._applied_last = {}, {}
        for number in self._numbers:
            with tf.device(self._device(number)):
                self._mutexes[number] = tf.raw_ops.MutexV2(
                    shared_name=f"{name}/mutex"
                )
                self._counts[number] = Cell(f"{name}/count", tf.int64, [])
                # Whose pushes are not applied any more, and of which batch
                # each worker's last one was.
                self._lost[number] = Cell(f"{name}/lost", tf.bool, [self._size])
                self._applied_last[number] = Cell(
                    f"{name}/last", tf.int64, [self._size]
                )
        for index, stored in enumerate(self._stored):
            with tf.device(self._device(stored.server)):
                for part, variable in enumerate(
                    [stored.variable, *stored.slots]
                ):
                    stored.cells[id(variable)] = Cell(
                        f"{name}/{index}/{part}", variable.dtype, variable.shape
                    )

    def begin_figures(self):
        """Counts from zero: `waiting_seconds`, and `traffic` by server."""
        self.waiting_seconds = 0.0
        self.traffic = {number: ServerTraffic() for number in self._numbers}

    @property
    def dense(self):
        """The variables that a pull reads whole, in its order."""
        return [s.variable for s in self._in_order(of_rows=False)]

    # What a worker does. From any thread.

    def upload(self):
        """Gives the servers all values of this process; by one worker."""
        for stored in self._stored:
            for variable in [stored.variable, *stored.slots]:
                self._call(("assign", id(variable)), self._made_assign)(
                    keras.ops.convert_to_numpy(variable)
                )
        iterations = int(self._optimizer.iterations)
        self._call(("count",), self._made_count)(np.int64(iterations))

    def create(self):
        """Begins the facts about workers; by one process, before all others."""
        self._call(("create",), self._made_create)()
        self.reset()

    def download(self):
        """Takes all values; no worker pushes meanwhile.

        Returns:
            The version: the number of updates.
        """
        for stored in self._stored:
            for variable in [stored.variable, *stored.slots]:
                key = ("read", id(variable))
                (value,) = self._call(key, self._made_read)()
                variable.assign(value)
        (version,) = self._call(("version",), self._made_version)()
        self._optimizer.iterations.assign(version)
        return int(version)

    def destroy(self):
        """Frees the servers' memory; by one worker, when all are done."""
        self._call(("destroy",), self._made_destroy)()

    def close(self):
        """Ends this worker's session."""
        self._session.close()

    def reset(self):
        """Begins an epoch; by one process, while all wait."""
        self._call(("reset",), self._made_reset)()

    def leave_out(self, rank):
        """From now on, nothing that a worker pushes is applied.

        Then its batch is handed out again. From any thread.
        """
        self._calls[("leave_out",)](rank)

    def welcome(self, rank):
        """A lost worker's new process may push again; while all wait."""
        self._call(("welcome",), self._made_welcome)(rank)

    def take(self, record):
        """Takes a batch, see `Batches.take`; the one before is done."""
        number, held = self._call(("take",), self._batches.take)(record)
        return int(number), {int(h) for h in held if h >= 0}

    def end_data(self, number):
        """Tells that the data has so many batches."""
        self._call(("end",), self._batches.end)(number)

    def leave(self, record):
        """The batch before is done, and this worker takes no other."""
        self._call(("leave",), self._batches.leave)(record)

    def records(self):
        """The last record of each worker of the epoch, empty for none."""
        of_workers = self._call(
            ("records",), lambda: ([], [self._batches.records])
        )
        return list(of_workers()[0])

    def finish(self):
        """Others do not wait for this worker any more in this epoch."""
        self._call(
            ("finish",), lambda: ([], [self._clocks.finish(self._rank)])
        )()

    def is_over(self):
        """Whether all workers have finished, or are lost."""
        done = self._call(("is_over",), lambda: ([], [self._clocks.are_done]))
        return bool(done()[0])

    def pull(self, is_bounded=True):
        """Waits for the bound, then reads `dense`.

        Returns:
            `[clocks of all workers, version, *values]`.
        """
        asked, begun, *results = self._call(
            ("pull", is_bounded), self._made_pull
        )()
        self.waiting_seconds += float(begun - asked)
        for stored in self._in_order(of_rows=False):
            num_bytes = math.prod(stored.variable.shape) * stored.num_bytes
            self.traffic[stored.server].pulled_bytes += num_bytes
        return results

    def rows(self, variable, ids):
        """Rows of a variable, by their numbers."""
        key = ("rows", id(variable))
        rows = self._call(key, self._made_rows)(ids)[0]
        traffic = self.traffic[self._of[id(variable)].server]
        traffic.pulled_bytes += rows.nbytes
        return rows

    def pusher(self, variables):
        """A function that applies gradients of some variables.

        It takes the batch's number, the version of the pull, the learning rate
        and, for each variable, the gradient, or the row numbers (no row twice)
        and the rows' gradients, and with `compensation` the weights, or rows,
        that the worker has read; and returns `[version before, clocks after]`.
        """
        push = self._call(("push", *map(id, variables)), self._made_push)
        numbers = []  # the server of each value
        has_read = self._compensation is not None
        for stored in (self._of[id(variable)] for variable in variables):
            numbers += [stored.server] * (1 + stored.is_of_rows + has_read)

        def counted(batch, version, rate, *values):
            results = push(batch, version, rate, *values)
            for traffic in self.traffic.values():
                traffic.num_updates += 1
            for number, value in zip(numbers, values, strict=True):
                self.traffic[number].pushed_bytes += value.nbytes
            return results

        return counted

    # Their operations.

    def _call(self, key, make):
        """The callable of `(feeds, fetches, targets)`, made once."""
        if key not in self._calls:
            with self._graph.as_default():
                feeds, fetches, *targets = make(*key[1:])
                self._calls[key] = function_of(
                    self._session, feeds, fetches, targets
                )
        return self._calls[key]

    def _in_order(self, of_rows):
        return [s for s in self._stored if s.is_of_rows == of_rows]

    def _cell_of(self, name):
        return next(
            (stored, stored.cells[name])
            for stored in self._stored
            if name in stored.cells
        )

    def _made_assign(self, name):
        stored, cell = self._cell_of(name)
        with tf.device(self._device(stored.server)):
            value = tf.compat.v1.placeholder(cell.dtype, cell.shape)
            return [value], [], cell.assign(value)

    def _made_read(self, name):
        stored, cell = self._cell_of(name)
        with tf.device(self._device(stored.server)):
            return [], [cell.read()]

    def _made_count(self):
        value = tf.compat.v1.placeholder(tf.int64, [])
        assigned = []
        for number, count in self._counts.items():
            with tf.device(self._device(number)):
                assigned.append(count.assign(value))
        return [value], [], *assigned

    def _made_create(self):
        created = [self._batches.create]
        for number in self._numbers:
            with tf.device(self._device(number)):
                created.append(self._lost[number].fill(False))
        return [], [], *created

    def _made_reset(self):
        begun = [self._clocks.reset, self._batches.reset]
        for number in self._numbers:
            with tf.device(self._device(number)):
                begun.append(self._applied_last[number].fill(-1))
        return [], [], *begun

    def _made_leave_out(self):
        rank = tf.compat.v1.placeholder(tf.int64, [])
        told = []
        for number in self._numbers:
            with tf.device(self._device(number)):
                here = tf.identity(rank)

                def leave(here=here, lost=self._lost[number]):
                    with tf.control_dependencies([lost.set(here, True)]):
                        return tf.identity(here)

                with tf.control_dependencies([here]):
                    told.append(locked(self._mutexes[number], leave))
        with tf.control_dependencies(told):
            return [rank], [
                self._batches.leave_out(rank),
                self._clocks.finish(rank),
            ]

    def _made_welcome(self):
        rank = tf.compat.v1.placeholder(tf.int64, [])
        welcomed = [self._batches.welcome(rank)]
        for number in self._numbers:
            with tf.device(self._device(number)):
                welcomed.append(self._lost[number].set(rank, False))
        return [rank], [], *welcomed

    def _made_version(self):
        with tf.device(self._device(self._first)):
            return [], [self._counts[self._first].read()]

    def _made_destroy(self):
        destroyed = []
        for stored in self._stored:
            with tf.device(self._device(stored.server)):
                destroyed += [cell.destroy() for cell in stored.cells.values()]
        return [], [], *destroyed

    def _made_pull(self, is_bounded):
        times, clocks = self._clocks.begin(is_bounded)
        dense, values, version = self._in_order(of_rows=False), {}, None
        with tf.control_dependencies([clocks]):
            for number in self._numbers:
                here = [s for s in dense if s.server == number]

                def read(here=here, number=number):
                    return [
                        self._counts[number].read(),
                        *(s.cell.read() for s in here),
                    ]

                with tf.device(self._device(number)):
                    count, *read_here = locked(self._mutexes[number], read)
                version = count if number == self._first else version
                values.update(zip(map(id, here), read_here, strict=True))
        return [], [*times, clocks, version, *(values[id(s)] for s in dense)]

    def _made_rows(self, name):
        stored, cell = self._cell_of(name)
        with tf.device(self._device(stored.server)):
            ids = tf.compat.v1.placeholder(tf.int64, [None])
            rows = locked(self._mutexes[stored.server], lambda: cell.rows(ids))
            return [ids], [rows]

    def _made_push(self, *names):
        facts = [
            tf.compat.v1.placeholder(dtype, [])
            for dtype in (tf.int64, tf.int64, tf.float32)
        ]
        feeds, gradients = list(facts), {}
        for stored in (self._of[name] for name in names):
            shape, dtype = stored.variable.shape, stored.variable.dtype
            with tf.device(self._device(stored.server)):
                ids = None
                if stored.is_of_rows:
                    ids = tf.compat.v1.placeholder(tf.int64, [None])
                    feeds.append(ids)
                    shape = (None, *shape[1:])
                value, *read = [
                    tf.compat.v1.placeholder(dtype, shape)
                    for _ in range(1 + (self._compensation is not None))
                ]
            feeds += [value, *read]
            sent = (stored, ids, value, *read)
            gradients.setdefault(stored.server, []).append(sent)
        counts = []
        for number in self._numbers:
            here = gradients.get(number, [])
            with tf.device(self._device(number)):
                sent = [tf.identity(fact) for fact in facts]

                def apply(here=here, number=number, sent=sent):
                    return self._applied_once(here, number, *sent)

                with tf.control_dependencies(sent):
                    counts.append(locked(self._mutexes[number], apply))
        with tf.control_dependencies(counts):
            clocks = self._clocks.end()
        return feeds, [counts[0], clocks]

    def _applied_once(self, gradients, number, batch, version, rate):
        """Updates variables of a server; returns its count before.

        Not if this worker is lost, or another one has pushed the same batch
        and was lost then.
        """
        last = self._applied_last[number]
        is_lost, before = self._lost[number].read()[self._rank], last.read()
        is_due = ~is_lost & tf.reduce_all(tf.not_equal(before, batch))

        def apply():
            count = self._applied(gradients, number, version, rate)
            with tf.control_dependencies([count]):
                noted = last.set(self._rank, batch)
            with tf.control_dependencies([noted]):
                return tf.identity(count)

        # If this worker is lost meanwhile, TensorFlow begins no function any
        # more, and ends those that it has begun: all of it, or nothing.
        return tf.cond(is_due, apply, self._counts[number].read)

    def _applied(self, gradients, number, version, rate):
        """Updates variables of a server; returns its count before."""
        count = self._counts[number].read()
        if self._is_staleness_aware:
            rate /= tf.cast(tf.maximum(count - version, 1), rate.dtype)
        if self._compensation is not None:
            gradients = [self._compensated(*sent) for sent in gradients]
        assigned = updated(self._optimizer, gradients, rate, count)
        with tf.control_dependencies(assigned):
            counted = self._counts[number].assign(count + 1)
        with tf.control_dependencies([counted]):
            return tf.identity(count)

    def _compensated(self, stored, ids, gradient, read):
        now = stored.cell.read() if ids is None else stored.cell.rows(ids)
        strength = self._compensation
        return stored, ids, compensated(gradient, strength, now, read)
