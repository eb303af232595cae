"""Logs, results and ends of epochs are those of all workers."""

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests import asynchronous_functions as functions

WITHIN = ["evaluate", "predict", "test_on_batch", "predict_on_batch"]


def _compiled(model, optimizer="sgd", loss="mse", **options):
    strategy = ks.HybridStrategy(synchronous=False, max_staleness=1)
    with strategy.scope():
        model.compile(optimizer, loss, **options)
    return strategy


def _data():
    x, y = functions.data()
    return x.astype("float32"), y


def _at_batch(function):
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: function()
    )


def _fit(model, *callbacks, **options):
    options = {"epochs": 2, "shuffle": False, "verbose": 0} | options
    return model.fit(*_data(), functions.BATCH, callbacks=callbacks, **options)


def test_metrics_read_within_an_epoch_do_not_end_it():
    found = []
    for is_served in (True, False):
        model, losses = functions.dense(), []
        if is_served:
            _compiled(model)
        else:
            model.compile("sgd", "mse")
        read = _at_batch(
            lambda model=model, losses=losses: losses.append(
                float(model.get_metrics_result()["loss"])
            )
        )
        history = _fit(model, read).history
        found.append((losses, history["loss"], *model.get_weights()))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5)


def within_an_epoch(is_traced):
    """What calls within an epoch raise, and the history of that `fit`."""
    model = functions.dense()
    _compiled(model)
    x, y = _data()
    if is_traced:
        model.evaluate(x, y, verbose=0)
    errors = {}

    def call():
        for name in WITHIN:
            labels = () if "predict" in name else (y,)
            with pytest.raises(ValueError) as error:
                getattr(model, name)(x, *labels)
            errors[name] = str(error.value)

    history = _fit(model, _at_batch(call), validation_data=(x, y)).history
    return errors, history, model.get_weights()


@pytest.mark.parametrize("num_servers", [0, 1])
@pytest.mark.parametrize("is_traced", [False, True])
def test_evaluation_within_an_epoch_is_refused(cluster, num_servers, is_traced):
    model = functions.dense()
    model.compile("sgd", "mse")
    expected = _fit(model, validation_data=_data()).history
    ranks = cluster("native", 1, num_servers=num_servers)
    for rank, (errors, history, weights) in enumerate(
        ranks.run(within_an_epoch, is_traced)
    ):
        assert list(errors) == ([] if rank else WITHIN)
        for name, error in errors.items():
            assert f"`model.{name}` within an epoch" in error
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, 1e-5)
        for one, other in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, 1e-5, 1e-6)
