"""Operations among all processes, the same on every engine."""

import hashlib
import pickle

import numpy as np
import tensorflow as tf

from keras_sparsity import checks
from keras_sparsity.collectives import order, wire
from keras_sparsity.collectives.engine import NoJournal, Route
from keras_sparsity.collectives.errors import explained
from keras_sparsity.collectives.fusion import fused
from keras_sparsity.collectives.naming import Names, check_role

GROUPS = ("machine", "across")


class Collectives:
    """Operations that all processes of a group call together.

    Every rank makes the same calls in the same order, eagerly or in a traced
    function (also in loops, and when one rank traces again alone). Each call
    takes `name`, its role, which must be the same on all ranks:
    `"table/embedding/pull/ids"`.

    Obtain it from `keras_sparsity.collectives.current()` or `start()`.

    Attributes:
        rank, size: This process among the group's.
        local_rank, local_size: Among those on its machine.
        cross_rank, cross_size: Among those with its local rank.
        machines: The machine of each rank, a tuple of numbers from 0 on.
        engine: "local", "native" or "horovod".
        pads: Whether a `Route` needs to tell its `largest`.

    Args:
        engine: The `Engine` of the group.
        place: The `Topology` of this process in the group.
        label: The group's name.
        ranks: The group's members in the whole, None for all.
        journal: Where calls are noted, see `journal.Journal`.
        groups: dict from a group's name to its `Collectives`.
        machines: See above; by default all ranks are on one.
    """

    def __init__(
        self,
        engine,
        place,
        label="all",
        ranks=None,
        journal=None,
        groups=None,
        machines=None,
    ):
        self._engine = engine
        self._prefix = "" if label == "all" else f"{label}/"
        self._ranks = ranks
        self._journal = journal or NoJournal()
        self._groups = groups or {}
        self._names = Names()
        self.engine = engine.name
        self.pads = engine.pads
        self.topology = place
        self.rank = place.rank
        self.size = place.size
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.cross_rank = place.cross_rank
        self.cross_size = place.cross_size
        self.machines = machines or (0,) * place.size

    def group(self, name):
        """The same operations among a part of the processes.

        Args:
            name: "machine", the processes of one machine, or "across", those
                of all machines that have the same local rank.

        Returns:
            `Collectives` whose rank and size are relative to the group.
        """
        if not (isinstance(name, str) and name in GROUPS):
            raise ValueError(
                f"Unknown group {checks.spell(name)}. Expected one of "
                f"{GROUPS}. Received: name of type {type(name).__name__}."
            )
        if name not in self._groups:
            raise ValueError(
                f"A group has no group {name!r} of its own. Ask the "
                "collectives of all processes for it."
            )
        return self._groups[name]

    def all_reduce(self, tensors, op="sum", name="all_reduce"):
        """Reduces each tensor over the ranks, all in one message per dtype.

        The same input gives the same bits, each time and on all ranks. The
        gradient of a sum is the sum of the ranks' gradients, and that of a
        mean their mean, as in `tf.distribute`; max and min have none.

        Args:
            tensors: List of tensors, of the same shapes on all ranks.
            op: "sum", "mean" (floats), "max" or "min" (for bool: any, all).
            name: The call's role.

        Returns:
            List of tensors.
        """
        call = _spelled("all_reduce", name)
        tensors = _tensors(tensors, call)
        for tensor in tensors:
            wire.check_reduced(tensor.dtype, op, call)
        if op not in ("sum", "mean"):
            stopped = [tf.stop_gradient(tensor) for tensor in tensors]
            return self._all_reduce(stopped, op, name)
        floats = [i for i, t in enumerate(tensors) if t.dtype.is_floating]

        @tf.custom_gradient
        def reduce(*tensors):
            def gradient(*upstream):
                reduced = self._all_reduce(
                    [upstream[i] for i in floats], op, f"{name}/gradient"
                )
                gradients = [None] * len(tensors)
                for i, value in zip(floats, reduced, strict=True):
                    gradients[i] = value
                return gradients

            return self._all_reduce(tensors, op, name), gradient

        return list(reduce(*tensors)) if tensors else []

    def all_to_all(self, tensor, splits, name="all_to_all"):
        """Sends to each rank its part of the rows of `tensor`.

        Args:
            tensor: `(sum(splits), ...)`; the shape of a row is the same on
                all ranks. Its rows are ordered by the rank they go to.
            splits: `(size,)` integers: the number of rows for each rank.
            name: The call's role.

        Returns:
            received: `(sum(route.received_splits), ...)`, ordered by the
                rank the rows come from. Differentiable.
            route: `Route`, for `all_to_all_back` and `all_to_all_along`,
                which then need no splits to be exchanged again.
        """
        call = _spelled("all_to_all", name)
        tensor = _rows(tensor, call)
        splits = self._splits(splits, call)

        @tf.custom_gradient
        def exchange(tensor):
            received, received_splits, largest = self._all_to_all(
                tensor, splits, name
            )
            way_back = Route(received_splits, splits, largest)

            def gradient(upstream, *_):
                return self._along(upstream, way_back, f"{name}/gradient")

            return (received, received_splits, largest), gradient

        received, received_splits, largest = exchange(tensor)
        return received, Route(splits, received_splits, largest)

    def all_to_all_along(self, tensor, route, name="all_to_all_along"):
        """Sends more rows along a route that an `all_to_all` has found.

        Args:
            tensor: `(sum(route.splits), ...)`, in the order of the rows of
                that `all_to_all`.
            route: What that `all_to_all` returned.
            name: The call's role.

        Returns:
            `(sum(route.received_splits), ...)`. Differentiable.
        """
        call = _spelled("all_to_all_along", name)
        tensor = _rows(tensor, call)
        _check_route(route, call)
        way_back = route.reversed()

        @tf.custom_gradient
        def exchange(tensor):
            def gradient(upstream):
                return self._along(upstream, way_back, f"{name}/gradient")

            return self._along(tensor, route, name), gradient

        return exchange(tensor)

    def all_to_all_back(self, tensor, route, name="all_to_all_back"):
        """Sends rows back the way that an `all_to_all` brought others.

        Args:
            tensor: `(sum(route.received_splits), ...)`, in the order of the
                rows that `all_to_all` returned.
            route: What it returned beside them.
            name: The call's role.

        Returns:
            `(sum(route.splits), ...)`, in the order of the rows that were
            sent. Differentiable.
        """
        _check_route(route, _spelled("all_to_all_back", name))
        return self.all_to_all_along(tensor, route.reversed(), name)

    def all_gather(self, tensor, name="all_gather"):
        """Concatenates the ranks' rows, in the order of ranks.

        Args:
            tensor: `(rows, ...)`; ranks may differ in the number of rows.
            name: The call's role.

        Returns:
            The rows of all ranks. Differentiable: the gradient of a row is
            the sum of all ranks' gradients of it.
        """
        tensor = _rows(tensor, _spelled("all_gather", name))
        row_shape = tensor.shape[1:]

        @tf.custom_gradient
        def gather(tensor):
            rows = tf.shape(tensor)[0]

            def gradient(upstream):
                counts = self._all_gather(rows[None], f"{name}/gradient/rows")
                counts = tf.ensure_shape(counts, [self.size])
                route = Route(
                    counts, tf.fill([self.size], rows), tf.reduce_max(counts)
                )
                parts = self._along(upstream, route, f"{name}/gradient")
                shape = tf.concat([[self.size, rows], tf.shape(parts)[1:]], 0)
                total = tf.reduce_sum(tf.reshape(parts, shape), 0)
                total.set_shape([None, *row_shape])
                return total

            return self._all_gather(tensor, name), gradient

        return gather(tensor)

    def broadcast(self, tensors, root=0, name="broadcast"):
        """Gives every rank the tensors of rank `root`.

        Args:
            tensors: List of tensors, of the same shapes on all ranks.
            root: The rank whose values are sent.
            name: The call's role.

        Returns:
            List of tensors.
        """
        call = _spelled("broadcast", name)
        is_rank = isinstance(root, int) and not isinstance(root, bool)
        if not (is_rank and 0 <= root < self.size):
            raise ValueError(
                f"{call} received root={checks.spell(root)}. Expected a rank "
                f"from 0 to {self.size - 1}."
            )
        tensors = [tf.stop_gradient(t) for t in _tensors(tensors, call)]
        for tensor in tensors:
            wire.check_moved(tensor.dtype, call)
        name = self._prefix + self._names(name)

        def send(message, parts):
            return self._call(
                f"broadcast from {root}",
                name,
                parts,
                lambda name: self._engine.broadcast(message, root, name),
                even=True,
            )

        wires = [self._engine.move_wire(tensor.dtype) for tensor in tensors]
        return fused(tensors, wires, send)

    def barrier(self, name="barrier"):
        """Ends when all ranks have come to it.

        Returns:
            int32 scalar, the number of ranks. What shall wait in a traced
            function must depend on it.
        """
        return self.all_reduce([tf.ones([], tf.int32)], "sum", name)[0]

    def gather_objects(self, value, name="gather_objects"):
        """Returns the list of all ranks' `value`, small objects, eagerly.

        Args:
            value: Anything that pickles.
            name: The call's role.
        """
        check_role(name)
        if not tf.executing_eagerly():
            raise ValueError(
                f'gather_objects "{name}" was called in a traced function, '
                "where Python objects do not exist yet. Call it outside."
            )
        try:
            data = np.frombuffer(pickle.dumps(value), np.uint8)
        except Exception as error:  # whatever an object's own method raises
            raise ValueError(
                f'gather_objects "{name}" sends what pickles. Received: '
                f"value={checks.spell(value)}. Send the numbers, strings, "
                "lists or dicts that it is made of. Python says: "
                f"{checks.shortened(error)}"
            ) from error
        lengths = self.all_gather([len(data)], f"{name}/lengths").numpy()
        data = self.all_gather(data, name).numpy()
        ends = np.cumsum(lengths)
        return [
            pickle.loads(data[end - length : end].tobytes())
            for end, length in zip(ends, lengths, strict=True)
        ]

    def check_equal(self, value, what, fix=""):
        """Raises ValueError on all ranks where `value` is not the same on all.

        Args:
            value: An object with `==`, such as a number or a string. Of
                dicts the message shows the entries that differ. Only where
                the values' `repr` differs are they sent.
            what: What it is, for the message: "The batch size".
            fix: What the user can do about it.
        """
        name = f"check_equal/{what}"
        digest = hashlib.blake2b(repr(value).encode(), digest_size=16).digest()
        row = np.frombuffer(digest, np.uint8)[np.newaxis]
        digests = self.all_gather(row, name).numpy()
        if (digests != digests[0]).any():
            values = self.gather_objects(value, f"{name}/values")
            raise_if_different(values, what, fix)

    def _splits(self, splits, call):
        splits = _tensor(splits, call, "splits")
        if not splits.dtype.is_integer:
            raise ValueError(
                f"{call} received splits of dtype {splits.dtype.name}. "
                "Expected integers: the number of rows for each rank."
            )
        if not splits.shape.is_compatible_with([self.size]):
            raise ValueError(
                f"{call} received splits of shape {tuple(splits.shape)}. "
                f"Expected ({self.size},): the number of rows for each of "
                f"the {self.size} ranks, 0 for none."
            )
        splits = tf.ensure_shape(splits, [self.size])
        return tf.cast(splits, tf.int32)

    def _all_reduce(self, tensors, op, name):
        name = self._prefix + self._names(name)
        raw_op = "sum" if op == "mean" else op

        def send(message, parts):
            return self._call(
                f"all_reduce {op}",
                name,
                parts,
                lambda name: self._engine.all_reduce(message, raw_op, name),
                even=True,
            )

        wires = [self._engine.reduce_wire(tensor.dtype) for tensor in tensors]
        with tf.control_dependencies(order.held_sums()):
            reduced = fused(tensors, wires, send)
        if op == "mean":
            return [total / self.size for total in reduced]
        return reduced

    def _all_to_all(self, tensor, splits, name):
        wires = self._engine.move_wire(tensor.dtype)
        rows = wires.encode(_checked_rows(tensor, splits, name))
        received, route = self._call(
            "all_to_all",
            self._prefix + self._names(name),
            [tensor],
            lambda name: self._engine.all_to_all(rows, splits, name),
        )
        received = _with_row_shape(wires.decode(received), tensor)
        return received, route.received_splits, route.largest

    def _along(self, tensor, route, name):
        wires = self._engine.move_wire(tensor.dtype)
        rows = wires.encode(_checked_rows(tensor, route.splits, name))
        received = self._call(
            "all_to_all_along",
            self._prefix + self._names(name),
            [tensor],
            lambda name: self._engine.all_to_all_along(rows, route, name),
        )
        return _with_row_shape(wires.decode(received), tensor)

    def _all_gather(self, tensor, name):
        wires = self._engine.move_wire(tensor.dtype)
        rows = wires.encode(tensor)
        gathered = self._call(
            "all_gather",
            self._prefix + self._names(name),
            [tensor],
            lambda name: self._engine.all_gather(rows, name),
        )
        return _with_row_shape(wires.decode(gathered), tensor)

    def _call(self, op, name, tensors, collective, even=False):
        """Runs `collective(name)` with its entry in the journal.

        Args:
            op: The operation, as the journal tells it.
            name: The role, numbered.
            tensors: The caller's, which are sent in one message.
            collective: Function of a name that holds what all ranks must
                agree on, as far as all know it: ranks that do not agree then
                wait, on every engine, and are told by the journal.
            even: Whether all ranks' tensors have the same shapes.
        """
        shapes = [_known_shape(tensor) for tensor in tensors]
        if not even:
            shapes = [(None, *shape[1:]) for shape in shapes]
        dtypes = "+".join(dict.fromkeys(t.dtype.name for t in tensors))
        site = self._journal.site(
            op,
            name,
            dtype=dtypes,
            shape=shapes if len(shapes) > 1 else shapes[0],
            ranks=self._ranks,
            dynamic=even and None not in shapes,
        )
        full_name = f"{name}/{op}/{dtypes}"
        if not tf.executing_eagerly():
            # One rank may know less of the shapes than another does.
            return self._journal.run(
                site, tensors, lambda: collective(full_name)
            )
        with explained(f'{op} "{name}"'):
            return self._journal.run(
                site,
                tensors,
                lambda: collective(f"{full_name}/{_digest(shapes)}"),
            )


