"""The operations by which a worker uses the variables at servers."""

import tensorflow as tf

from keras_sparsity.asynchronous.batches import Batches
from keras_sparsity.asynchronous.cells import Cell, destroyed
from keras_sparsity.asynchronous.clocks import Clocks
from keras_sparsity.asynchronous.rule import updated
from keras_sparsity.asynchronous.server_state import ServerState
from keras_sparsity.update.compensation import compensated


class Operations:
    """Operations of a session's graph, for a `Store`.

    Each method makes those of one call: `(feeds, fetches, *targets)`. Names of
    variables are their `id`s.

    Args:
        cluster, rank, optimizer, bound, is_staleness_aware, compensation, name,
            wire: as for `Store`.
        stored: list of `Stored`.

    Attributes:
        servers: dict from the numbers of the servers to `ServerState`s.
        counts_steps: whether a push takes the number of the step that it ends,
            and of its batch.
    """

    def __init__(
        self,
        cluster,
        rank,
        optimizer,
        stored,
        bound,
        is_staleness_aware,
        compensation,
        name,
        wire,
    ):
        self._optimizer, self._rank, self._wire = optimizer, rank, wire
        self._is_staleness_aware = is_staleness_aware
        self._compensation = compensation
        # The count of a server that comes back is found by the steps.
        self.counts_steps = bound is not None or cluster.returns
        self._stored = stored
        self._of = {id(each.variable): each for each in stored}
        # Of the first server too, whose count is the version of the model.
        self._first = cluster.owners[0]
        pieces = sum((each.pieces for each in stored), [])
        of_rank = cluster.num_workers, rank
        self.servers = {
            number: ServerState(
                cluster.device(number), *of_rank, name, self._updated
            )
            for number in sorted({self._first, *(p.server for p in pieces)})
        }
        self._make_cells(name)
        device = cluster.device(cluster.scheduler)
        self._clocks = Clocks(device, *of_rank, bound, f"{name}/clocks")
        self.restore_token = self._clocks.restore
        self._batches = Batches(device, *of_rank, f"{name}/batches")
        self.take, self.end = self._batches.take, self._batches.end
        self.leave = self._batches.leave

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

    def _device(self, piece):
        return self.servers[piece.server].device

    def _cells(self, name, number=None):
        """The devices and cells of a variable or slot, piece by piece."""
        return [
            (self._device(piece), piece.cells[name])
            for stored in self._stored
            for piece in stored.pieces
            if name in piece.cells and number in (None, piece.server)
        ]

    def assign(self, name, number=None):
        """Of the pieces at all servers, or at one."""
        feeds, assigned = [], []
        for device, cell in self._cells(name, number):
            with tf.device(device):
                feeds.append(tf.compat.v1.placeholder(cell.dtype, cell.shape))
                assigned.append(cell.assign(feeds[-1]))
        return feeds, [], *assigned

    def read(self, name):
        values = []
        for device, cell in self._cells(name):
            with tf.device(device):
                values.append(cell.read())
        return [], values

    def fill(self, name, number=None):
        filled = []
        for device, cell in self._cells(name, number):
            with tf.device(device):
                filled.append(cell.fill(0))
        return [], [], *filled

    def assign_block(self, name, index, number=None):
        """Of one of the pieces: the first row, and rows from there on."""
        device, cell = self._cells(name, number)[index]
        with tf.device(device):
            first = tf.compat.v1.placeholder(tf.int64, [])
            shape = None, *cell.shape[1:]
            rows = tf.compat.v1.placeholder(cell.dtype, shape)
            ids = first + tf.range(tf.shape(rows, tf.int64)[0])
            return [first, rows], [], cell.assign_rows(ids, rows)

    def read_block(self, name, index):
        """Of one of the pieces: the first row, and that behind the last."""
        device, cell = self._cells(name)[index]
        with tf.device(device):
            ends = [tf.compat.v1.placeholder(tf.int64, []) for _ in range(2)]
            return ends, [cell.read(tf.range(*ends))]

    def count(self):
        value = tf.compat.v1.placeholder(tf.int64, [])
        servers = self.servers.values()
        return [value], [], *(server.set_count(value) for server in servers)

    def take_place(self, number):
        """Feeds: the count of all updates before this epoch."""
        begun = tf.compat.v1.placeholder(tf.int64, [])
        told = begun, *self._clocks.ended(), self._batches.lost
        return [begun], [], *self.servers[number].take_place(*told)

    def version(self):
        return [], [self.servers[self._first].version]

    def records(self):
        return [], [self._batches.records]

    def finish(self):
        return [], [self._clocks.finish(self._rank)]

    def over(self):
        return [], [self._clocks.over()]

    def destroy(self):
        freed = [self._clocks.destroy(), self._batches.destroy()]
        freed += [server.destroy() for server in self.servers.values()]
        for stored in self._stored:
            for piece in stored.pieces:
                with tf.device(self._device(piece)):
                    cells = piece.cells.values()
                    freed.append(destroyed(*(cell.handle for cell in cells)))
        return [], [], *freed

    def wait(self):
        return [], [self._clocks.begin()]

    def pull(self, waits, *names):
        waited = [self._clocks.begin()] if waits else []
        feeds, of_rows = self._lookups(names)
        whole = [each for each in self._stored if not each.is_of_rows]
        parts = [(piece, None) for each in whole for piece in each.pieces]
        with tf.control_dependencies(waited):
            values, version = self._read([*parts, *of_rows])
        return feeds, [version, *values, *waited]

    def rows(self, name):
        feeds, parts = self._lookups([name])
        values, version = self._read(parts)
        return feeds, [version, *values]

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
        for number, server in self.servers.items():
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

    def push(self, *names):
        feeds, gradients = [], {number: [] for number in self.servers}
        for stored in (self._of[name] for name in names):
            for piece in stored.pieces:
                with tf.device(self._device(piece)):
                    sent, decoded = self._pushed(piece, stored.is_of_rows)
                feeds += sent
                gradients[piece.server].append((piece, *decoded))
        facts, counts = [], []
        for number, server in self.servers.items():
            of_server, count = server.push(gradients[number])
            facts, counts = [*facts, *of_server], [*counts, count]
        steps, ended = [], []
        if self.counts_steps:
            with tf.device(self._clocks.device):
                steps = [tf.compat.v1.placeholder(tf.int64, [2])]
                told = tf.unstack(*steps)
            with tf.control_dependencies(counts):
                ended = [self._clocks.end(*told)]
        return [*steps, *facts, *feeds], counts, *ended

    def end_step(self):
        """Of one that pushes nothing; feeds: the number of the step."""
        with tf.device(self._clocks.device):
            number = tf.compat.v1.placeholder(tf.int64, [])
        return [number], [self._clocks.end(number)]

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
