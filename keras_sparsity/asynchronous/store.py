"""A model's variables at the servers, and the operations of a worker."""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity.asynchronous.clocks import Cell, Clocks, locked
from keras_sparsity.asynchronous.rule import updated
from keras_sparsity.update.rows import slots_of


@dataclasses.dataclass
class Stored:
    """A variable of the model, and where it is stored.

    Attributes:
        variable: the model's.
        is_of_rows: whether rows of it travel, not all of it.
        server: the number of its server.
        slots: the optimizer's slots of it.
        cells: dict from the `id` of the variable and of its slots to `Cell`s.
    """

    variable: keras.Variable
    is_of_rows: bool
    server: int
    slots: list
    cells: dict = dataclasses.field(default_factory=dict)

    @property
    def cell(self):
        return self.cells[id(self.variable)]


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
        name: begins the names by which workers share it.
    """

    def __init__(
        self, servers, rank, optimizer, variables, of_rows, bound, name
    ):
        self._optimizer = optimizer
        self._stored = _placed(optimizer, variables, of_rows, servers.size)
        self._of = {id(each.variable): each for each in self._stored}
        # Of server 0 too, whose count names the version of the model.
        self._numbers = sorted({0, *(s.server for s in self._stored)})
        self._device = servers.device
        self._graph = tf.Graph()
        self._session = servers.session(self._graph)
        self._calls = {}
        with self._graph.as_default():
            self._make_cells(name)
            self._clocks = Clocks(
                servers.device(0), servers.size, rank, bound, f"{name}/clocks"
            )

    def _make_cells(self, name):
        self._mutexes, self._counts = {}, {}
        for number in self._numbers:
            with tf.device(self._device(number)):
                self._mutexes[number] = tf.raw_ops.MutexV2(
                    shared_name=f"{name}/mutex"
                )
                self._counts[number] = Cell(f"{name}/count", tf.int64, [])
        for index, stored in enumerate(self._stored):
            with tf.device(self._device(stored.server)):
                for part, variable in enumerate(
                    [stored.variable, *stored.slots]
                ):
                    stored.cells[id(variable)] = Cell(
                        f"{name}/{index}/{part}", variable.dtype, variable.shape
                    )

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

    def reset_clocks(self):
        """Begins an epoch; by one worker, while all wait."""
        self._call(("reset",), lambda: ([], [], self._clocks.reset))()

    def claim(self):
        """The number of the next batch of the epoch that nobody has taken."""
        return int(
            self._call(("claim",), lambda: ([], [self._clocks.claim]))()[0]
        )

    def finish(self):
        """This worker takes no further step in this epoch."""
        self._call(("finish",), lambda: ([], [self._clocks.finish]))()

    def pull(self):
        """Waits for the bound, then reads `dense`.

        Returns:
            `[clocks of all workers, version, *values]`.
        """
        return self._call(("pull",), self._made_pull)()

    def rows(self, variable, ids):
        """Rows of a variable, by their numbers."""
        key = ("rows", id(variable))
        return self._call(key, self._made_rows)(ids)[0]

    def pusher(self, variables):
        """A function that applies gradients of some variables.

        It takes the learning rate and, for each variable, the gradient, or
        the row numbers (no row twice) and the rows' gradients; and returns
        `[version before, clocks after]`.
        """
        self._call(("push", *map(id, variables)), self._made_push)
        return self._calls[("push", *map(id, variables))]

    # Their operations.

    def _call(self, key, make):
        """The callable of `(feeds, fetches, targets)`, made once."""
        if key not in self._calls:
            with self._graph.as_default():
                feeds, fetches, *targets = make(*key[1:])
                self._calls[key] = _callable(
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

    def _made_version(self):
        with tf.device(self._device(0)):
            return [], [self._counts[0].read()]

    def _made_destroy(self):
        destroyed = []
        for stored in self._stored:
            with tf.device(self._device(stored.server)):
                destroyed += [cell.destroy() for cell in stored.cells.values()]
        return [], [], *destroyed

    def _made_pull(self):
        clocks = self._clocks.begin()
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
                version = count if number == 0 else version
                values.update(zip(map(id, here), read_here, strict=True))
        return [], [clocks, version, *(values[id(s)] for s in dense)]

    def _made_rows(self, name):
        stored, cell = self._cell_of(name)
        with tf.device(self._device(stored.server)):
            ids = tf.compat.v1.placeholder(tf.int64, [None])
            rows = locked(self._mutexes[stored.server], lambda: cell.rows(ids))
            return [ids], [rows]

    def _made_push(self, *names):
        rate = tf.compat.v1.placeholder(tf.float32, [])
        feeds, gradients = [rate], {}
        for stored in (self._of[name] for name in names):
            shape, dtype = stored.variable.shape, stored.variable.dtype
            with tf.device(self._device(stored.server)):
                ids = None
                if stored.is_of_rows:
                    ids = tf.compat.v1.placeholder(tf.int64, [None])
                    feeds.append(ids)
                    shape = (None, *shape[1:])
                value = tf.compat.v1.placeholder(dtype, shape)
                feeds.append(value)
            gradients.setdefault(stored.server, []).append((stored, ids, value))
        counts = []
        for number in self._numbers:
            here = gradients.get(number, [])

            def apply(here=here, number=number):
                return self._applied(here, number, rate)

            with tf.device(self._device(number)):
                counts.append(locked(self._mutexes[number], apply))
        with tf.control_dependencies(counts):
            clocks = self._clocks.end()
        return feeds, [counts[0], clocks]

    def _applied(self, gradients, number, rate):
        """Updates variables of a server; returns its count before."""
        count = self._counts[number].read()
        assigned = updated(self._optimizer, gradients, rate, count)
        with tf.control_dependencies(assigned):
            counted = self._counts[number].assign(count + 1)
        with tf.control_dependencies([counted]):
            return tf.identity(count)


def _callable(session, feeds, fetches, targets):
    """A function of the feeds' values; returns a list of the fetches'."""
    handle = session.make_callable([*fetches, *targets], feed_list=feeds)
    return lambda *values: handle(*values)[: len(fetches)]


def _placed(optimizer, variables, of_rows, num_servers):
    """`Stored` of all variables: each at the server with the fewest bytes."""
    is_of_rows = {id(v) for v in of_rows}
    slots = list(slots_of(optimizer, variables).values())
    num_bytes = [0] * num_servers
    placed = {}
    for variable in sorted(variables, key=lambda v: -math.prod(v.shape)):
        server = num_bytes.index(min(num_bytes))
        num_bytes[server] += math.prod(variable.shape)
        index = next(i for i, v in enumerate(variables) if v is variable)
        placed[id(variable)] = Stored(
            variable,
            id(variable) in is_of_rows,
            server,
            [of_kind[index] for of_kind in slots],
        )
    return [placed[id(v)] for v in variables]
