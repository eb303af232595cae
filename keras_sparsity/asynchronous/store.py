"""A model's variables at the servers, and the operations of a worker."""

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity.asynchronous.batches import LOST, Batches
from keras_sparsity.asynchronous.cells import Cell, function_of
from keras_sparsity.asynchronous.clocks import Clocks
from keras_sparsity.asynchronous.meeting import raise_of_lost
from keras_sparsity.asynchronous.rule import updated
from keras_sparsity.asynchronous.server_state import ServerState
from keras_sparsity.asynchronous.stored import joined, placed
from keras_sparsity.board.epoch_figures import ServerTraffic
from keras_sparsity.update.compensation import compensated


class Store:
    """The variables of a model in training.

    Each server holds variables, or pieces of them, with their slots, and counts
    the pushes that it has applied. A push, and a read of its variables, holds
    the server's mutex: what is read is the version that is named by the count.

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
        wire: function of a dtype to the `Wire` by which it travels in a step.
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
        wire,
    ):
        self._is_staleness_aware = is_staleness_aware
        self._is_bounded = bound is not None
        self._compensation, self._wire = compensation, wire
        self._optimizer, self._rank = optimizer, rank
        self._stored = placed(optimizer, variables, of_rows, servers.owners)
        self._of = {id(each.variable): each for each in self._stored}
        # Of the first server too, whose count is the version of the model.
        self._first = servers.owners[0]
        pieces = sum((stored.pieces for stored in self._stored), [])
        numbers = sorted({self._first, *(p.server for p in pieces)})
        self._graph = tf.Graph()
        self._session = servers.session(self._graph)
        self._calls = {}
        of_rank = servers.num_workers, rank
        with self._graph.as_default():
            self._servers = {
                number: ServerState(
                    servers.device(number), *of_rank, name, self._updated
                )
                for number in numbers
            }
            self._make_cells(name)
            device = servers.device(self._first)
            self._clocks = Clocks(device, *of_rank, bound, f"{name}/clocks")
            self._batches = Batches(device, *of_rank, f"{name}/batches")
        self.begin_figures()
        # Called from another thread, when no other operation is made.
        self._call(("leave_out",), self._made_leave_out)

    def _make_cells(self, name):
        for index, stored in enumerate(self._stored):
            for part, variable in enumerate([stored.variable, *stored.slots]):
                for piece in stored.pieces:
                    with tf.device(self._device(piece)):
                        piece.cells[id(variable)] = Cell(
                            f"{name}/{index}/{part}",
                            variable.dtype,
                            piece.shape,
                        )

    def begin_figures(self):
        """Counts from zero: `waiting_seconds`, and `traffic` by server."""
        self.waiting_seconds = 0.0
        self.traffic = {number: ServerTraffic() for number in self._servers}

    @property
    def dense(self):
        """The variables that a pull reads whole, in its order."""
        return [s.variable for s in self._in_order(of_rows=False)]

    # What a worker does. From any thread.

    def upload(self):
        """Gives the servers all values of this process; by one worker."""
        for stored in self._stored:
            for variable in [stored.variable, *stored.slots]:
                value = keras.ops.convert_to_numpy(variable)
                assign = self._call(("assign", id(variable)), self._made_assign)
                assign(*(value[piece.rows] for piece in stored.pieces))
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
                parts = self._call(key, self._made_read)()
                rows = [piece.rows for piece in stored.pieces]
                variable.assign(joined(rows, parts, tuple(variable.shape)))
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
        """Takes a batch, see `Batches.take`."""
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

    def pull(self, is_bounded=True, lookups=()):
        """Waits for the bound, then reads `dense` and rows, all at once.

        Here and in `rows` and `pusher` values are encoded as they travel.

        Args:
            is_bounded: whether it waits.
            lookups: list of `(variable, row numbers)`.

        Returns:
            `[version, *values, *rows]`.
        """
        names = [id(variable) for variable, _ in lookups]
        cuts = self._cuts(lookups)
        waits = is_bounded and self._is_bounded
        version, *parts = self._call(("pull", waits, *names), self._made_pull)(
            *_sent(cuts)
        )
        if waits:
            self.waiting_seconds += float(parts.pop())
        whole, parts = self._in_order(of_rows=False), iter(parts)
        return [
            version,
            *(self._joined(stored, parts) for stored in whole),
            *self._rows(lookups, cuts, parts),
        ]

    def rows(self, variable, ids):
        """Rows of a variable, by their numbers."""
        lookups = [(variable, ids)]
        cuts = self._cuts(lookups)
        parts = self._call(("rows", id(variable)), self._made_rows)
        return self._rows(lookups, cuts, iter(parts(*_sent(cuts))))[0]

    def _cuts(self, lookups):
        return [
            self._of[id(variable)].cut(ids.astype(np.int64, copy=False))
            for variable, ids in lookups
        ]

    def _rows(self, lookups, cuts, parts):
        """The rows of lookups; `parts` iterates over those of the pieces."""
        found = []
        for (variable, ids), cut in zip(lookups, cuts, strict=True):
            places = [place for _, place in cut]
            shape = len(ids), *variable.shape[1:]
            of_pieces = self._counted(self._of[id(variable)], parts)
            found.append(joined(places, of_pieces, shape))
        return found

    def _joined(self, stored, parts):
        rows = [piece.rows for piece in stored.pieces]
        of_pieces = self._counted(stored, parts)
        return joined(rows, of_pieces, tuple(stored.variable.shape))

    def _counted(self, stored, parts):
        """Takes the parts of a variable, and counts their bytes."""
        found = [next(parts) for _ in stored.pieces]
        for piece, part in zip(stored.pieces, found, strict=True):
            self.traffic[piece.server].pulled_bytes += part.nbytes
        return found

    def pusher(self, variables):
        """A function that applies gradients of some variables.

        It takes the batch's number, the version of the pull, the learning rate
        and, for each variable, the gradient, or the row numbers (no row twice)
        and the rows' gradients, and with `compensation` the weights, or rows,
        that the worker has read; and returns the version before.
        """
        push = self._call(("push", *map(id, variables)), self._made_push)
        has_read = self._compensation is not None

        def push_all(batch, version, rate, *values):
            values, sent = iter(values), []
            for stored in (self._of[id(variable)] for variable in variables):
                ids = next(values) if stored.is_of_rows else None
                given = [next(values) for _ in range(1 + has_read)]
                sent += self._sent_pieces(stored, ids, given)
            facts = [batch, version, rate] * len(self._servers)
            before = push(*facts, *sent)
            if LOST in before:
                # It may not have been told yet, nor `Batches`, which would
                # take the batch for one that has ended.
                raise_of_lost(self._rank)
            for traffic in self.traffic.values():
                traffic.num_updates += 1
            return before[0]

        return push_all

    def _sent_pieces(self, stored, ids, values):
        """For each piece in turn, its row numbers and its part of values."""
        if ids is None:
            cut = [([], piece.rows) for piece in stored.pieces]
        else:
            cut = [([ids], place) for ids, place in stored.cut(ids)]
        sent = []
        for piece, (numbers, place) in zip(stored.pieces, cut, strict=True):
            of_piece = [*numbers, *(value[place] for value in values)]
            num_bytes = sum(value.nbytes for value in of_piece)
            self.traffic[piece.server].pushed_bytes += num_bytes
            sent += of_piece
        return sent

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

    def _device(self, piece):
        return self._servers[piece.server].device

    def _cells(self, name):
        """The devices and cells of a variable or slot, piece by piece."""
        return [
            (self._device(piece), piece.cells[name])
            for stored in self._stored
            for piece in stored.pieces
            if name in piece.cells
        ]

    def _made_assign(self, name):
        feeds, assigned = [], []
        for device, cell in self._cells(name):
            with tf.device(device):
                feeds.append(tf.compat.v1.placeholder(cell.dtype, cell.shape))
                assigned.append(cell.assign(feeds[-1]))
        return feeds, [], *assigned

    def _made_read(self, name):
        values = []
        for device, cell in self._cells(name):
            with tf.device(device):
                values.append(cell.read())
        return [], values

    def _made_count(self):
        value = tf.compat.v1.placeholder(tf.int64, [])
        servers = self._servers.values()
        return [value], [], *(server.set_count(value) for server in servers)

    def _made_create(self):
        servers = self._servers.values()
        return [], [], self._batches.create, *(s.create for s in servers)

    def _made_reset(self):
        begun = [self._clocks.reset, self._batches.reset]
        return [], [], *begun, *(s.reset for s in self._servers.values())

    def _made_leave_out(self):
        rank = tf.compat.v1.placeholder(tf.int64, [])
        told = [server.leave_out(rank) for server in self._servers.values()]
        with tf.control_dependencies(told):
            return [rank], [
                self._batches.leave_out(rank),
                self._clocks.finish(rank),
            ]

    def _made_welcome(self):
        rank = tf.compat.v1.placeholder(tf.int64, [])
        welcomed = [server.welcome(rank) for server in self._servers.values()]
        return [rank], [], self._batches.welcome(rank), *welcomed

    def _made_version(self):
        return [], [self._servers[self._first].version]

    def _made_destroy(self):
        destroyed = []
        for stored in self._stored:
            for piece in stored.pieces:
                with tf.device(self._device(piece)):
                    cells = piece.cells.values()
                    destroyed += [cell.destroy() for cell in cells]
        return [], [], *destroyed

    def _made_pull(self, waits, *names):
        waited = [self._clocks.begin()] if waits else []
        feeds, of_rows = self._lookups(names)
        whole = self._in_order(of_rows=False)
        parts = [(piece, None) for each in whole for piece in each.pieces]
        with tf.control_dependencies(waited):
            values, version = self._read([*parts, *of_rows])
        return feeds, [version, *values, *waited]

    def _made_rows(self, name):
        feeds, parts = self._lookups([name])
        return feeds, self._read(parts)[0]

    def _lookups(self, names):
        """Placeholders for row numbers, and `(Piece, row numbers)`."""
        parts = []
        for piece in sum((self._of[name].pieces for name in names), []):
            with tf.device(self._device(piece)):
                ids = tf.compat.v1.placeholder(tf.int64, [None])
            parts.append((piece, ids))
        return [ids for _, ids in parts], parts

    def _read(self, parts):
        """The values of `(Piece, row numbers or None)`, and the version."""
        values, counts = {}, []
        for number, server in self._servers.items():
            places = [
                place
                for place, (piece, _) in enumerate(parts)
                if piece.server == number
            ]
            count, *found = server.read([parts[place] for place in places])
            with tf.device(server.device):
                found = [self._wire(each.dtype).encode(each) for each in found]
            values.update(zip(places, found, strict=True))
            counts.append(count)
        return [values[place] for place in range(len(parts))], counts[0]

    def _made_push(self, *names):
        feeds, gradients = [], {number: [] for number in self._servers}
        for stored in (self._of[name] for name in names):
            for piece in stored.pieces:
                with tf.device(self._device(piece)):
                    sent, decoded = self._pushed(piece, stored.is_of_rows)
                feeds += sent
                gradients[piece.server].append((piece, *decoded))
        facts, counts = [], []
        for number, server in self._servers.items():
            of_server, count = server.push(gradients[number])
            facts, counts = [*facts, *of_server], [*counts, count]
        ended = []
        if self._is_bounded:
            with tf.control_dependencies(counts):
                ended = [self._clocks.end()]
        return [*facts, *feeds], counts, *ended

    def _pushed(self, piece, is_of_rows):
        """Placeholders: row numbers, the gradient, the weights or rows read.

        Returns:
            List of them; and list of the row numbers or None, and of the
            others decoded.
        """
        shape, ids = piece.shape, []
        if is_of_rows:
            shape = (None, *shape[1:])
            ids = [tf.compat.v1.placeholder(tf.int64, [None])]
        wire = self._wire(piece.variable.dtype)
        values = [
            tf.compat.v1.placeholder(wire.dtype, shape)
            for _ in range(1 + (self._compensation is not None))
        ]
        decoded = [wire.decode(value) for value in values]
        return [*ids, *values], [*(ids or [None]), *decoded]

    def _updated(self, gradients, count, version, rate):
        """Operations that update variables of a server."""
        if self._is_staleness_aware:
            rate /= tf.cast(tf.maximum(count - version, 1), rate.dtype)
        if self._compensation is not None:
            gradients = [self._compensated(*sent) for sent in gradients]
        return updated(self._optimizer, gradients, rate, count)

    def _compensated(self, piece, ids, gradient, read):
        now, strength = piece.cell.read(ids), self._compensation
        return piece, ids, compensated(gradient, strength, now, read)


def _sent(cuts):
    return [ids for cut in cuts for ids, _ in cut]
