"""Messages among all ranks by way of a server, without those that are lost."""

import logging
import pickle
import time

import numpy as np
import tensorflow as tf

from keras_sparsity._tf.tf_sessions import function_of
from keras_sparsity.asynchronous import servers as tf_servers
from keras_sparsity.asynchronous.cells import Cell, after, locked, tokens
from keras_sparsity.asynchronous.interruptible import Interruptible
from keras_sparsity.collectives.base import Collectives, end_groups
from keras_sparsity.collectives.engine import Engine
from keras_sparsity.collectives.startup import go_on_by, single_process
from keras_sparsity.collectives.wire import Wire
from keras_sparsity.health import journal, launcher, watch
from keras_sparsity.machines import door
from keras_sparsity.machines.topology import Topology

# Between two looks of a process that waits to join.
_LOOK_SECONDS = 0.02
_NONE = -1
_REDUCE = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}

_lasting = {}  # from `Collectives` to those that outlast lost workers
_letters = {}  # from these to their `Letters`


def lasting(collectives):
    """The same ranks, by way of the first dedicated server.

    From now on the loss of a worker does not end the others. A message is that
    of the ranks that are left. All ranks call it together.
    """
    if collectives not in _lasting:
        servers = tf_servers.started(collectives)
        letters = Letters(servers, collectives)
        servers.add(letters)
        _tell_launcher(servers, collectives)
        end_groups(collectives)
        # The engine, which may not outlast a loss, has but one message left.
        watch.go_on_without(range(collectives.num_workers), servers.change)
        collectives.barrier("servers/lasting")
        made = _among(letters, range(collectives.size), collectives)
        tf_servers.share(made, servers)
        _lasting[collectives] = _lasting[made] = made
        _letters[made] = letters
        go_on_by(made)
    return _lasting[collectives]


def _tell_launcher(servers, collectives):
    """Connects, before a process is lost; says how new processes join."""
    facts = problem = None
    if servers.is_first:
        if door.is_wanted():
            facts = {
                "size": collectives.size,
                "servers": collectives.num_servers,
                "machines": collectives.machines,
                "addresses": servers.addresses,
                "watch": watch.open_door(collectives.size),
            }
        launcher.tell(collectives.rank, facts=facts)
        problem = launcher.problem(collectives.rank)
    problems = collectives.gather_objects(problem, "servers/launcher")
    if any(problems) and collectives.rank == 0:
        logging.getLogger(__name__).warning(
            "The loss of a process will end the run, as the launcher will not "
            "hear that the others go on. %s",
            *filter(None, problems),
        )


def joining(collectives):
    """The `Letters` of a process that has not joined the others; or None."""
    letters = _letters.get(collectives)
    return letters if letters is not None and letters.is_alone else None


def admitting(collectives, fit, epoch):
    """A function that lets processes join that wait for it, for `Servers`.

    Args:
        fit: the number of the `fit` that runs.
        epoch: the epoch that begins; None for the first one, which none joins.
    """
    letters = _letters.get(collectives)
    return (lambda: letters.admit(fit, epoch)) if letters else (lambda: [])


def left(collectives):
    """Those of `collectives` that are not lost, numbered anew.

    All ranks call it together.
    """
    letters = _letters.get(collectives)
    if letters is None:
        return collectives
    if letters.is_alone:
        return single_process()
    ranks = collectives.gather_objects(collectives.rank, "asynchronous/left")
    if len(ranks) == collectives.size:
        return collectives
    return _among(letters, ranks, collectives)


def _among(letters, ranks, collectives):
    ranks = list(ranks)
    return Collectives(
        Meeting(letters, ranks, collectives.engine),
        Topology(ranks.index(collectives.rank), len(ranks)),
        journal=journal.current(),
        machines=tuple(collectives.machines[rank] for rank in ranks),
        num_servers=collectives.num_servers,
    )


