"""One `fit` with variables at servers: what it leaves, and what it tells."""

import contextlib
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.asynchronous import servers, store
from tests import asynchronous_functions as functions

X, Y = np.ones((4, 2), "int32"), np.ones((4, 2, 2), "float32")


def _served(layer):
    model = keras.Sequential([keras.Input((2,), dtype="int32"), layer])
    strategy = ks.HybridStrategy(synchronous=False, max_staleness=1)
    with strategy.scope():
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return strategy, model


class _NoLuck(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise ArithmeticError("no luck")


def _noted(monkeypatch, module, name):
    """The arguments with which a function is called from now on; and it."""
    calls, stock = [], getattr(module, name)

    def noted(*args, **kwargs):
        calls.append((args, kwargs))
        return stock(*args, **kwargs)

    monkeypatch.setattr(module, name, noted)
    return calls, stock


@pytest.mark.parametrize("fails", [False, True])
def test_servers_keep_nothing_of_an_ended_fit(monkeypatch, fails):
    strategy, model = _served(keras.layers.Embedding(3, 2))
    cells, cell = _noted(monkeypatch, tf.raw_ops, "VarHandleOp")
    queues, queue = _noted(monkeypatch, tf.queue, "FIFOQueue")
    if fails:
        with pytest.raises(ArithmeticError):
            model.fit(X, Y, verbose=0, callbacks=[_NoLuck()])
    model.fit(X, Y, verbose=0)
    found = servers.started(strategy.collectives).cluster
    graph = tf.Graph()
    with graph.as_default(), tf.device(found.device(0)):
        are_there = [
            tf.raw_ops.VarIsInitializedOp(resource=cell(**kwargs))
            for _, kwargs in cells
        ]
        sizes = [queue(*args, **kwargs).size() for args, kwargs in queues]
    with found.session(graph) as session:
        are_there, sizes = session.run([are_there, sizes])
    # Of the table and its slot, and facts of the worker, and of the registry,
    # and of a worker that gives up.
    number = 2 + 2 * 11, 2 + 3 * 11
    assert len(are_there) == sum(number[: 1 + fails]) and not any(are_there)
    assert len(sizes) == sum((4, 6)[: 1 + fails]) and not any(sizes)


def test_an_ended_fit_leaves_nothing_in_memory(monkeypatch):
    """While its model lives on; Keras 3.5 itself keeps the step's graphs."""
    calls, _ = _noted(monkeypatch, store, "LastingSession")
    _, model = _served(keras.layers.Embedding(3, 2))
    for _ in range(2):
        model.fit(X, Y, verbose=0)
    graphs = [weakref.ref(graph) for (_, graph), _ in calls]
    calls.clear()
    gc.collect()
    assert [graph() for graph in graphs] == [None, None]


class _Interrupting(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt


def test_an_interrupted_fit_leaves_what_it_has_learnt():
    """In one process, as a notebook goes on."""
    x, y = functions.data()
    models = [functions.network() for _ in range(2)]
    for model, is_served in zip(models, (True, False), strict=True):
        strategy = ks.HybridStrategy(synchronous=False)
        with strategy.scope() if is_served else contextlib.nullcontext():
            model.compile(keras.optimizers.SGD(0.1), "mse")
        with pytest.raises(KeyboardInterrupt):
            model.fit(
                *(x, y, functions.BATCH),
                shuffle=False,
                callbacks=[_Interrupting()],
                verbose=0,
            )
        assert int(model.optimizer.iterations) == 3
    found, expected = (
        [*model.get_weights(), *model.optimizer.variables] for model in models
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)


def test_an_optimizer_of_other_variables_says_so():
    layer = keras.layers.Embedding(3, 2, trainable=False)
    inner = keras.Sequential([layer, keras.layers.Dense(2)])
    strategy, model = _served(inner)
    model.fit(X, Y, verbose=0)
    layer.trainable = True
    with strategy.scope():
        model.compile(model.optimizer, "mse")
    with pytest.raises(ValueError, match="(?s)Unknown.*new optimizer"):
        model.fit(X, Y, verbose=0)


class _Scaled(keras.layers.Embedding):
    def call(self, ids):
        return 2 * super().call(ids)


def test_a_table_that_travels_whole_is_warned_of_once(caplog):
    _, model = _served(_Scaled(3, 2, name="scaled"))
    for _ in range(2):
        model.fit(X, Y, verbose=0)
    (record,) = [r for r in caplog.records if "whole table" in r.message]
    assert "'scaled'" in record.message and "a _Scaled" in record.message
    caplog.clear()
    for layer in (
        keras.layers.Embedding(3, 2),
        _Scaled(3, 2, trainable=False),
    ):
        _, model = _served(keras.Sequential([layer, keras.layers.Dense(2)]))
        model.fit(X, Y, verbose=0)
    assert not [r for r in caplog.records if "whole table" in r.message]
