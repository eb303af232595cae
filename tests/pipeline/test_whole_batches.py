"""Models that mix the examples of a mini-batch take whole ones, or warn."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests import pipeline_functions
from tests.logged import with_messages_of

# Of 33 examples, no number of parts makes them even.
_BATCH_SIZE, _NUM_EXAMPLES = 33, 66


@keras.saving.register_keras_serializable("tests")
class _Scores(keras.layers.Layer):
    """Of each example of one tower with all of the other."""

    def call(self, towers):
        first, second = towers
        return keras.ops.matmul(first, keras.ops.transpose(second))


def _model():
    keras.utils.set_random_seed(3)
    inputs = [keras.Input((6,), name=name) for name in "ab"]
    towers = [keras.layers.Dense(4, name=f"tower_{x.name}")(x) for x in inputs]
    scores = keras.layers.Rescaling(2.0)(_Scores(name="scores")(towers))
    return keras.Model(inputs, scores)


def _loss(labels, scores):
    """Other examples are wrong ones."""
    own = tf.range(tf.shape(scores)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(own, scores)


def trained(make=None):
    """Losses, predictions and weights.

    Args:
        make: function that makes a strategy; None: stock Keras.
    """
    draws = np.random.default_rng(1)
    x = list(draws.normal(size=(2, _NUM_EXAMPLES, 6)).astype("float32"))
    y = np.zeros(_NUM_EXAMPLES)
    model = _model()
    with make().scope() if make else contextlib.nullcontext():
        model.compile(keras.optimizers.SGD(0.1), _loss)
    options = {"batch_size": _BATCH_SIZE, "verbose": 0}
    history = model.fit(
        x, y, validation_data=(x, y), epochs=2, shuffle=False, **options
    ).history
    evaluated = model.evaluate(x, y, **options)
    predicted = model.predict(x, **options)
    losses = *history["loss"], *history["val_loss"], evaluated
    return losses, predicted, model.get_weights()


_expected = functools.cache(trained)


def _check(found):
    losses, predicted, weights = _expected()
    assert predicted.shape == (_NUM_EXAMPLES, _BATCH_SIZE)
    np.testing.assert_allclose(found[0], losses, rtol=1e-5)
    for value, expected in zip(
        [found[1], *found[2]], [predicted, *weights], strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["spectrain", "1f1b"])
def test_one_process(schedule):
    number = 1 if schedule == "1f1b" else None
    _check(trained(lambda: ks.PipelineStrategy(schedule, None, number)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "gpipe"}, r"4 parts.*None\).*num_micro_batches=1\)`"),
        ({"num_micro_batches": 2}, r"2 parts \(num_micro_batches=2\)"),
    ],
)
def test_parts_are_refused(options, expected):
    with ks.PipelineStrategy(**options).scope():
        with pytest.raises(ValueError, match=f"'scores' computes.*{expected}"):
            _model().compile("sgd", _loss)


def _two_tails(split):
    return ks.LayerPlacementStrategy(
        ["tower_a"], num_tail_workers=2, tail_split=split
    )


def on_three():
    """Results of `trained`, messages of two refusals, and warnings."""
    towers = ["tower_a", "tower_b"]
    results = [
        trained(lambda: ks.PipelineStrategy("1f1b", towers, 1)),
        # One worker has all examples of the tail.
        trained(lambda: ks.LayerPlacementStrategy(["tower_b"])),
        # Each of two has them, too.
        trained(lambda: _two_tails("columns")),
    ]

    def message(strategy):
        with strategy.scope():
            return pipeline_functions.message_of(
                lambda: _model().compile("sgd", _loss)
            )

    return (
        results,
        [
            message(ks.LayerPlacementStrategy(["scores"])),
            message(_two_tails("batch")),
            message(ks.PipelineStrategy("stash", ["tower_b"], replicas=[2, 1])),
        ],
        _warned(
            _centered(), _apart_from_others, "1f1b", 2, ["first", "centered"]
        ),
    )


def test_stages(cluster):
    returned = cluster("native", 3, has_groups=True).run(on_three)
    of_rank_zero, lines = returned[0][-1]
    assert len(of_rank_zero) == len(lines) == 2, lines
    # Of the second stage, and of the loss, which the third computes.
    assert sum("# found here" in line for line in lines) == 1
    for results, messages, _ in returned:
        for found in results:
            _check(found)
        for message in messages:
            assert "'scores' computes with pairs" in message
            assert "into 2 parts" in message


def _apart_from_others(y_true, y_pred):
    """A loss of outputs less their mean."""
    apart = y_pred - tf.reduce_mean(y_pred, 0, keepdims=True)  # found here
    return tf.reduce_mean(tf.square(apart - y_true), -1)


def _centered():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(4, name="first")(inputs)
    x = x - keras.ops.mean(x, axis=0, keepdims=True)
    x = keras.layers.Rescaling(2.0, name="centered")(x)
    return keras.Model(inputs, keras.layers.Dense(2)(x))


@with_messages_of("keras_sparsity.global_batch.mixing")
def _warned(lines, model, loss, schedule, num_micro_batches, stages=None):
    """Warnings of a training, and of a training and an evaluation."""
    strategy = ks.PipelineStrategy(schedule, stages, num_micro_batches)
    with strategy.scope():
        model.compile("sgd", loss)
    x = np.ones((8, 6), "float32")
    model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0)
    of_training = list(lines)
    model.evaluate(x, x[:, :2], batch_size=8, verbose=0)
    return of_training, lines


@pytest.mark.parametrize(
    ("schedule", "number", "num_of_training", "num"),
    [
        ("1f1b", None, 1, 1),
        ("1f1b", 1, 0, 0),
        ("stash", 2, 1, 1),
        ("spectrain", None, 0, 1),  # Evaluation has parts.
        ("spectrain", 1, 0, 0),
    ],
)
def test_means_over_parts_are_told_of(schedule, number, num_of_training, num):
    of_training, lines = _warned(_centered(), "mse", schedule, number)
    assert (len(of_training), len(lines)) == (num_of_training, num), lines
    for line in lines:
        assert "each pass of its stages has its own part" in line
        assert "Found: Mean" in line and "num_micro_batches=1)`" in line


def test_losses_of_parts_are_told_of():
    inputs = keras.Input((6,))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(2)(inputs))
    model = keras.Model(inputs, x)
    of_training, lines = _warned(model, _apart_from_others, "gpipe", 2)
    # Evaluation takes the loss of the whole mini-batch.
    assert len(of_training) == len(lines) == 1
    assert "test_whole_batches.py:" in lines[0] and "# found here" in lines[0]
