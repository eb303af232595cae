"""An engine's operations with a name and a journal entry for each call."""

import collections
import hashlib
import weakref

import tensorflow as tf

from keras_sparsity._tf import tf_graphs
from keras_sparsity.collectives import arguments, order
from keras_sparsity.collectives.fusion import fused
from keras_sparsity.health.errors import explained


class Calls:
    """The operations of `Collectives` on checked arguments, no gradients.

    A call's name is its role and, in a traced function, the number of earlier
    calls of that role in the outermost function being traced. Each trace
    starts counting anew, so a rank that traces once more than the others (its
    batch has another shape) still finds the same names.

    Args:
        label: The group's name.
        ranks: The group's members among all ranks, None for all.
        journal: `Journal` that notes the calls, None for no notes.
    """

    def __init__(self, engine, label, ranks, journal):
        self._engine = engine
        self._prefix = "" if label == "all" else f"{label}/"
        self._ranks = ranks
        self._journal = journal
        self._counters = weakref.WeakKeyDictionary()

    def all_reduce(self, tensors, op, name):
        name = self._numbered(name)
        divides = op == "mean" and not self._engine.reduces_means
        raw_op = "sum" if divides else op

        def send(message, parts):
            return self._run(
                f"all_reduce {op}",
                name,
                parts,
                lambda name: self._engine.all_reduce(message, raw_op, name),
                same_shapes=True,
            )

        wires = [self._engine.reduce_wire(tensor.dtype) for tensor in tensors]
        with tf.control_dependencies(order.held_sums()):
            reduced = fused(tensors, wires, send)
        if divides:
            return [total / self._engine.size for total in reduced]
        return reduced

    def broadcast(self, tensors, root, name):
        name = self._numbered(name)

        def send(message, parts):
            return self._run(
                f"broadcast from {root}",
                name,
                parts,
                lambda name: self._engine.broadcast(message, root, name),
                same_shapes=True,
            )

        wires = [self._engine.move_wire(tensor.dtype) for tensor in tensors]
        return fused(tensors, wires, send)

    def all_to_all(self, tensor, splits, name):
        """`(received rows, received_splits, largest)`, see `Route`."""
        wire = self._engine.move_wire(tensor.dtype)
        rows = wire.encode(arguments.summing(tensor, splits, name))

        def send(name):
            received, route = self._engine.all_to_all(rows, splits, name)
            return received, route.received_splits, route.largest

        received, received_splits, largest = self._run(
            "all_to_all", self._numbered(name), [tensor], send
        )
        received = wire.decode(received)
        received.set_shape([None, *tensor.shape[1:]])
        return received, received_splits, largest

    def all_to_all_along(self, tensor, route, name):
        rows = arguments.summing(tensor, route.splits, name)
        return self._move(
            "all_to_all_along",
            rows,
            name,
            lambda rows, name: self._engine.all_to_all_along(rows, route, name),
        )

    def all_gather(self, tensor, name, counts=None):
        return self._move(
            "all_gather",
            tensor,
            name,
            lambda rows, name: self._engine.all_gather(rows, name, counts),
        )

    def _move(self, op, tensor, name, send):
        """Rows that arrive; `send(rows, name)` runs in the wire's dtype."""
        wire = self._engine.move_wire(tensor.dtype)
        rows = wire.encode(tensor)
        received = self._run(
            op, self._numbered(name), [tensor], lambda name: send(rows, name)
        )
        received = wire.decode(received)
        received.set_shape([None, *tensor.shape[1:]])
        return received

    def _numbered(self, role):
        graph = tf_graphs.outermost_graph()
        if graph is None:
            return f"{self._prefix}{role}"
        counter = self._counters.setdefault(graph, collections.Counter())
        counter[role] += 1
        return f"{self._prefix}{role}#{counter[role] - 1}"

    def _run(self, op, name, tensors, send, same_shapes=False):
        """Runs `send(full name)` with its entry in the journal.

        The full name contains everything that all ranks must agree on, as far
        as every rank knows it. Ranks that disagree then wait, on every engine,
        and the journal says why.

        Args:
            op: The operation, for the journal.
            name: The numbered role.
            tensors: The caller's tensors, which travel in one message.
            same_shapes: Whether all ranks' tensors have the same shapes.
        """
        shapes = [
            None if tensor.shape.rank is None else tuple(tensor.shape)
            for tensor in tensors
        ]
        if not same_shapes:
            shapes = [(None, *shape[1:]) for shape in shapes]
        dtypes = "+".join(dict.fromkeys(t.dtype.name for t in tensors))
        full_name = f"{name}/{op}/{dtypes}"
        # In a function one rank may know less of the shapes than another.
        if is_eager := tf.executing_eagerly():
            digest = hashlib.blake2b(str(shapes).encode(), digest_size=6)
            full_name = f"{full_name}/{digest.hexdigest()}"
        if self._journal is None:
            return send(full_name)
        site = self._journal.site(
            op,
            name,
            dtype=dtypes,
            shape=tuple(shapes) if len(shapes) > 1 else shapes[0],
            ranks=self._ranks,
            dynamic=same_shapes and None not in shapes,
        )
        if not is_eager:
            return self._journal.run(site, tensors, lambda: send(full_name))
        with explained(f'{op} "{name}"'):
            return self._journal.run(site, tensors, lambda: send(full_name))