def raise_if_different(values, what, fix=""):
    """As `Collectives.check_equal`, of values that all ranks have.

    Example:

    >>> raise_if_different([{"a": 1, "b": 2}, {"a": 1}], "The options")
    Traceback (most recent call last):
        ...
    ValueError: The options must be the same on all ranks. Received:
      rank 0: {'b': 2}
      rank 1: {}
    """
    if all(other == values[0] for other in values):
        return
    if all(isinstance(value, dict) for value in values):
        names = {
            name: None
            for value in values
            for name in value
            if any(
                name not in other or other[name] != value[name]
                for other in values
            )
        }
        values = [
            {name: value[name] for name in names if name in value}
            for value in values
        ]
    listed = "\n".join(
        f"  rank {rank}: {value!r}" for rank, value in enumerate(values)
    )
    message = f"{what} must be the same on all ranks. Received:\n{listed}"
    raise ValueError(f"{message}\n{fix}" if fix else message)


def _known_shape(tensor):
    return None if tensor.shape.rank is None else tuple(tensor.shape)


def _digest(shapes):
    return hashlib.blake2b(str(shapes).encode(), digest_size=6).hexdigest()


def _spelled(operation, name):
    """A call for messages, once its role is seen to be one."""
    check_role(name)
    return f'{operation} "{name}"'


