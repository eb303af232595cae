"""What the bytes and the time of a workload's step depend on.

Counted and timed behind the window that is measured, in the same processes.
"""

import time
from unittest import mock

import _rows
import keras
import numpy as np

import keras_sparsity as ks
from keras_sparsity import compat, model_plan
from keras_sparsity.collectives import startup

_LAYERS = (ks.layers.ShardedEmbedding, ks.layers.ShardedEmbeddingBag)
# Of so many steps the rows are counted.
_MOST_STEPS = 20


def of_variables(model, inputs, batch, strategy):
    """How each trainable variable travels, and how sparse it is.

    Every rank calls it, between two steps.

    Args:
        model: a model that was trained.
        inputs: what it was trained on.
        batch: examples of a step, of all processes.
        strategy: the `ks.HybridStrategy`.

    Returns:
        List of dicts. `alpha` and `alpha_machine` are what the library has
        counted; `exchange` is the same for variables whose rows share their
        messages; `rows` is what `_rows.count` counts in the inputs, of tables
        whose ids these are; `comes_first` is whether a dense one is of a layer
        that no other layer with dense weights comes before.
    """
    ids = {}
    if strategy.rank == 0:
        ids = _ids_of_tables(model, inputs, batch)
    first = _of_first_layers(model)
    found = []
    for variable, planned in zip(
        model.trainable_variables,
        model_plan.of_running(model).variables,
        strict=True,
    ):
        table = getattr(variable, "table", None)
        facts = planned.sparsity
        found.append(
            {
                "name": facts.name,
                "shape": facts.shape,
                "architecture": planned.architecture,
                "alpha": facts.alpha,
                "alpha_machine": facts.alpha_machine,
                "exchange": table and table.messages,
                "comes_first": id(variable) in first,
            }
        )
        if id(variable) in ids:
            ranks = strategy.collectives
            of_table = ids[id(variable)]
            found[-1]["rows"] = _rows.count(
                of_table.reshape(len(of_table) // batch, ranks.size, -1),
                ranks.cross_size,
                facts.shape[0],
            )
    return found


def _ids_of_tables(model, inputs, batch):
    """dict from a table's `id` to the ids that the inputs have of it."""
    layers = [layer for layer in model.layers if isinstance(layer, _LAYERS)]
    if not layers:
        return {}
    inputs = keras.tree.flatten(inputs)
    count = min(_MOST_STEPS, len(inputs[0]) // batch) * batch
    # What the layers are given, and nothing of what they do with it.
    given = keras.Model(model.inputs, [layer.input for layer in layers])(
        [x[:count] for x in inputs]
    )
    return {
        id(layer.trainable_variables[0]): np.asarray(ids)
        for layer, ids in zip(layers, keras.tree.flatten(given), strict=True)
    }


def _of_first_layers(model):
    """The `id`s of dense variables that only tables' layers come before."""
    first, behind = set(), set()
    functional = compat.functional_of(model)
    for call in compat.functional_calls(functional) if functional else ():
        operation, inputs, outputs, _ = call
        is_behind = any(id(tensor) in behind for tensor in inputs)
        weights = getattr(operation, "trainable_variables", [])
        dense = [v for v in weights if getattr(v, "table", None) is None]
        if dense and not is_behind:
            first.update(map(id, dense))
        if dense or is_behind:
            behind.update(map(id, outputs))
    return first


def seconds_alone(prepare, warm_up, steps, ranks):
    """Seconds of a step of all processes at once, none of which exchanges.

    The same library trains the same model, and is told that there is no other
    process. The time is that until the slowest is through, for whom all would
    wait.

    Args:
        prepare: function without arguments that makes a model with this
            process's examples of a step, and returns a function that trains
            it with a list of callbacks.
        warm_up, steps: those before, and those that are timed.
        ranks: the `Collectives` of all processes.
    """
    timed = _Timed(warm_up, steps, ranks)
    # What asks now who is there gets the same answer as in one process.
    single = startup._single_process()
    with mock.patch.object(startup, "_started", single):
        prepare()([timed])
    return timed.seconds / steps


class _Timed(keras.callbacks.Callback):
    """As `_common.Timed`, of what uses no network."""

    def __init__(self, warm_up, steps, ranks):
        super().__init__()
        self.warm_up, self.steps, self.ranks = warm_up, steps, ranks

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.warm_up:
            self.ranks.barrier("alone/begin")
            self._begin = time.perf_counter()
        if batch + 1 == self.warm_up + self.steps:
            self.ranks.barrier("alone/end")
            self.seconds = time.perf_counter() - self._begin
