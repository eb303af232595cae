"""Warns of layers and losses that mix the examples of a batch.

Each process sees its own part of the batch, so they differ from those of one
process, silently. They are looked for in the graph of a step, once, when it is
traced. Where the graph does not tell, nothing is said.
"""

import contextlib
import linecache
import logging
import os

import keras
import tensorflow as tf

from keras_sparsity.global_batch.batch_axes import BatchAxes

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STEP = os.path.join(_OWN, "training", "steps.py")
_TENSORFLOW = os.path.dirname(os.path.abspath(tf.__file__))
_KERAS = os.path.join(os.path.dirname(os.path.abspath(keras.__file__)), "src")
# Keras's functions that layers and users call alike.
_FUNCTIONS = tuple(
    os.path.join(_KERAS, room) + os.sep for room in ("backend", "ops", "utils")
)
# Operations of a functional model, which the user called when it was built.
_OF_MODELS = os.path.join(_KERAS, "models") + os.sep
_GRADIENTS = os.path.join("eager", "imperative_grad.py")
# The ranks' sums of metrics are added up.
_OF_METRICS = frozenset(["update_state", "compute_metrics"])


class Mixing:
    """What is known to mix the examples of one adopted model."""

    def __init__(self, model, communicator):
        self._model, self._size = model, communicator.size
        self._is_teller = communicator.rank == 0 and communicator.size > 1
        self._told = set()

    @contextlib.contextmanager
    def looked_for(self, batch):
        """Looks through the operations that are traced while it is entered."""
        if not self._is_teller or tf.executing_eagerly():
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        yield
        examples = [
            leaf
            for leaf in tf.nest.flatten(batch)
            if tf.is_tensor(leaf) and leaf.shape.rank
        ]
        axes = BatchAxes(examples)
        for op in graph.get_operations()[first:]:
            if axes.follow(op):
                self._tell(op)

    def _tell(self, op):
        place = _place(op)
        if place is None or place in self._told:
            return
        self._told.add(place)
        logging.getLogger(__name__).warning(
            "The model '%s' mixes the examples of a batch, and each of %d "
            "processes has its own part of it: the result is another one than "
            "in one process. Found: %s of '%s'%s. Gather the rows of all "
            "processes first, `ks.gather_batch(x)`, or give `compile` a loss "
            "`ks.losses.GlobalMean(loss, whole_batch=True)`.",
            self._model.name,
            self._size,
            op.type,
            op.name,
            place,
        )


def _place(op):
    """Where a user's code made an operation.

    Returns:
        `", file:line: source"`, empty of a functional model's operation, or
        None where the library, Keras's layers and losses, or a gradient did.
    """
    frames = list(op.traceback)
    steps = [i for i, f in enumerate(frames) if f.filename == _STEP]
    frames = frames[steps[-1] + 1 :] if steps else frames
    if any(
        f.name in _OF_METRICS or f.filename.endswith(_GRADIENTS) for f in frames
    ):
        return None
    for frame in reversed(frames):
        name = frame.filename
        if name.startswith((_TENSORFLOW + os.sep, *_FUNCTIONS)):
            continue
        if name.startswith(_OF_MODELS):
            return ""
        if name.startswith((_KERAS + os.sep, _OWN + os.sep)):
            return None
        source = linecache.getline(name, frame.lineno).strip()
        return f", {name}:{frame.lineno}: {source}"
    return None