class Letters:
    """Small messages among the ranks that are not lost.

    A rank writes its letter, and waits until each other rank has written its
    own, or is lost. It needs two places for letters: a rank writes its second
    next one when all have written the next, and so have read this one. While it
    waits it sleeps, until a letter, or a loss, rings its bell.

    A new process of a lost rank is alone at first: it has its own letters. It
    waits to be admitted, which happens at the beginning of an epoch, and the
    others wait for its next letter from then on. That of a server takes the
    earlier one's place within an epoch. The first owner of `Servers` has the
    letters.
    """

    def __init__(self, servers, collectives):
        self.rank, self.size = collectives.rank, collectives.size
        self._count, self._first = 0, servers.owners[0]
        self.is_alone = door.facts() is not None
        graph = tf.Graph()
        session = servers.session(graph)
        with graph.as_default(), tf.device(servers.device(servers.owners[0])):
            self._make_cells()
            begin = function_of(session, [], [], self._begun())
            self._make_calls(session)
            self._make_joining(session)
        if servers.is_first:
            begin()
        collectives.barrier("servers/meeting")

    def _make_cells(self):
        self._mutex = tf.raw_ops.MutexV2(shared_name="meeting/mutex")
        self._numbers = Cell("meeting/numbers", tf.int64, [self.size])
        self._lost = Cell("meeting/lost", tf.bool, [self.size])
        self._fit = Cell("meeting/fit", tf.int64, [])  # that runs
        # The `fit` that a rank waits to join, and the epoch in which it may.
        self._asks = Cell("meeting/asks", tf.int64, [self.size])
        self._epochs = Cell("meeting/epochs", tf.int64, [self.size])
        ranks = range(self.size)
        self._letters = [
            [Cell(f"meeting/{rank}/{i}", tf.string, []) for i in range(2)]
            for rank in ranks
        ]
        self._bells = [tokens(f"meeting/{rank}/bell") for rank in ranks]

    def _begun(self):
        letters = [cell.fill("") for cell in sum(self._letters, [])]
        asks = [self._asks.fill(_NONE), self._epochs.fill(_NONE)]
        numbers, fit = self._numbers.fill(0), self._fit.fill(_NONE)
        return [self._lost.fill(False), numbers, fit, *asks, *letters]

    def _make_calls(self, session):
        number = tf.compat.v1.placeholder(tf.int64, [])
        letter = tf.compat.v1.placeholder(tf.string, [])
        rank = tf.compat.v1.placeholder(tf.int64, [])
        self._put, self._take = [], []
        for place in range(2):
            written = self._written(place, letter, number)
            self._put.append(function_of(session, [number, letter], [written]))
            read = [letters[place].read() for letters in self._letters]
            self._take.append(function_of(session, [], read))
        seen = locked(
            self._mutex, lambda: [self._numbers.read(), self._lost.read()]
        )
        self._look = function_of(session, [], seen)
        bell = self._bells[self.rank]
        self._sleep = Interruptible(function_of(session, [], [bell.dequeue()]))
        left = locked(self._mutex, lambda: self._left(rank))
        self.leave_out = function_of(session, [rank], [left])

    def _written(self, place, letter, number):
        def written():
            is_lost = self._lost.read()[self.rank]
            before = self._numbers.read()[self.rank]
            # The others may have gone on without it.
            kept = tf.where(is_lost, before, number)
            # Rung before this rank looks.
            bell = self._bells[self.rank]
            put = [
                self._letters[self.rank][place].assign(letter),
                self._numbers.set(self.rank, kept),
                bell.dequeue_many(bell.size()),
            ]
            with tf.control_dependencies(put):
                return after(self._rung(), is_lost)

        return locked(self._mutex, written)

    def _left(self, rank):
        told = [self._lost.set(rank, True), self._asks.set(rank, _NONE)]
        with tf.control_dependencies(told):
            return after(self._rung(), rank)

    def _rung(self):
        """Has all ranks look again."""
        one = tf.zeros([], tf.int64)
        return [bell.enqueue(one) for bell in self._bells]

    def _make_joining(self, session):
        rank, fit, epoch, count = (
            tf.compat.v1.placeholder(tf.int64, []) for _ in range(4)
        )

        def asked():
            none = self._epochs.set(self.rank, _NONE)
            return after([none, self._asks.set(self.rank, fit)], fit)

        def admitted():
            told = [
                self._lost.set(rank, False),
                self._asks.set(rank, _NONE),
                self._numbers.set(rank, count),
                self._epochs.set(rank, epoch),
            ]
            return after(told, rank)

        def call(feeds, build):
            return function_of(session, feeds, [locked(self._mutex, build)])

        self._ask = call([fit], asked)
        self._admit = call([rank, count, epoch], admitted)
        self._read_asks = call([], self._asks.read)
        self._tell = function_of(session, [fit], [], [self._fit.assign(fit)])
        cells = self._epochs, self._numbers, self._fit
        seen = locked(self._mutex, lambda: [cell.read() for cell in cells])
        self._see = function_of(session, [], seen)

    def admit(self, fit, epoch):
        """Lets ranks join, and returns their numbers.

        On the first owner, while all wait for its letter.
        """
        if epoch is None:
            self._tell(fit)
            return []
        (asks,) = self._read_asks()
        ranks = np.flatnonzero(asks == fit).tolist()
        for rank in ranks:
            # Some still wait for all letters of this number, now for its, too.
            self._admit(rank, self._count - 1, epoch)
        return ranks

    def wait(self, fit):
        """The epoch in which this process may join a `fit`, once it may.

        None if the others run a later one.
        """
        self._ask(fit)
        while True:
            epochs, numbers, running = self._see()
            if epochs[self.rank] != _NONE:
                self._joins_at = numbers[self.rank]
                return int(epochs[self.rank])
            if running > fit:
                return None
            time.sleep(_LOOK_SECONDS)

    def join(self):
        """Takes part from now on."""
        self._count, self.is_alone = int(self._joins_at), False
        watch.joined()

    def runs(self, fit):
        """Whether the others run a `fit`."""
        return self._see()[-1] == fit

    def take_place(self):
        """Takes part from now on, as a server; while the first one waits.

        That has not put the letter at the end of the epoch; the server that was
        lost may have.
        """
        _, numbers, _ = self._see()
        self._joins_at = numbers[self._first]
        self.join()

    def leave_out_at(self, number, ranks):
        """Only the first server has letters."""

    def gather(self, name, value):
        """dict from a rank to its value, of all that are not lost."""
        if self.is_alone:
            return {self.rank: value}
        self._count += 1
        place = self._count % 2
        (is_lost,) = self._put[place](self._count, pickle.dumps((name, value)))
        if is_lost:
            raise_of_lost(self.rank)
        while True:
            numbers, lost = self._look()
            is_there = numbers >= self._count
            if (is_there | lost).all():
                break
            self._sleep()
        letters = self._take[place]()
        found = {
            rank: pickle.loads(letters[rank])
            for rank in np.flatnonzero(is_there).tolist()
        }
        names = {rank: name for rank, (name, _) in found.items()}
        if set(names.values()) != {name}:
            raise ValueError(
                f"All ranks must make the same calls. Received: {names}. "
                "Remove calls that one rank makes alone (`if rank == 0:`)."
            )
        return {rank: value for rank, (_, value) in found.items()}


