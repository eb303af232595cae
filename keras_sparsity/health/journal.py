"""The collective calls of this process: which have begun, and which ended.

A hanging collective leaves the program without a line to look at. The journal
counts the begin and the end of each call, so that another thread can name the
open ones (see `watch.py`). In a traced function it runs no Python: each call
site has a variable of its own. (TensorFlow's automatic control dependencies
chain the operations on one resource, so a shared variable would order
independent collectives.)
"""

import collections
import contextlib
import dataclasses
import functools
import threading
import weakref

import tensorflow as tf

from keras_sparsity._tf import tf_graphs
from keras_sparsity._tf.own_variable import OwnVariable
from keras_sparsity.health.meter import Meter, Totals
from keras_sparsity.health.report import Call

# One variable holds both counts, so that one read sees a consistent pair.
_LEFT = 2**32
# The role of the update of all variables, once in each step.
UPDATE = "optimizer/update"


class Site:
    """One place in the program that calls a collective.

    Args:
        call: The `Call`, as far as it is known when the site is traced.
        scope: The number of the outermost traced function that contains the
            site, None for an eager call.
        record_shapes: Whether to record shapes at run time.
    """

    def __init__(self, call, scope=None, record_shapes=False):
        self.call = call
        self.of_any_shape = call.without_shape()
        self.scope = scope
        self.meter = None
        self.last_counts = 0, 0
        self._entered = 0
        self._left = 0
        self._forgotten = 0
        self._counts = None
        self._shapes = None
        if scope is not None:
            self._counts = OwnVariable(0, tf.int64)
        if record_shapes:
            self._shapes = OwnVariable([], tf.int64, [None])

    def enter(self, tensors):
        """Counts the begin of a call, once its inputs are computed.

        Returns the control dependencies of the collective.
        """
        if self.scope is None:
            self._entered += 1
            return []
        with tf.control_dependencies(tensors), tf.device("CPU:0"):
            waits = []
            if self._shapes is not None:
                sizes = [tf.shape(tensor, tf.int64) for tensor in tensors]
                waits.append(self._shapes.assign(tf.concat(sizes, 0)))
            with tf.control_dependencies(waits):
                return [self._counts.add(1)]

    def leave(self, outputs):
        """Counts the end of a call, once its outputs are computed."""
        if self.scope is None:
            self._left += 1
            return
        with tf.control_dependencies(outputs), tf.device("CPU:0"):
            self._counts.add(_LEFT)

    def counts(self):
        """How often the call has begun and ended."""
        if self._counts is None:
            return self._entered, self._left
        left, entered = divmod(int(self._counts.numpy()), _LEFT)
        return entered, left

    def is_open(self):
        """Whether the call has begun, not ended, and is not forgotten."""
        entered, over = self.counts_of_over()
        return entered > over

    def counts_of_over(self):
        """How often the call has begun, and ended or been forgotten."""
        entered, left = self.counts()
        self._forgotten = min(self._forgotten, entered - left)
        return entered, left + self._forgotten

    def forget(self, counts):
        """Stops waiting for failed calls, whose end is never counted.

        Returns:
            The number of calls that it has waited for.
        """
        entered, left = counts
        before, self._forgotten = self._forgotten, entered - left
        return self._forgotten - before

    def num_unended(self):
        """How many of the calls that are over have not ended, but failed."""
        self.counts_of_over()
        return self._forgotten

    def current_call(self):
        """The call, with the shapes of its last run if they vary."""
        if self._shapes is None:
            return self.call
        sizes = self._shapes.numpy().tolist()
        if len(sizes) != len(tf.nest.flatten(self.call.shape)):
            return self.call  # not run yet
        shape = tf.nest.pack_sequence_as(self.call.shape, sizes)
        return dataclasses.replace(self.call, shape=shape)


