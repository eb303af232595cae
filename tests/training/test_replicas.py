"""Weights that a rank changes by itself."""

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests.conftest import engines

pytestmark = pytest.mark.smoke


def weighted(optimizer="adam"):
    """A table, noise and a dense layer, compiled; and a `fit` of it."""
    keras.utils.set_random_seed(4)
    x, y = np.arange(16).reshape(8, 2) % 10, np.ones((8, 1), "float32")
    weighted = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            ks.layers.ShardedEmbedding(10, 3, name="table"),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1, name="dense"),
        ]
    )
    strategy = ks.HybridStrategy(architecture="hybrid")
    with strategy.scope():
        weighted.compile(optimizer, "mse")

    def fit():
        weighted.fit(x, y, batch_size=4, verbose=0)

    return weighted, fit, (x, y), strategy.rank


def set_before_training(path):
    """Messages, and what of 5s every rank has after it has set them."""
    keras.utils.clear_session()
    model, fit, (x, _), rank = weighted(keras.optimizers.SGD(0.0))
    fives = [np.full(v.shape, 5.0) for v in model.weights]
    model.save_weights(path)
    messages = []

    def refused(call, change, *ranks):
        if rank in ranks:
            change()
        with pytest.raises(ValueError) as error:
            call()
        messages.append(str(error.value))
        model.set_weights(fives)

    table = model.get_layer("table")

    def set_fours():
        table.embeddings.assign(fives[0] - 1)

    refused(fit, lambda: model.set_weights(fives), 0)
    refused(lambda: model.predict(x, verbose=0), set_fours, 0)
    refused(lambda: model.train_on_batch(x, x[:, :1]), set_fours, 1)
    refused(fit, lambda: model.load_weights(path), 0)
    refused(fit, lambda: model.set_weights([w * rank for w in fives]), 0, 1)
    refused(lambda: model.save_weights(path), set_fours, 1)
    fit()
    weights = [table.table.read(), model.get_layer("dense").get_weights()[0]]
    return messages, weights


def change_between_runs(path):
    """Messages of each change, and every rank's dense weights at the end."""
    keras.utils.clear_session()
    model, fit, (x, y), rank = weighted()
    dense = model.get_layer("dense")
    fit()
    fit()  # with the ranks' own dropout
    model.save_weights(path)
    messages = {}

    def refused(name, call, change, *ranks):
        kept = [v.numpy() for v in model.optimizer.inner_optimizer.variables]
        if rank in ranks:
            change()
        with pytest.raises(ValueError) as error:
            call()
        messages[name] = str(error.value)
        model.load_weights(path)
        variables = model.optimizer.inner_optimizer.variables
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)
        fit()

    def slot():
        for variable in model.optimizer.inner_optimizer.variables:
            if "dense" in variable.path and "bias" in variable.path:
                variable.assign(variable + 1.0)

    refused("fit", fit, lambda: dense.kernel.assign(dense.kernel + 1.0), 1)
    refused(
        "predict",
        lambda: model.predict(x, verbose=0),
        lambda: dense.kernel.assign(dense.kernel[::-1]),
        0,
    )
    dense.trainable = False
    refused(
        "evaluate",
        lambda: model.evaluate(x, y, verbose=0),
        lambda: dense.bias.assign([np.nan]),
        1,
    )
    dense.trainable = True
    refused("slot", fit, slot, 1)
    refused("load_weights", fit, lambda: model.load_weights(path), 1)
    # Other processors round in another way.
    if rank == 1:
        dense.kernel.assign(dense.kernel * (1 + 1e-6))
    fit()
    return messages, dense.get_weights()


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_weights_that_one_rank_sets_are_refused(cluster, engine, tmp_path):
    path = tmp_path / "of_both.weights.h5"
    results = cluster(engine, 2).run(set_before_training, str(path))
    for messages, weights in results:
        assert len(messages) == 6
        for message in messages:
            assert "on every rank" in message and "table" in message
        assert "table/embeddings: values were set on rank 0\n" in messages[0]
        for values in weights:
            np.testing.assert_array_equal(values, 5.0)


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_replicas_that_one_rank_changed_are_seen(cluster, engine, tmp_path):
    path = tmp_path / "between.weights.h5"
    first, second = cluster(engine, 2).run(change_between_runs, str(path))
    for messages, weights in (first, second):
        assert "dense/kernel: rank 1" in messages["fit"]
        assert "dense/kernel: rank 1" in messages["predict"]
        assert "dense/bias: rank 1" in messages["evaluate"]
        assert "bias" in messages["slot"]
        assert "values were set on rank 1" in messages["load_weights"]
        for ours, theirs in zip(weights, first[1], strict=True):
            np.testing.assert_array_equal(ours, theirs)
