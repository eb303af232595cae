"""What this process has called: one counter per collective call site.

A collective that never completes leaves the program without a line to look
at. The journal notes, beside each collective, that it was entered and left,
so that another thread can say which calls are open (see `watch.py`). Nothing
of it runs Python in a traced function: a site owns one variable of its
own, so that TensorFlow's automatic control dependencies, which chain the
operations on one resource, do not chain independent collectives.
"""

import contextlib
import dataclasses
import functools
import threading
import weakref

import tensorflow as tf

from keras_sparsity import compat
from keras_sparsity.collectives.meter import Meter, Totals
from keras_sparsity.own_variable import OwnVariable

# One variable holds both counts, so that one read sees them at the same time.
_LEFT = 2**32

_MOST_SHAPES = 6


@dataclasses.dataclass(frozen=True)
class Call:
    """What must agree among the processes of one collective call.

    Args:
        op: The operation, `"all_reduce"`.
        name: The role, `"table/embedding/pull/ids"`.
        dtype: The name of the type, or a tuple of them.
        shape: The dimensions that must agree: `None` for one that may
            differ among the processes. A tuple of such for several tensors,
            None where nothing has to agree.
        ranks: The ranks that take part, `None` for all.
    """

    op: str
    name: str
    dtype: str | tuple = ""
    shape: tuple | None = None
    ranks: tuple | None = None

    def to_list(self):
        """The call in a form JSON returns unchanged by `from_list`."""
        return [self.op, self.name, self.dtype, self.shape, self.ranks]

    @classmethod
    def from_list(cls, fields):
        return cls(*map(_as_tuple, fields))

    def is_partial(self):
        """Whether dimensions are not known."""
        return _has_none(self.shape)

    def __str__(self):
        text = f'{self.op} "{self.name}"'
        if self.dtype:
            text += f" of {_spell(self.dtype)}"
        if self.shape is not None:
            text += f" with {_spell_shape(self.shape)}"
        return text


class Site:
    """One place in the program that calls a collective.

    Args:
        call: The `Call` as far as it is known when the site is traced.
        scope: The number of the outermost traced function the site is in,
            `None` for an eager call.
        record_shapes: Whether the shapes are known at run time only.
    """

    def __init__(self, call, scope=None, record_shapes=False):
        self.call = call
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
        """Notes that the call begins, once its inputs are there.

        Args:
            tensors: The inputs of the collective.

        Returns:
            What the collective must wait for, for `tf.control_dependencies`.
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

    def leave(self):
        """Notes that the call has ended. Call it under control dependencies
        on the collective's outputs."""
        if self.scope is None:
            self._left += 1
            return []
        with tf.device("CPU:0"):
            return [self._counts.add(_LEFT)]

    def counts(self):
        """Returns how often the call was entered and left."""
        if self._counts is None:
            return self._entered, self._left
        left, entered = divmod(int(self._counts.numpy()), _LEFT)
        return entered, left

    def is_open(self):
        """Whether the call was entered, not left, and not forgotten."""
        entered, left = self.counts()
        self._forgotten = min(self._forgotten, entered - left)
        return entered - left > self._forgotten

    def forget(self, counts):
        """Stops waiting for calls that an error ended: they never leave."""
        entered, left = counts
        self._forgotten = entered - left

    def current_call(self):
        """The call, with the shapes of its last run where they vary."""
        if self._shapes is None:
            return self.call
        sizes = self._shapes.numpy().tolist()
        if len(sizes) != len(tf.nest.flatten(self.call.shape)):
            return self.call  # not run yet
        shape = _fill(self.call.shape, iter(sizes))
        return dataclasses.replace(self.call, shape=shape)