class Journal:
    """All call sites of this process.

    Attributes:
        measures: Whether calls that are traced from now on get a `Meter`.
        num_sites: The number of sites so far, also of functions that are gone.
    """

    def __init__(self):
        self.measures = False
        self.num_sites = 0
        self._sites = {}
        self._meters = {}
        self._scopes = set()
        # Of functions that are gone: their sites, until their counts are read,
        # and the sums of these.
        self._dropped = collections.deque()
        self._past = {}
        # From a call of any shape to the number of its begins when some
        # failed, and a list of their sites and of how many at each.
        self._failed = {}
        self._last_active = None
        # Reentrant, as a function may be garbage-collected at any point.
        self._lock = threading.RLock()

    @tf.autograph.experimental.do_not_convert
    def site(self, op, name, dtype="", shape=None, ranks=None, dynamic=False):
        """The site of this call, the same object for the same call.

        Args:
            op, name, dtype, shape, ranks: See `Call`.
            dynamic: Whether the `None` dimensions of `shape` must agree too.
                They are then recorded at each run; `enter` must be given
                the tensors of these shapes.
        """
        call = Call(op, name, dtype, shape, ranks)
        scope = tf_graphs.outermost_function()
        key = (call, scope, dynamic)
        site = self._sites.get(key)
        if site is None:
            self._watch_scope(scope)
            is_partial = None in tf.nest.flatten(call.shape)
            record_shapes = dynamic and scope is not None and is_partial
            site = Site(call, scope, record_shapes)
            if self.measures and scope is not None:
                site.meter = Meter()
            with self._lock:
                site = self._sites.setdefault(key, site)
                self.num_sites += 1
        return site

    @tf.autograph.experimental.do_not_convert
    def run(self, site, tensors, collective):
        """Runs `collective()`, of these inputs, between `enter` and `leave`.

        It returns the outputs, in any structure of tensors.
        """
        with tf.control_dependencies(site.enter(tensors)):
            if site.meter is None:
                outputs = collective()
            else:
                outputs = site.meter.measured(collective)
        site.leave(tf.nest.flatten(outputs))
        return outputs

    def has_moved(self):
        """Whether any call has begun or ended since the last question.

        During training this reads one variable, that of the last active site.
        Only if it has not moved are all sites read.
        """
        self._read_dropped()
        if self._moved(self._last_active):
            return True
        moved = [site for site in self.sites() if self._moved(site)]
        if moved:
            self._last_active = moved[-1]
        return bool(moved)

    def _moved(self, site):
        if site is None:
            return False
        counts = site.counts()
        moved = site.last_counts != counts
        site.last_counts = counts
        return moved

    def open_sites(self):
        """The sites whose call has begun and not ended."""
        return [site for site in self.sites() if site.is_open()]

    def upcoming(self, open_sites):
        """Calls that may begin while the open ones wait.

        These are the sites of the same traced function that have run less
        often than an open one: independent calls may begin in any order.
        """
        rounds = {}
        for site in open_sites:
            if site.scope is not None:
                entered = site.counts()[0]
                rounds[site.scope] = max(rounds.get(site.scope, 0), entered)
        return [
            site.current_call()
            for site in self.sites()
            if site.counts()[0] < rounds.get(site.scope, 0)
        ]

    def counts(self, calls):
        """How often calls, of any shape, have begun and are over.

        In all functions together, also those that are gone: a list of pairs.
        The `Call`s are those of this rank or another one. One that has failed
        is over when it begins again: until then, others may wait for it.
        """
        wanted = [call.without_shape() for call in calls]
        is_whole = False
        while not is_whole:  # No function was dropped meanwhile.
            self._read_dropped()
            found = {call: self._past.get(call, (0, 0)) for call in wanted}
            for site in self.sites():
                if site.of_any_shape in found:
                    _add(found, site)
            is_whole = not self._dropped
        return [self._without_failed(call, *found[call]) for call in wanted]

    def _without_failed(self, call, begun, over):
        return begun, over - self._num_failed(call, begun)

    def _num_failed(self, call, begun):
        """How often a call has failed, if it has not begun again since."""
        begun_then, failed = self._failed.get(call, (None, []))
        if begun_then != begun:
            return 0
        return sum(min(number, s.num_unended()) for s, number in failed)

    def has_failed(self):
        """Whether some call has failed, and not begun again."""
        calls = list(self._failed)
        counts = zip(calls, self.counts(calls), strict=True)
        return any(self._num_failed(call, begun) for call, (begun, _) in counts)

    def _read_dropped(self):
        while self._dropped:
            _add(self._past, self._dropped.popleft())

    def forget_open(self):
        """Forgets all open calls after an error, and returns them."""
        sites = self.open_sites()
        calls = [site.current_call() for site in sites]
        for site in sites:
            self.forget(site, site.counts())
        return calls

    def forget(self, site, counts):
        """Forgets the open calls of a site, of which these are the counts."""
        call = site.of_any_shape
        ((begun, _),) = self.counts([call])
        begun_then, failed = self._failed.get(call, (None, []))
        if begun_then != begun:
            failed = []
        self._failed[call] = begun, [*failed, (site, site.forget(counts))]

    def measured(self, name, inputs):
        """Measures the operations traced inside, from their inputs on.

        In `totals` they are a call of that name.
        """
        scope = tf_graphs.outermost_function()
        if not self.measures or scope is None:
            return contextlib.nullcontext()
        self._watch_scope(scope)
        with self._lock:
            meter = self._meters.setdefault((name, scope), Meter())
        return meter.around(inputs)

    def totals(self):
        """Measurements: dict from `(name, function's number)` to `Totals`.

        A name is a call's role without its number. Functions that were
        garbage-collected, because they were traced anew, are not included.
        """
        with self._lock:
            meters = list(self._meters.items())
        found = {key: meter.totals() for key, meter in meters}
        for site in self.sites():
            if site.meter is not None:
                key = site.call.name.partition("#")[0], site.scope
                found[key] = found.get(key, Totals()) + site.meter.totals()
        return found

    def sites(self):
        """The sites of eager calls and of all functions that still exist."""
        with self._lock:
            return list(self._sites.values())

    def _watch_scope(self, scope):
        """Makes `_drop` follow the deletion of the function being traced."""
        if scope is not None and scope not in self._scopes:
            self._scopes.add(scope)
            graph = tf_graphs.outermost_graph()
            weakref.finalize(graph, self._drop, scope).atexit = False

    def _drop(self, scope):
        with self._lock:
            self._scopes.discard(scope)
            for key, site in list(self._sites.items()):
                if site.scope == scope:
                    # Read later: this runs whenever garbage is collected.
                    self._dropped.append(self._sites.pop(key))
            for key in list(self._meters):
                if key[1] == scope:
                    del self._meters[key]


def _add(counts, site):
    """Adds the counts of a site to those of its call."""
    entered, over = counts.get(site.of_any_shape, (0, 0))
    more_entered, more_over = site.counts_of_over()
    counts[site.of_any_shape] = entered + more_entered, over + more_over


@functools.cache
def current():
    """The journal of this process."""
    return Journal()
