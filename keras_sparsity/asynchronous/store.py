"""A model's variables at the servers, as a worker uses them."""

import threading

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity.asynchronous.batches import LOST
from keras_sparsity.asynchronous.interruptible import Interruptible
from keras_sparsity.asynchronous.letters import raise_of_lost
from keras_sparsity.asynchronous.operations import Operations
from keras_sparsity.asynchronous.sessions import LastingSession
from keras_sparsity.asynchronous.stored import joined, num_bytes, placed
from keras_sparsity.board.epoch_figures import ServerTraffic

# A message of TensorFlow's servers has at most 2 GiB.
_BLOCK_BYTES = 256 * 2**20


class Store:
    """The variables of a model in training.

    Each server holds variables, or pieces of them, with their slots, and counts
    the pushes that it has applied. A push, and a read of its variables, holds
    the server's mutex: what is read is the version that is named by the count.

    Calls are made again when a lost server has come back: by what they do, or
    by numbers that they tell, the second time changes nothing.

    Args:
        cluster: `Cluster`.
        rank: this worker.
        optimizer: a built Keras optimizer.
        of_rows: the variables of which rows travel.
        bound: see `Clocks`.
        is_staleness_aware: whether a push's learning rate is divided by the
            number of updates since its pull.
        compensation: the strength of `compensated`, or None.
        name: begins the names by which workers share it.
        wire: function of a dtype to the `Wire` by which it travels in a step.

    Attributes:
        name, bound: the arguments.
    """

    def __init__(
        self,
        cluster,
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
        self.name, self.bound = name, bound
        self._is_bounded = bound is not None
        self._sends_read = compensation is not None
        self._optimizer, self._rank = optimizer, rank
        self._stored = placed(optimizer, variables, of_rows, cluster.owners)
        self._of = {id(each.variable): each for each in self._stored}
        self._whole = [each for each in self._stored if not each.is_of_rows]
        self._graph = tf.Graph()
        self._session = LastingSession(cluster, self._graph)
        self._calls = {}
        self._counting = threading.Lock()  # Rows may come beside a pull.
        with self._graph.as_default():
            self._operations = Operations(
                *(cluster, rank, optimizer, self._stored, bound),
                *(is_staleness_aware, compensation, name, wire),
            )
        self.begin_figures()
        # Called from another thread, when no other operation is made.
        if self._is_bounded and rank < cluster.num_workers:
            self._give_token = self._call(self._operations.restore_token)

    def begin_figures(self):
        """Counts from zero: `waiting_seconds`, and `traffic` by server.

        And the steps of the epoch that this worker has begun, and ended.
        """
        self._num_begun = self._num_ended = 0
        self.waiting_seconds = 0.0
        self.traffic = {
            number: ServerTraffic() for number in self._operations.servers
        }

    @property
    def numbers(self):
        """The servers that have its variables, by rank."""
        return list(self._operations.servers)

    @property
    def dense(self):
        """The variables that a pull reads whole, in its order."""
        return [stored.variable for stored in self._whole]

    @property
    def variables(self):
        """All that servers have: variables, their slots, and the count."""
        found = [[each.variable, *each.slots] for each in self._stored]
        return [*sum(found, []), self._optimizer.iterations]

    def upload(self, names=None):
        """Gives the servers values of this process; by one worker.

        Args:
            names: set of the `id`s of these `variables`; None: of all.
        """
        for stored in self._stored:
            self._assign(stored, stored.pieces, names)
        iterations = self._optimizer.iterations
        if names is None or id(iterations) in names:
            self._call(self._operations.count)(np.int64(int(iterations)))

    def take_place(self, number):
        """Gives a server's new process its values of this process."""
        if number in self._operations.servers:
            for stored in self._stored:
                pieces = [p for p in stored.pieces if p.server == number]
                self._assign(stored, pieces, None, number)
            begun = np.int64(int(self._optimizer.iterations))
            self._call(self._operations.take_place, number)(begun)

    def _assign(self, stored, pieces, names, *server):
        operations = self._operations
        for variable in [stored.variable, *stored.slots] if pieces else []:
            name = id(variable)
            if names is not None and name not in names:
                continue
            value = keras.ops.convert_to_numpy(variable)
            parts = [value[piece.rows] for piece in pieces]
            if not _are_large(pieces, variable):
                self._call(operations.assign, name, *server)(*parts)
                continue
            self._call(operations.fill, name, *server)()
            for index, part in enumerate(parts):
                told = operations.assign_block, name, index, *server
                assign = self._call(*told)
                for first, end in _blocks(part):
                    assign(first, part[first:end])

    def download(self):
        """Takes all values, and returns the version: the number of updates.

        No worker pushes meanwhile.
        """
        for stored in self._stored:
            for variable in [stored.variable, *stored.slots]:
                variable.assign(self._downloaded(stored, variable))
        (version,) = self._call(self._operations.version)()
        self._optimizer.iterations.assign(version)
        return int(version)

    def _downloaded(self, stored, variable):
        shape, rows = tuple(variable.shape), [p.rows for p in stored.pieces]
        operations, name = self._operations, id(variable)
        if not _are_large(stored.pieces, variable):
            return joined(rows, self._call(operations.read, name)(), shape)
        whole = np.empty(shape, tf.as_dtype(variable.dtype).as_numpy_dtype)
        for index, of_piece in enumerate(rows):
            part = whole[of_piece]
            read = self._call(operations.read_block, name, index)
            for first, end in _blocks(part):
                (part[first:end],) = read(first, end)
        return whole

    def destroy(self):
        """Frees the servers' memory; by one worker, when all are done."""
        self._call(self._operations.destroy)()

    def close(self):
        """Ends this worker's session."""
        self._session.close()

    def take(self, record):
        """Takes a batch, see `Batches.take`."""
        number, held = self._call(self._operations.take)(record)
        return int(number), {int(h) for h in held if h >= 0}

    def end_data(self, number):
        """Tells that the data has so many batches."""
        self._call(self._operations.end)(number)

    def leave(self, record):
        """The batch before is done, and this worker takes no other."""
        self._call(self._operations.leave)(record)

    def records(self):
        """The last record of each worker of the epoch, empty for none."""
        return list(self._call(self._operations.records)()[0])

    def finish(self):
        """Others do not wait for this worker any more in this epoch."""
        self._call(self._operations.finish)()

    def wait_until_over(self):
        """Waits until all workers have finished, or are lost."""
        Interruptible(self._call(self._operations.over))()

    def wait(self):
        """Waits for the bound."""
        if self._is_bounded:
            (waited,) = self._call(self._operations.wait)()
            self._begin_step(waited)

    def _begin_step(self, waited):
        self.waiting_seconds += float(waited)
        self._num_begun += 1

    def _restore_token(self):
        self._give_token(self._num_begun)

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
        pull = self._call(self._operations.pull, waits, *names)
        again = {"again": self._restore_token} if waits else {}
        version, *parts = pull(*_sent(cuts), **again)
        if waits:
            self._begin_step(parts.pop())
        parts = iter(parts)
        return [
            version,
            *(self._joined(stored, parts) for stored in self._whole),
            *self._rows(lookups, cuts, parts),
        ]

    def rows_of(self, variable):
        """A function that reads rows of a variable, by their numbers.

        It may be called from several threads, and returns the version, too.
        """
        read = self._call(self._operations.rows, id(variable))

        def rows(ids):
            lookups = [(variable, ids)]
            cuts = self._cuts(lookups)
            version, *parts = read(*_sent(cuts))
            return version, self._rows(lookups, cuts, iter(parts))[0]

        return rows

    def _cuts(self, lookups):
        for variable, ids in lookups:
            _check_is_inside(variable, ids)
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
        with self._counting:
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
        push = self._call(self._operations.push, *map(id, variables))

        def push_all(batch, version, rate, *values):
            values, sent = iter(values), []
            for stored in (self._of[id(variable)] for variable in variables):
                ids = next(values) if stored.is_of_rows else None
                given = [next(values) for _ in range(1 + self._sends_read)]
                sent += self._sent_pieces(stored, ids, given)
            step = self._num_ended + 1, batch
            steps = [step] * self._operations.counts_steps
            facts = [[batch, version], rate] * len(self.traffic)
            before = push(*steps, *facts, *sent)
            if LOST in before:
                # It may not have been told yet, nor `Batches`, which would
                # take the batch for one that has ended.
                raise_of_lost(self._rank)
            self._num_ended += 1
            for traffic in self.traffic.values():
                traffic.num_updates += 1
            # A server that came back may count less than the pull has seen: an
            # update is lost with it, and made again, whose step had not ended.
            return max(before[0], version)

        return push_all

    def end_step(self):
        """Ends a step that pushes nothing, when those before have ended."""
        if self._is_bounded:
            self._call(self._operations.end_step)(self._num_ended + 1)
            self._num_ended += 1

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

    def _call(self, make, *arguments):
        """The callable of `(feeds, fetches, *targets)`, made once."""
        key = make, *arguments
        if key not in self._calls:
            with self._graph.as_default():
                feeds, fetches, *targets = make(*arguments)
                self._calls[key] = self._session.function_of(
                    feeds, fetches, targets
                )
        return self._calls[key]


def _check_is_inside(variable, ids):
    """Raises as the layer itself would; servers know parts alone."""
    num_rows = variable.shape[0]
    outside = ids[(ids < 0) | (ids >= num_rows)]
    if outside.size:
        raise ValueError(
            f"The table '{variable.path}' has the rows [0, {num_rows}). "
            f"Received: the id {outside[0]}. Map such ids to a row of their "
            "own, or give the Embedding more rows."
        )


def _are_large(pieces, variable):
    """Whether the pieces of a variable, or slot, travel in blocks."""
    most = max(num_bytes(piece.shape, variable.dtype) for piece in pieces)
    return most > _BLOCK_BYTES


def _blocks(part):
    """The first row of each block of an array, and that behind its last."""
    number = max(1, _BLOCK_BYTES // part[:1].nbytes)
    for first in range(0, len(part), number):
        yield first, min(first + number, len(part))


def _sent(cuts):
    return [ids for cut in cuts for ids, _ in cut]
