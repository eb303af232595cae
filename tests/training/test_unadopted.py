"""Models that are made in a scope, and not compiled there."""

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests.conftest import engines

pytestmark = pytest.mark.smoke

IDS = np.arange(14, dtype="int32").reshape(7, 2) % 5
TABLE = np.arange(15, dtype="float32").reshape(5, 3)
ROWS = TABLE[IDS].reshape(7, 6)


def encoded():
    """Predictions of a trained model's encoder, for the same seven inputs."""
    strategy = ks.HybridStrategy()
    with strategy.scope():
        inputs = keras.Input((2,), dtype="int32")
        table = ks.layers.ShardedEmbedding(5, 3, name="table")
        rows = keras.layers.Flatten()(table(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1, name="out")(rows))
        encoder = keras.Model(inputs, rows)
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.set_weights([TABLE, *model.get_weights()[1:]])
    model.fit(IDS, np.zeros((7, 1)), batch_size=4, verbose=0)
    outside = keras.Model(inputs, rows)

    def predict_whole(_, logs):
        predicted.append(encoder.predict(IDS, batch_size=4, verbose=0))

    predicted = [encoder.predict(IDS, batch_size=4, verbose=0)]
    predicted.append(encoder.predict_on_batch(IDS))
    with strategy.scope():
        predicted.append(outside.predict(IDS, batch_size=4, verbose=0))
    within = keras.callbacks.LambdaCallback(on_epoch_end=predict_whole)
    trained = model.fit(
        *(IDS, np.zeros((7, 1))),
        **dict(batch_size=4, verbose=0, callbacks=[within]),
    )
    with strategy.scope():  # and now as every adopted model
        encoder.compile()
    predicted.append(encoder.predict(IDS, batch_size=4, verbose=0))
    return predicted, trained.history["loss"]


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_each_rank_predicts_all_of_its_input(cluster, engine):
    for predicted, loss in cluster(engine, 2).run(encoded):
        assert len(predicted) == 5
        for each in predicted:
            np.testing.assert_array_equal(each, ROWS)
        assert np.isfinite(loss).all()


@pytest.mark.parametrize(
    "make",
    [ks.HybridStrategy, lambda: ks.PipelineStrategy(schedule="1f1b")],
    ids=["hybrid", "pipeline"],
)
def test_a_model_that_is_compiled_outside_is_refused(make):
    with make().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ones = np.ones((2, 1))
    message = "compiled outside of its strategy's scope.*SGD.*scope"
    for method in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
        with pytest.raises(ValueError, match=message):
            getattr(model, method)(ones, ones)
    assert model.predict(ones, verbose=0).shape == (2, 1)


def test_models_of_no_strategy_stay_as_they_are():
    with ks.HybridStrategy().scope():
        pass
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ones = np.ones((2, 1))
    assert len(model.fit(ones, ones, verbose=0).history["loss"]) == 1
    assert model.evaluate(ones, ones, verbose=0) >= 0
