"""Facts that the bytes and the time of a workload's step depend on.

Counted and timed after the measured window, in the same processes.
"""

import time
from unittest import mock

import _rows
import keras
import numpy as np

import keras_sparsity as ks
from keras_sparsity._tf import keras_functional
from keras_sparsity.board import model_plan
from keras_sparsity.collectives import startup

_LAYERS = (ks.layers.ShardedEmbedding, ks.layers.ShardedEmbeddingBag)
# Steps whose rows are counted.
_MOST_STEPS = 20


def of_variables(model, inputs, batch, strategy):
    """The architecture and the sparsity of each trainable variable.

    A collective call between two steps.

    Args:
        model: a trained model.
        inputs: its training examples.
        batch: examples of a step, of all processes.
        strategy: the `ks.HybridStrategy`.

    Returns:
        List of dicts. `alpha` and `alpha_machine` are the library's counts;
        `exchange` is equal for variables whose rows share their messages;
        `rows` has the counts of `_rows.count` for tables whose ids are the
        inputs; `comes_first` is true for dense variables of layers that no
        other layer with dense weights precedes.
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
            found[-1]["rows"] = _rows_of(
                ids[id(variable)], batch, facts.shape[0], strategy.collectives
            )
    return found


def _rows_of(ids, batch, num_rows, ranks):
    """The counts of `_rows.count` in a table's ids, step by step."""
    ids = ids.reshape(len(ids) // batch, ranks.size, -1)
    return _rows.count(ids, ranks.cross_size, num_rows)


def _ids_of_tables(model, inputs, batch):
    """dict from a table's `id` to its ids in the inputs."""
    layers = [layer for layer in model.layers if isinstance(layer, _LAYERS)]
    if not layers:
        return {}
    inputs = keras.tree.flatten(inputs)
    count = min(_MOST_STEPS, len(inputs[0]) // batch) * batch
    # The layers' inputs, without the layers themselves.
    given = keras.Model(model.inputs, [layer.input for layer in layers])(
        [x[:count] for x in inputs]
    )
    return {
        id(layer.trainable_variables[0]): np.asarray(ids)
        for layer, ids in zip(layers, keras.tree.flatten(given), strict=True)
    }


def _of_first_layers(model):
    """The `id`s of dense variables that only tables' layers precede."""
    first, behind = set(), set()
    functional = keras_functional.functional_of(model)
    for call in (
        keras_functional.functional_calls(functional) if functional else ()
    ):
        operation, inputs, outputs, *_ = call
        is_behind = any(id(tensor) in behind for tensor in inputs)
        weights = getattr(operation, "trainable_variables", [])
        dense = [v for v in weights if getattr(v, "table", None) is None]
        if dense and not is_behind:
            first.update(map(id, dense))
        if dense or is_behind:
            behind.update(map(id, outputs))
    return first


def seconds_alone(prepare, warm_up, steps, ranks):
    """Seconds of a step of all processes at once, without any exchange.

    Each process trains the same model with the same library as a single
    process. The time ends with the slowest process, which all would wait for.

    Args:
        prepare: function without arguments that makes a model with this
            process's examples of a step, and returns a function that trains
            it with a list of callbacks.
        warm_up, steps: numbers of steps before the timed ones, and of these.
        ranks: the `Collectives` of all processes.
    """
    timed = _Timed(warm_up, steps, ranks)
    # The library now sees a single process.
    single = startup.single_process()
    with mock.patch.object(startup, "_started", single):
        prepare()([timed])
    return timed.seconds / steps


class _Timed(keras.callbacks.Callback):
    """As `_common.Timed`, without a network."""

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
