"""Messages among all ranks, without those that are lost."""

import functools
import logging

import numpy as np
import tensorflow as tf

from keras_sparsity.asynchronous import servers as tf_servers
from keras_sparsity.asynchronous.letters import Letters
from keras_sparsity.collectives.base import Collectives, end_groups
from keras_sparsity.collectives.engine import Engine
from keras_sparsity.collectives.startup import go_on_by, single_process
from keras_sparsity.collectives.wire import Wire
from keras_sparsity.health import journal, launcher, watch
from keras_sparsity.machines import door
from keras_sparsity.machines.topology import Topology

_REDUCE = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}

_lasting = {}  # from `Collectives` to those that outlast lost workers
_letters = {}  # from these to their `Letters`


def lasting(collectives):
    """The same ranks, by way of the scheduler or the first dedicated server.

    From now on the loss of a worker does not end the others. A message is that
    of the ranks that are left. All ranks call it together.
    """
    if collectives not in _lasting:
        servers = tf_servers.started(collectives)
        letters = Letters(servers, collectives.rank)
        servers.begin_meeting()
        collectives.barrier("servers/meeting")
        _tell_launcher(servers, collectives)
        end_groups(collectives)
        if servers.watch_facts and not servers.is_alone:
            watch.move(
                servers.watch_facts,
                lambda: collectives.barrier("servers/moved"),
            )
        # The engine, which may not outlast a loss, has but one message left.
        watch.go_on_without(range(collectives.num_workers), servers.change)
        collectives.barrier("servers/lasting")
        made = _among(letters, range(collectives.size), collectives)
        tf_servers.share(made, servers)
        _lasting[collectives] = _lasting[made] = made
        _letters[made] = letters
        go_on_by(made, functools.partial(left, made))
    return _lasting[collectives]


def _tell_launcher(servers, collectives):
    """Connects, before a process is lost; says how new processes join."""
    facts = problem = None
    if servers.is_first and not servers.is_alone:
        if door.is_wanted():
            facts = {
                "size": collectives.size,
                "servers": collectives.num_servers,
                "machines": collectives.machines,
                "addresses": servers.cluster.addresses,
                "watch": servers.watch_facts,
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