def _tensors(tensors, call):
    if not isinstance(tensors, list | tuple):
        raise ValueError(
            f"{call} received {type(tensors).__name__}. Expected a list of "
            "tensors, which travel in one message."
        )
    for value in tensors:
        if isinstance(value, tf.IndexedSlices):
            raise ValueError(
                f"{call} received tf.IndexedSlices. Expected dense tensors: "
                "use `tf.convert_to_tensor` on it first, or `all_gather` its "
                "indices and values."
            )
    return [_tensor(value, call, "tensors") for value in tensors]


def _tensor(value, call, name):
    try:
        return tf.convert_to_tensor(value)
    except Exception as error:  # whatever an object's own method raises
        raise ValueError(
            f"{call} received {checks.spell(value)} (of type "
            f"{type(value).__name__}) for `{name}`. Expected a tensor, or what "
            "TensorFlow makes one of. Send other objects with "
            "`gather_objects`."
        ) from error


def _check_route(route, call):
    if not isinstance(route, Route):
        raise ValueError(
            f"{call} received route={checks.spell(route)}. Expected the "
            "`Route` that an `all_to_all` returned beside its rows."
        )


def _rows(tensor, call):
    tensor = _tensor(tensor, call, "tensor")
    wire.check_moved(tensor.dtype, call)
    if tensor.shape.rank is None or tensor.shape.rank == 0:
        shape = "a scalar" if tensor.shape.rank == 0 else "an unknown rank"
        raise ValueError(
            f"{call} received {shape}. Expected a tensor of known rank with "
            "rows in its first dimension: use `tf.reshape(x, [1])` or "
            "`tf.ensure_shape`."
        )
    return tensor


def _checked_rows(tensor, splits, name):
    """`tensor`, after a check that `splits` counts its rows."""
    rows = tf.shape(tensor)[0]
    message = (
        f'all_to_all "{name}" received splits that do not sum to the number '
        "of rows of the tensor."
    )
    if tf.executing_eagerly():
        numbers = splits.numpy()
        if numbers.sum() != int(rows) or (numbers < 0).any():
            raise ValueError(
                f"{message} Received splits {numbers.tolist()} for a "
                f"tensor of {int(rows)} rows."
            )
        return tensor
    check = tf.raw_ops.Assert(
        condition=tf.equal(tf.reduce_sum(splits), rows),
        data=[f"{message} Received splits:", splits, "rows:", rows],
        summarize=1000,
    )
    with tf.control_dependencies([check]):
        return tf.identity(tensor)


def _with_row_shape(received, tensor):
    received.set_shape([None, *tensor.shape[1:]])
    return received
