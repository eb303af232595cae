"""The servers of all ranks, as one rank uses them."""

import time

from keras_sparsity.asynchronous.cluster import (
    Cluster,
    own_host,
    told_of_open,
)
from keras_sparsity.asynchronous.registry import Registry
from keras_sparsity.asynchronous.scheduler import Scheduler, SchedulerRegistry
from keras_sparsity.health import errors, watch
from keras_sparsity.machines import door, ports

# Between two looks for a lost server's new process.
_LOOK_SECONDS = 0.02
# For which others wait for the scheduler in one message.
_WAIT_SECONDS = 1.0


class Servers:
    """The servers of all ranks, of which the first has the `Registry`.

    If the launcher starts lost ranks anew, a scheduler has it instead, and each
    dedicated server may be lost.

    Attributes:
        cluster: `Cluster`.
        is_first: whether this process has the first of the servers.
        is_alone: whether this process was started anew, and has not joined.
        has_lost: whether a rank was lost, also if its new process has joined.
        watch_facts: how processes reach the scheduler's watch, None without a
            scheduler.
    """

    def __init__(self, collectives):
        facts = door.facts()
        self.is_alone = self.has_lost = facts is not None
        first = collectives.num_workers if collectives.num_servers else 0
        self.is_first = collectives.rank == first
        can_return = bool(door.is_wanted() and collectives.num_servers)
        if facts:
            addresses, self.watch_facts = facts["addresses"], facts["watch"]
            self.cluster = _cluster(collectives, addresses, can_return)
        else:
            self._start(collectives, can_return)
        self._registry = None
        if self.is_first and can_return:
            self._registry = SchedulerRegistry(
                self.watch_facts, collectives.size
            )
        elif self.is_first:
            self._registry = Registry(self.cluster)
        collectives.barrier("servers/started")

    def _start(self, collectives, can_return):
        has_scheduler = can_return and self.is_first
        # TensorFlow's server is to be told a number.
        with ports.reserved(1 + has_scheduler) as own:
            # Python's imports take it seconds.
            self._scheduler = Scheduler() if has_scheduler else None
            host = own_host(collectives.machines)
            told = [(host, port) for port in own]
            of_ranks = collectives.gather_objects(told, "servers/addresses")
            addresses = [first for first, *_ in of_ranks]
            addresses += [more for _, *others in of_ranks for more in others]
            if has_scheduler:
                told = addresses, collectives, watch.facts()
                self._scheduler.begin(*told)
            self.cluster = _cluster(collectives, addresses, can_return)
            self.watch_facts = None
            while can_return and self.watch_facts is None:
                # Again and again: others wait in no message for long.
                facts = has_scheduler and self._scheduler.facts(_WAIT_SECONDS)
                found = collectives.gather_objects(facts, "servers/scheduler")
                self.watch_facts = next(filter(None, found), None)

    # Lost ranks.

    def begin_meeting(self):
        """Begins the ranks' messages; before all ranks use them."""
        if self._leads:
            self._registry.begin_meeting()

    def begin(self, store):
        """Begins a `Store`; before all ranks use it."""
        if self._leads:
            self._registry.add(store.name, store.numbers, store.bound)

    def end(self, store):
        """Ends a `Store`, and frees the servers' memory, when all are done."""
        if self._leads:
            self._registry.remove(store.name)
            store.destroy()

    @property
    def _leads(self):
        return self.is_first and not self.is_alone

    def begin_epoch(self, store, fit, epoch):
        """Has a `Store` begin an epoch; by all ranks, while they wait.

        Args:
            fit, epoch: as for `Registry`.
        """
        if self._leads:
            self._registry.begin_epoch(store.name, fit, epoch)

    def change(self, rank, is_lost):
        """A rank is lost, or is a server that was lost and has come back."""
        self.has_lost = True
        self.cluster.change(rank, is_lost)
        if self._registry is not None:
            self._registry.change(rank, is_lost)

    def begin_returns(self):
        """From now on, all wait for the new process of a lost server."""
        if self._leads:
            self._registry.begin_returns()

    def end_returns(self):
        """Waits for all servers. From now on, the loss of one ends all."""
        while self._leads and not self._registry.end_returns():
            if errors.failure() is not None:
                raise errors.CollectiveError(errors.failure())
            time.sleep(_LOOK_SECONDS)


def _cluster(collectives, addresses, can_return):
    return Cluster(
        addresses,
        collectives.rank,
        collectives.num_workers,
        collectives.num_servers,
        can_return,
        told_of_open(collectives),
    )


_started = {}  # from `Collectives` to `Servers`


def started(collectives):
    """The `Servers` of the ranks, started once."""
    if collectives not in _started:
        _started[collectives] = Servers(collectives)
    return _started[collectives]


def share(collectives, servers):
    """Has `started` return these `Servers` for other `Collectives`, too."""
    _started[collectives] = servers
