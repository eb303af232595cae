"""Facts of a training on several processes, from `benchmarks/_facts.py`."""

import os
import pathlib
import sys

import keras
import numpy as np
import pytest

import keras_sparsity as ks

_BENCHMARKS = os.path.join(str(pathlib.Path(__file__).parents[2]), "benchmarks")
_BATCH, _STEPS = 12, 5


def _model():
    words = keras.Input((3,), dtype="int32", name="words")
    of_bag = keras.Input((2, 2), dtype="int32", name="of_bag")
    softmax = ks.layers.SampledSoftmax(20, 4)
    bag = ks.layers.ShardedEmbeddingBag(30, 4, combiner="sum", name="bag")
    hidden = keras.layers.Flatten()(ks.layers.ShardedEmbedding(50, 4)(words))
    hidden = keras.layers.Concatenate()([hidden, bag(of_bag[:, 1])])
    hidden = keras.layers.Dense(4, name="dense")(hidden)
    outputs = softmax(keras.layers.Dense(4, name="second")(hidden))
    return keras.Model([words, of_bag], outputs), softmax.loss()


def _data():
    generator = np.random.default_rng(1)
    count = _BATCH * _STEPS
    x = (
        generator.integers(0, 50, (count, 3)),
        generator.integers(0, 30, (count, 2, 2)),
    )
    return x, generator.integers(0, 20, count)


def _on_each_rank():
    sys.path.append(_BENCHMARKS)
    import _facts

    strategy = ks.HybridStrategy(architecture="hybrid")
    model, loss = _model()
    x, y = _data()
    with strategy.scope():
        model.compile("adagrad", loss)
    model.fit(x, y, _BATCH, shuffle=False, verbose=0)
    variables = _facts.of_variables(model, x, _BATCH, strategy)
    sizes, weights = [], []

    def prepare():
        alone = ks.HybridStrategy(architecture="hybrid")
        sizes.append(alone.size)
        model, loss = _model()
        with alone.scope():
            model.compile("adagrad", loss)

        def fit(callbacks):
            # Labels differ between ranks, so an exchange would show.
            of_rank = y if strategy.rank else (y + 1) % 20
            model.fit(x, of_rank, _BATCH, callbacks=callbacks, verbose=0)
            weights.append(model.layers[-1].get_weights()[0])

        return fit

    seconds = _facts.seconds_alone(prepare, 2, 3, strategy.collectives)
    sizes.append(ks.collectives.current().size)
    return variables, seconds, sizes, weights[0]


def test_variables_and_time_alone(cluster):
    (variables, seconds, sizes, weights), (*_, other_weights) = cluster(
        "native", 2
    ).run(_on_each_rank)
    of = {v["name"].rpartition("/")[0].rpartition("/")[2]: v for v in variables}
    x, _ = _data()
    for name, ids, num_rows in (
        ("sharded_embedding", x[0], 50),
        ("bag", x[1][:, 1], 30),
    ):
        found = of[name]
        parts = ids.reshape(_STEPS * 2, -1)
        alpha = np.mean([len(set(part.tolist())) / num_rows for part in parts])
        assert found["rows"]["alpha"] == pytest.approx(alpha)
        assert found["alpha"] == pytest.approx(alpha)
        assert found["architecture"] == "ps"
    assert "rows" not in of["sampled_softmax"]
    assert of["sampled_softmax"]["exchange"]
    assert of["dense"]["alpha"] is of["second"]["alpha"] is None
    assert {name for name in of if of[name]["comes_first"]} == {"dense"}
    assert 0 < seconds < 60
    assert sizes == [1, 2]
    assert not np.array_equal(weights, other_weights)