class Meeting(Engine):
    """An engine of small eager messages by `Letters`.

    Args:
        ranks: those that are members.
        name: the name of the engine of the run.
    """

    reduces_means = True  # of the ranks that are left

    def __init__(self, letters, ranks, name):
        self._letters, self._ranks, self.name = letters, ranks, name
        self.rank, self.size = ranks.index(letters.rank), len(ranks)

    def reduce_wire(self, dtype):
        return Wire(dtype, dtype)

    move_wire = reduce_wire

    def _values(self, name, tensor):
        if not tf.executing_eagerly():
            raise ValueError(
                "Workers that pull and push by themselves have no steps "
                f"together. Received: the collective '{name}' in a traced "
                "function. Call it outside of the function."
            )
        value = None if tensor is None else tensor.numpy()
        return self._letters.gather(name, value)

    def all_reduce(self, flat, op, name):
        values = list(self._values(name, flat).values())
        return tf.constant(_REDUCE[op](values, axis=0), flat.dtype)

    def all_gather(self, rows, name, counts=None):
        del counts
        values = list(self._values(name, rows).values())
        return tf.constant(np.concatenate(values), rows.dtype)

    def broadcast(self, flat, root, name):
        root, values = self._ranks[root], {}
        while root not in values:
            is_root = root == self._letters.rank
            values = self._values(name, flat if is_root else None)
            if root not in values:  # Of the first rank that is left.
                root, values = min(values), {}
        return tf.constant(values[root], flat.dtype)

    def all_to_all(self, rows, splits, name):
        raise ValueError(
            "With all variables at servers, ranks exchange no rows. Received: "
            f"the collective '{name}'. Use `delay=\"fixed\"`, or `all_gather`."
        )

    all_to_all_along = all_to_all

    def split(self, groups, label):
        self.all_to_all(None, None, label)

    def abort(self, message):
        pass

    def close(self):
        pass


def raise_of_lost(rank):
    """Raises RuntimeError on a worker that the others take for lost."""
    raise RuntimeError(
        f"The others go on without rank {rank}, which was not heard of for "
        "longer than the timeout (KERAS_SPARSITY_TIMEOUT). Its batch was "
        "given to another worker."
    )