class Journal:
    """All call sites of this process, and which of them are open."""

    def __init__(self):
        self._sites = {}
        # Reentrant, for a function may be collected at any point.
        self._lock = threading.RLock()
        # Whether what is traced from now on has a `Meter` at each call.
        self.measures = False
        self._meters = {}
        self._last_active = None
        self._scopes = set()

    @tf.autograph.experimental.do_not_convert
    def site(self, op, name, dtype="", shape=None, ranks=None, dynamic=False):
        """The site of this call, the same object for the same call.

        Args:
            op, name, dtype, shape, ranks: See `Call`.
            dynamic: Whether the `None` dimensions of `shape` must agree too.
                They are then recorded at each run; `enter` must be given
                the tensors of these shapes.
        """
        call = Call(op, name, dtype, _as_tuple(shape), ranks)
        scope = compat.outermost_function()
        key = (call, scope, dynamic)
        site = self._sites.get(key)
        if site is None:
            self._watch_scope(scope)
            record_shapes = dynamic and scope is not None and call.is_partial()
            site = Site(call, scope, record_shapes)
            if self.measures and scope is not None:
                site.meter = Meter()
            with self._lock:
                site = self._sites.setdefault(key, site)
        return site

    @tf.autograph.experimental.do_not_convert
    def run(self, site, tensors, collective):
        """Runs `collective()` between `enter` and `leave` of the site.

        Args:
            site: What `site` returned.
            tensors: The inputs of the collective.
            collective: A function without arguments that returns the
                outputs, in any structure of tensors.
        """
        return noted(site, tensors, collective)

    def has_moved(self):
        """Whether any call was entered or left since the last question.

        While training goes on this reads one variable: the site that moved
        last. Only when that one rests are all of them read.
        """
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
        """Calls that may still begin while the open ones wait.

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

    def forget_open(self):
        """Stops waiting for all open calls, after an error ended them.

        Returns:
            Those calls.
        """
        sites = self.open_sites()
        calls = [site.current_call() for site in sites]
        for site in sites:
            site.forget(site.counts())
        return calls

    @contextlib.contextmanager
    def measured(self, name, inputs):
        """Measures what is traced inside as if it were a call of that name.

        Args:
            name: as `totals` is to tell it.
            inputs: the tensors it begins with.
        """
        scope = compat.outermost_function()
        if not self.measures or scope is None:
            yield
            return
        self._watch_scope(scope)
        with self._lock:
            meter = self._meters.setdefault((name, scope), Meter())
        with meter.around(inputs):
            yield

    def totals(self):
        """What was measured: dict from `(name, function)` to `Totals`.

        A name is a call's role without its number. Those of functions that
        are gone, because they were traced anew, are gone too.
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
        """Has a function that is being traced forgotten when it is gone."""
        if scope is not None and scope not in self._scopes:
            self._scopes.add(scope)
            graph = compat.outermost_graph()
            weakref.finalize(graph, self._drop, scope).atexit = False

    def _drop(self, scope):
        """Forgets a function that is gone: it was traced anew, or deleted."""
        with self._lock:
            self._scopes.discard(scope)
            self._sites = {
                key: site
                for key, site in self._sites.items()
                if site.scope != scope
            }
            self._meters = {
                key: meter
                for key, meter in self._meters.items()
                if key[1] != scope
            }


def noted(site, tensors, collective):
    """As `Journal.run`; whoever has this on the stack may be in a call."""
    with tf.control_dependencies(site.enter(tensors)):
        if site.meter is None:
            outputs = collective()
        else:
            outputs = site.meter.measured(collective)
    with tf.control_dependencies(tf.nest.flatten(outputs)):
        site.leave()
    return outputs


@functools.cache
def current():
    """The journal of this process."""
    return Journal()


def _as_tuple(value):
    if isinstance(value, tf.TensorShape):
        value = None if value.rank is None else value.as_list()
    if isinstance(value, list | tuple):
        return tuple(map(_as_tuple, value))
    return value


def _fill(shape, sizes):
    if isinstance(shape, tuple):
        return tuple(_fill(part, sizes) for part in shape)
    return next(sizes)


def _has_none(shape):
    if isinstance(shape, tuple):
        return any(map(_has_none, shape))
    return shape is None


def _spell_shape(shape):
    if not any(isinstance(part, tuple) for part in shape):
        return f"shape {_spell(shape)}"
    shown = ", ".join(map(_spell, shape[:_MOST_SHAPES]))
    if len(shape) > _MOST_SHAPES:
        return f"{len(shape)} tensors of shapes {shown}, ..."
    return f"shapes {shown}"


def _spell(value):
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_spell, value)) + "]"
    return "?" if value is None else str(value)
