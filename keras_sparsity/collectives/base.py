"""Operations among all processes, the same on every engine."""

import hashlib
import pickle

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import checks
from keras_sparsity.collectives import arguments
from keras_sparsity.collectives.calls import Calls
from keras_sparsity.collectives.differences import raise_if_different
from keras_sparsity.collectives.engine import Route
from keras_sparsity.machines.topology import Topology

_LENGTH_BYTES = 8
GROUPS = ("machine", "across")


class Collectives:
    """Operations that all processes of a group call together.

    All ranks make the same calls in the same order, eagerly or in a traced
    function, in loops too, and when one rank traces again alone. Each call
    takes `name`, its role, the same on all ranks: `"table/embedding/pull/ids"`.

    Obtain it from `keras_sparsity.collectives.current()` or `start()`.

    Attributes:
        rank, size: This process's number and the number of processes.
        local_rank, local_size: The same among those of its machine.
        cross_rank, cross_size: The same among those with its local rank.
        machines: The number of each rank's machine, a tuple.
        num_workers, num_servers: Of the processes; dedicated servers, the last
            ranks, own the rows of tables and compute on no examples.
        is_server: Whether this process is a dedicated server.
        engine: "local", "native" or "horovod".
        pads: Whether a `Route` of this engine needs its `largest`.

    Args:
        engine: The `Engine` of the group.
        place: The `Topology` of this process in the group.
        label: The group's name.
        ranks: The group's members among all ranks, None for all.
        journal: `Journal` that notes the calls, None for no notes.
        groups: dict from a group's name to its `Collectives`.
        machines: As the attribute; by default one machine for all.
        num_servers: As the attribute.

    Raises:
        ValueError: By each operation, for arguments it cannot send.
        CollectiveError: By each eager operation, if the ranks cannot go on.

    Example:

    >>> from keras_sparsity import collectives
    >>> communicator = collectives.current()
    >>> (total,) = communicator.all_reduce([tf.constant([1.0, 2.0])])
    >>> total.numpy()
    array([1., 2.], dtype=float32)

    References:
        EuroSys 4.1; Horovod's operations (arXiv:1802.05799).
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
        num_servers=0,
    ):
        self._calls = Calls(engine, label, ranks, journal)
        self._parts = engine, journal
        self._groups = groups or {}
        self.engine = engine.name
        self.pads = engine.pads
        self.topology = place
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.cross_rank, self.cross_size = place.cross_rank, place.cross_size
        self.machines = machines or (0,) * place.size
        self.num_servers = num_servers
        self.num_workers = self.size - num_servers
        self.is_server = place.rank >= self.num_workers

    def group(self, name):
        """The same operations among a part of the processes.

        Args:
            name: "machine", the processes of one machine, or "across", those
                of all machines that have the same local rank.

        Returns:
            `Collectives` whose rank and size are relative to the group.
        """
        checks.one_of("name", name, GROUPS)
        if name not in self._groups:
            raise ValueError(
                f"A group has no group {name!r} of its own. Ask the "
                "collectives of all processes for it."
            )
        return self._groups[name]

    @tf.autograph.experimental.do_not_convert
    def all_reduce(self, tensors, op="sum", name="all_reduce"):
        """Reduces each tensor over the ranks, in one message per dtype.

        Equal inputs give the same bits each time and on all ranks. The
        gradient of a sum is the sum of the ranks' gradients, and that of a
        mean their mean, as in `tf.distribute`; max and min have none.

        Args:
            tensors: List of tensors, of the same shapes on all ranks.
            op: "sum", "mean" (floats), "max" or "min" (for bool: any, all).
            name: The call's role.

        Returns:
            List of tensors of these shapes and dtypes.
        """
        call = arguments.spelled("all_reduce", name)
        tensors = arguments.tensors(tensors, call)
        for tensor in tensors:
            arguments.check_reduced(tensor.dtype, op, call)
        if op not in ("sum", "mean"):
            stopped = [tf.stop_gradient(tensor) for tensor in tensors]
            return self._calls.all_reduce(stopped, op, name)
        floats = [i for i, t in enumerate(tensors) if t.dtype.is_floating]

        @tf.custom_gradient
        def reduce(*tensors):
            def gradient(*upstream):
                reduced = self._calls.all_reduce(
                    [upstream[i] for i in floats], op, f"{name}/gradient"
                )
                of_floats = dict(zip(floats, reduced, strict=True))
                return [of_floats.get(i) for i in range(len(tensors))]

            return self._calls.all_reduce(tensors, op, name), gradient

        return list(reduce(*tensors)) if tensors else []

    @tf.autograph.experimental.do_not_convert
    def all_to_all(self, tensor, splits, name="all_to_all"):
        """Sends each rank its part of the rows of `tensor`.

        Args:
            tensor: `(sum(splits), ...)`, ordered by the receiving rank; the
                shape of a row is the same on all ranks.
            splits: `(size,)` integers: the number of rows for each rank.
            name: The call's role.

        Returns:
            received: `(sum(route.received_splits), ...)`, ordered by the
                sending rank. Differentiable.
            route: `Route`, with which `all_to_all_back` and
                `all_to_all_along` need not exchange splits again.
        """
        call = arguments.spelled("all_to_all", name)
        tensor = arguments.rows(tensor, call)
        splits = arguments.splits(splits, self.size, call)

        @tf.custom_gradient
        def exchange(tensor):
            received, received_splits, largest = self._calls.all_to_all(
                tensor, splits, name
            )
            way_back = Route(received_splits, splits, largest)

            def gradient(upstream, *_):
                return self._calls.all_to_all_along(
                    upstream, way_back, f"{name}/gradient"
                )

            return (received, received_splits, largest), gradient

        received, received_splits, largest = exchange(tensor)
        return received, Route(splits, received_splits, largest)

    @tf.autograph.experimental.do_not_convert
    def all_to_all_along(self, tensor, route, name="all_to_all_along"):
        """Sends more rows along a route that an `all_to_all` has found.

        Args:
            tensor: `(sum(route.splits), ...)`, in the order of the rows of
                that `all_to_all`.
            route: The `Route` that it returned.
            name: The call's role.

        Returns:
            `(sum(route.received_splits), ...)`. Differentiable.
        """
        call = arguments.spelled("all_to_all_along", name)
        tensor = arguments.rows(tensor, call)
        arguments.check_route(route, call)
        way_back = route.reversed()

        @tf.custom_gradient
        def exchange(tensor):
            def gradient(upstream):
                return self._calls.all_to_all_along(
                    upstream, way_back, f"{name}/gradient"
                )

            return self._calls.all_to_all_along(tensor, route, name), gradient

        return exchange(tensor)

    def all_to_all_back(self, tensor, route, name="all_to_all_back"):
        """Sends rows back to the ranks that an `all_to_all` got others from.

        Args:
            tensor: `(sum(route.received_splits), ...)`, in the order of the
                rows that `all_to_all` returned.
            route: The `Route` that it returned.
            name: The call's role.

        Returns:
            `(sum(route.splits), ...)`, in the order of the rows that were
            sent. Differentiable.
        """
        call = arguments.spelled("all_to_all_back", name)
        arguments.check_route(route, call)
        return self.all_to_all_along(tensor, route.reversed(), name)

    @tf.autograph.experimental.do_not_convert
    def all_gather(self, tensor, name="all_gather", counts=None):
        """Concatenates the ranks' rows, in the order of ranks.

        Args:
            tensor: `(rows, ...)`; ranks may differ in the number of rows.
            name: The call's role.
            counts: `(size,)` integers: each rank's number of rows, if all
                ranks know it, so that the native engine need not send it.

        Returns:
            `(sum of all ranks' rows, ...)`. Differentiable: the gradient of a
            row is the sum of all ranks' gradients of it.
        """
        call = arguments.spelled("all_gather", name)
        tensor = arguments.rows(tensor, call)
        row_shape = tensor.shape[1:]
        if counts is not None:
            counts = arguments.counts(counts, self.size, call)
            tensor = arguments.counted(tensor, counts, self.rank, call)

        @tf.custom_gradient
        def gather(tensor):
            rows = tf.shape(tensor)[0]

            def gradient(upstream):
                of_ranks = counts
                if of_ranks is None:
                    of_ranks = self._calls.all_gather(
                        rows[None], f"{name}/gradient/rows"
                    )
                    of_ranks = tf.ensure_shape(of_ranks, [self.size])
                route = Route(
                    of_ranks,
                    tf.fill([self.size], rows),
                    tf.reduce_max(of_ranks),
                )
                parts = self._calls.all_to_all_along(
                    upstream, route, f"{name}/gradient"
                )
                shape = tf.concat([[self.size, rows], tf.shape(parts)[1:]], 0)
                total = tf.reduce_sum(tf.reshape(parts, shape), 0)
                total.set_shape([None, *row_shape])
                return total

            return self._calls.all_gather(tensor, name, counts), gradient

        return gather(tensor)

    @tf.autograph.experimental.do_not_convert
    def broadcast(self, tensors, root=0, name="broadcast"):
        """Gives all ranks the tensors of rank `root`.

        Args:
            tensors: List of tensors, of the same shapes on all ranks.
            root: The sending rank.
            name: The call's role.

        Returns:
            List of tensors of these shapes and dtypes.
        """
        call = arguments.spelled("broadcast", name)
        arguments.check_root(root, self.size, call)
        stopped = []
        for tensor in arguments.tensors(tensors, call):
            arguments.check_moved(tensor.dtype, call)
            stopped.append(tf.stop_gradient(tensor))
        return self._calls.broadcast(stopped, root, name)

    def barrier(self, name="barrier"):
        """Ends when all ranks have reached it.

        Returns:
            int32 scalar, the number of ranks. In a traced function, whatever
            must wait has to depend on it.
        """
        return self.all_reduce([tf.ones([], tf.int32)], "sum", name)[0]

    def gather_objects(self, value, name="gather_objects"):
        """The list of all ranks' `value`, small objects; eagerly only.

        Args:
            value: An object that pickles.
            name: The call's role.
        """
        call = arguments.spelled("gather_objects", name)
        if not tf.executing_eagerly():
            raise ValueError(
                f"{call} was called in a traced function, where Python "
                "objects do not exist yet. Call it outside."
            )
        try:
            data = pickle.dumps(value)
        except Exception as error:  # whatever an object's own method raises
            raise ValueError(
                f"{call} sends objects that pickle. Received: "
                f"value={checks.spell(value)}. Send the numbers, strings, "
                "lists or dicts that it is made of. Python says: "
                f"{checks.shortened(error)}"
            ) from error
        # In one message: a worker that may be lost is in all of it, or not.
        data = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        data = self.all_gather(np.frombuffer(data, np.uint8), name)
        data, end, values = data.numpy().tobytes(), 0, []
        while end < len(data):
            start = end + _LENGTH_BYTES
            end = start + int.from_bytes(data[end:start], "little")
            values.append(pickle.loads(data[start:end]))
        return values

    def check_equal(self, value, what, fix=""):
        """Raises ValueError on all ranks unless `value` is equal on all.

        Args:
            value: An object with `==`, such as a number or a string. Of
                dicts the message shows the entries that differ. The values
                are sent only if their `repr` differ.
            what: Subject of the message: "The batch size".
            fix: Advice at the end of the message.
        """
        name = f"check_equal/{what}"
        digest = hashlib.blake2b(repr(value).encode(), digest_size=16).digest()
        row = np.frombuffer(digest, np.uint8)[np.newaxis]
        digests = self.all_gather(row, name).numpy()
        if (digests != digests[0]).any():
            values = self.gather_objects(value, f"{name}/values")
            raise_if_different(values, what, fix)


def end_groups(collectives):
    """See `Engine.end_groups`."""
    engine, _ = collectives._parts
    engine.end_groups()


def divided(collectives, groups, label):
    """The same operations among the processes of one of several groups.

    Of that which has this rank. All ranks call it, eagerly, with the same label
    and groups: disjoint lists of ranks that cover all ranks.
    """
    engine, journal = collectives._parts
    if len(groups) > 1:
        engine = engine.split(groups, label)
    ranks = next(ranks for ranks in groups if collectives.rank in ranks)
    return Collectives(
        engine,
        Topology(ranks.index(collectives.rank), len(ranks)),
        label,
        tuple(ranks),
        journal,
        machines=tuple(collectives.machines[rank] for rank in ranks),
    )
