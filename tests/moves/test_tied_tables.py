"""A table that is an embedding and a softmax's kernel moves as one."""

import contextlib
from unittest import mock

import keras
import pytest

import keras_sparsity as ks
from keras_sparsity.callbacks import auto_architecture, move_times
from keras_sparsity.collectives import speeds
from tests.conftest import engines
from tests.layers import test_tied as tied
from tests.layers.test_sampled_softmax import as_dataset, global_batches

# By the number of a step, those of the kernel and of the bias.
PLACES = {
    0: (("ps", 5), ("ps", 1)),
    2: ("allgather", ("ps", 3)),
    4: ("allreduce", "allgather"),
    6: (("ps", 4), "allreduce"),
}


class Moves(keras.callbacks.Callback):
    """Moves the kernel and the bias after some of the steps."""

    def on_train_batch_end(self, batch, logs=None):
        if batch in PLACES:
            tables = self.model.softmax_layer.tables
            places = zip(tables, PLACES[batch], strict=True)
            ks.moves.move(self.model, dict(places))


def moved():
    """By hand, to the same places and to places of their own."""
    return {}, [Moves()], contextlib.nullcontext()


def searched():
    """By a search of 1, 2 and perhaps more partitions."""
    search = ks.callbacks.PartitionSearch(
        num_steps=1, num_warm_up_steps=0, verbose=0
    )
    return {"architecture": "ps"}, [search], contextlib.nullcontext()


def found():
    """By `"auto"`, as if AllReduce paid after three steps already."""
    patches = contextlib.ExitStack()
    costs = {"allreduce": 1.0, "ps": 9.0, "allgather": 9.0, "update": 0.0}
    found = {path: speeds.Speed(0.0, cost) for path, cost in costs.items()}
    for patch in (
        mock.patch.object(move_times, "REFERENCE", found),
        mock.patch.object(auto_architecture, "_FIRST_STEPS", 3),
        mock.patch.object(
            auto_architecture.AutoArchitecture, "_pays", lambda *_: True
        ),
    ):
        patches.enter_context(patch)
    return {"architecture": "auto"}, [], patches


WAYS = {"moved": moved, "searched": searched, "found": found}
# Eagerly where each of several moves would trace the step once more.
CASES = {
    "moved": ("functional", "adam", True),
    "searched": ("subclassed", "momentum", True),
    "found": ("functional", "adagrad", False),
}


def places(softmax):
    """Of the kernel and the bias."""
    return tuple(
        (table.architecture, table.is_sharded and table.layout.num_partitions)
        for table in softmax.tables
    )


def train(way):
    """What training gives on this rank, and where the tables have been."""
    kind, rule, run_eagerly = CASES[way]
    options, callbacks, patches = WAYS[way]()
    model, softmax = tied.KINDS[kind]()
    model.softmax_layer = softmax
    with ks.HybridStrategy(**options).scope():
        model.compile(
            tied.RULES[rule](), softmax.loss(), run_eagerly=run_eagerly
        )
    words = softmax.table
    been = [places(softmax)]
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: been.append(places(softmax))
    )
    dataset = as_dataset(global_batches())
    with patches:
        model.fit(
            dataset, shuffle=False, verbose=0, callbacks=[*callbacks, note]
        )
    assert softmax.table is words and softmax.kernel_table is words.table
    assert softmax.kernel is words.embeddings
    assert len(model.trainable_variables) == 4
    return been, {
        "weights": model.get_weights(),
        "evaluated": model.evaluate(dataset, verbose=0),
        "predicted": model.predict(dataset, verbose=0),
    }


def check_places(way, been):
    """That the tables have been where they were moved to."""
    first, last = (("ps", 2),) * 2, (("allreduce", False),) * 2
    if way == "moved":
        ends = [been[step + 1] for step in PLACES]
        for found, targets in zip(ends, PLACES.values(), strict=True):
            assert found == tuple(
                (to, False) if isinstance(to, str) else to for to in targets
            )
    elif way == "searched":
        assert len(set(been)) > 2
        assert all(kernel == bias for kernel, bias in been)
    else:
        assert (been[0], been[-1]) == (first, last)


def _ways():
    """Each of them on one engine; on both in `make test-all`."""
    for engine in engines():
        for way in WAYS:
            usually = "horovod" if way == "found" else "native"
            is_left = engine.values[0] != usually
            marks = [*engine.marks, *[pytest.mark.all_cells] * is_left]
            yield pytest.param(*engine.values, way, marks=marks)


@pytest.mark.parametrize(("engine", "way"), list(_ways()))
def test_moves_leave_a_tie_and_its_training_as_they_are(cluster, engine, way):
    for been, result in cluster(engine, 2).run(train, way, timeout=200):
        check_places(way, been)
        tied.check(result, CASES[way][1])
