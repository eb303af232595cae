"""Warns of layers and losses that mix the examples of a batch.

Each process, or pass of a model in stages, sees its own part of the batch, so
they differ from those of one process, silently. They are looked for in the
graph of a step, once, when it is traced. Where the graph does not tell, nothing
is said.
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
_GRADIENTS = tuple(
    os.path.join(room, name)
    for room, name in (
        ("eager", "imperative_grad.py"),
        ("ops", "gradients_util.py"),
    )
)
# Of most operations of gradients: their tracebacks need not be read.
_NAME_OF_GRADIENTS = "gradient_tape/"
# The ranks' sums of metrics are added up.
_OF_METRICS = frozenset(["update_state", "compute_metrics"])


class Mixing:
    """What is known to mix the examples of one adopted model.

    Args:
        is_teller: whether this rank warns.
        parts: what computes parts of a batch, for the warning.
        advice: what to use instead, for the warning.
    """

    def __init__(self, model, is_teller, parts, advice):
        self._model, self._is_teller = model, is_teller
        self._parts, self._advice = parts, advice
        self._told = {}

    @property
    def told(self):
        """Dict from places to the warnings of them so far, texts."""
        return dict(self._told)

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
            if axes.has_known(op) and not _is_left_out(op):
                for mixing in axes.follow(op):
                    self._tell(mixing)

    def _tell(self, op):
        place = _place(op)
        if place is None:
            return
        self.tell(
            place,
            f"The model '{self._model.name}' mixes the examples of a batch, "
            f"and each {self._parts} has its own part of it: the result is "
            f"another one than in one process. Found: {op.type} of "
            f"'{op.name}'{place}. {self._advice}.",
        )

    def tell(self, place, text):
        """Warns of a place once, this rank's or another one's."""
        if place not in self._told:
            self._told[place] = text
            logging.getLogger(__name__).warning("%s", text)


def of_processes(model, communicator):
    """`Mixing` of a model whose batches the processes divide."""
    size = communicator.size
    return Mixing(
        model,
        communicator.rank == 0 and size > 1,
        f"of {size} processes",
        "Gather the rows of all processes first, `ks.gather_batch(x)`, or give "
        "`compile` a loss `ks.losses.GlobalMean(loss, whole_batch=True)`",
    )


def of_passes(model, peers):
    """`Mixing` of a model in stages, whose passes may be of parts.

    Args:
        peers: `Collectives` of the ranks of this rank's stage.
    """
    return Mixing(
        model,
        peers.rank == 0,
        "pass of its stages",
        "Use `ks.PipelineStrategy(num_micro_batches=1)` with one process for "
        "each stage",
    )


def _frames(op):
    """Where an operation was made, from the step on."""
    frames = list(op.traceback or ())  # None of those that C++ makes
    steps = [i for i, f in enumerate(frames) if f.filename == _STEP]
    return frames[steps[-1] + 1 :] if steps else frames


def _is_left_out(op):
    """Whether an operation is of a metric or gradient.

    Their outputs are not followed either: gradients of embeddings have a row
    for each example, which a step of the user's may clip by the norm of all.
    """
    return op.name.startswith(_NAME_OF_GRADIENTS) or any(
        frame.name in _OF_METRICS or frame.filename.endswith(_GRADIENTS)
        for frame in _frames(op)
    )


def _place(op):
    """Where a user's code made an operation.

    Returns:
        `", file:line: source"`, empty of a functional model's operation, or
        None where the library or Keras's layers and losses did.
    """
    for frame in reversed(_frames(op)):
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
