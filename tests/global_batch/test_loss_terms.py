"""Sums and denominators of parts, against stock Keras on the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity._tf import keras_losses
from keras_sparsity.global_batch import losses
from tests import oracles
from tests.conftest import engines, engines_and_sizes

BATCH, TIME, CLASSES = 7, 5, 4


REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")


def _arrays():
    rng = np.random.default_rng(0)
    mask = rng.random((BATCH, TIME)) < 0.4
    mask[0] = False  # a rank whose places are all masked
    return {
        "x": rng.normal(size=(BATCH, TIME, CLASSES)).astype("float32"),
        "kernel": rng.normal(size=(CLASSES, CLASSES)).astype("float32"),
        "dense": rng.normal(size=(BATCH, TIME, CLASSES)).astype("float32"),
        "classes": rng.integers(0, CLASSES, (BATCH, TIME)),
        "no mask": None,
        "mask": mask,
        "nothing valid": np.zeros_like(mask),
        "no weights": None,
        "weights": rng.random((BATCH, 1)).astype("float32"),
        "place weights": rng.random((BATCH, TIME)).astype("float32"),
    }


def scalar_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


class OwnCall(keras.losses.Loss):
    """Overrides what Keras means to be kept."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return 2 * super().__call__(y_true, y_pred, sample_weight)

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


LOSSES = {
    "mse": (lambda r: keras.losses.MeanSquaredError(reduction=r), "dense"),
    "sparse": (
        lambda r: keras.losses.SparseCategoricalCrossentropy(reduction=r),
        "classes",
    ),
    "ignore_class": (
        lambda r: keras.losses.SparseCategoricalCrossentropy(
            reduction=r, ignore_class=3
        ),
        "classes",
    ),
    "function": (lambda r: keras.losses.cosine_similarity, "dense"),
    "name": (lambda r: "huber", "dense"),
    "scalar": (lambda r: scalar_loss, "dense"),
    "own_call": (lambda r: OwnCall(reduction=r), "dense"),
    "dice": (lambda r: keras.losses.Dice(reduction=r), "dense"),
    "dice_axis": (lambda r: keras.losses.Dice(r, axis=(1, 2)), "dense"),
    "dice_places": (lambda r: keras.losses.Dice(r, axis=(0, 2)), "dense"),
    "cosine_axis": (
        lambda r: keras.losses.CosineSimilarity(reduction=r, axis=0),
        "dense",
    ),
    "crossentropy": (lambda r: "crossentropy", "classes"),
}


def _cases():
    of_batch = ("dice", "cosine")
    for name in LOSSES:
        reductions = REDUCTIONS
        if name in ("function", "name", "scalar", "crossentropy"):
            reductions = REDUCTIONS[:1]
        for reduction in reductions:
            if reduction == "mean" and name != "mse":
                continue  # another name for "sum_over_batch_size"
            for mask in ("no mask", "mask", "nothing valid"):
                if mask != "no mask" and name.startswith(of_batch):
                    continue
                for weights in ("no weights", "weights", "place weights"):
                    if weights != "no weights" and name.startswith(of_batch):
                        continue
                    yield name, reduction, mask, weights


def _value_and_gradient(loss, arrays, case, rows):
    """Keras's value and the gradient; `rows` of every array."""
    name, _, mask, weights = case
    targets = LOSSES[name][1]
    cut = {k: v if v is None else v[rows] for k, v in arrays.items()}
    kernel = tf.Variable(arrays["kernel"])
    with tf.GradientTape() as tape:
        y_pred = tf.nn.softmax(tf.constant(cut["x"]) @ kernel)
        if cut[mask] is not None:
            y_pred._keras_mask = tf.constant(cut[mask])
        value = loss(tf.constant(cut[targets]), y_pred, cut[weights])
    return value.numpy(), tape.gradient(value, kernel).numpy()


def _own_rows(communicator):
    rank, size = communicator.rank, communicator.size
    return slice(rank * BATCH // size, (rank + 1) * BATCH // size)


def compare_with_stock(cases):
    """What differs, for each of the cases."""
    communicator = collectives.current()
    arrays = _arrays()
    wrong = []
    for case in cases:
        make = LOSSES[case[0]][0]
        expected = _value_and_gradient(
            keras_losses.resolve_loss(
                make(case[1]),
                tf.constant(arrays[LOSSES[case[0]][1]]),
                tf.constant(arrays["x"]),
            ),
            arrays,
            case,
            slice(None),
        )
        loss = losses.globalize(make(case[1]), communicator)
        value, gradient = _value_and_gradient(
            loss, arrays, case, _own_rows(communicator)
        )
        # Outside of a strategy nothing divides by the number of ranks.
        gradient = communicator.all_reduce(
            [tf.constant(gradient)], op="mean", name="gradient"
        )[0]
        for what, mine, stock in (
            ("value", value, expected[0]),
            ("gradient", gradient, expected[1]),
        ):
            if not np.allclose(mine, stock, rtol=1e-4, atol=1e-6):
                wrong.append((case, what, mine, stock))
    return wrong


@pytest.mark.parametrize(
    ("engine", "num_processes"), engines_and_sizes("horovod")
)
def test_value_and_gradient_are_of_the_whole_batch(
    cluster, engine, num_processes
):
    cases = list(_cases())
    results = cluster(engine, num_processes).run(compare_with_stock, cases)
    assert results == [[]] * num_processes


def parts_without_examples():
    """A batch of one example leaves all ranks but one without any."""
    communicator = collectives.current()
    is_mine = communicator.rank == communicator.size - 1
    results = []
    for loss in ("mse", scalar_loss):
        loss = losses.globalize(loss, communicator)
        rows = slice(0, int(is_mine))
        kernel = tf.Variable(2.0)
        with tf.GradientTape() as tape:
            y_pred = kernel * tf.constant([[3.0]])[rows]
            value = loss(tf.constant([[1.0]])[rows], y_pred)
        gradient = communicator.all_reduce(
            [tape.gradient(value, kernel)], op="mean", name="gradient"
        )[0]
        results.append((float(value), float(gradient)))
    return results


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_empty_parts_count_nothing(cluster, engine):
    for result in cluster(engine, 2).run(parts_without_examples):
        assert result == [(25.0, 30.0)] * 2


TARGETS = (1.0, np.float32(0.5), [[1.0]])


def of_one_target(loss_of, rows, targets):
    """Values and gradients of rows of unknown number, each target for all."""
    found = []
    for target in targets:
        target = target if isinstance(target, float) else tf.constant(target)

        @tf.function(input_signature=[tf.TensorSpec([None, 1])])
        def run(inputs, target=target):
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                value = loss_of(target, 3 * inputs)
            return value, tape.gradient(value, inputs)

        inputs = np.arange(7, dtype="float32").reshape(7, 1)[rows]
        found.append([each.numpy() for each in run(inputs)])
    return found


def of_one_target_on_ranks():
    communicator = collectives.current()
    rows = slice(0, 3) if communicator.rank == 0 else slice(3, 7)
    of_parts = of_one_target(losses.GlobalMean("mse"), rows, TARGETS)
    # Gathered, a row of each rank's is one of each rank's examples.
    loss_of = losses.GlobalMean("mse", whole_batch=True)
    return of_parts + of_one_target(loss_of, rows, TARGETS[:2])


def test_a_target_may_be_one_for_all_examples(cluster):
    """As a discriminator's, `loss(1.0, y_pred)`."""
    stock = keras.losses.MeanSquaredError()
    expected = of_one_target(stock, slice(None), TARGETS + TARGETS[:2])
    ranks = cluster("native", 2).run(of_one_target_on_ranks)
    for ours, theirs, (value, gradient) in zip(*ranks, expected, strict=True):
        np.testing.assert_allclose([ours[0], theirs[0]], [value] * 2, 1e-6)
        joined = np.concatenate([ours[1], theirs[1]]) / 2
        np.testing.assert_allclose(joined, gradient, 1e-6)


def messages_of_a_gradient(loss):
    """What it waits for, where the number of examples is not known before."""
    loss = losses.GlobalMean(loss)
    found = []
    numbers = tf.TensorSpec([None, 2])

    @tf.function(input_signature=[numbers, numbers])
    def step(y_true, inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y_pred = 2 * inputs
            value = loss(y_true, y_pred)
        gradient = tape.gradient(value, inputs)
        needed, of_all = map(oracles.messages, (gradient, value))
        needs_outputs = any(
            y_pred.op in oracles.ancestors(message.outputs[0])
            for message in needed
        )
        found.append((len(needed), len(of_all), needs_outputs))
        return value

    step(np.ones((3, 2), "float32"), np.ones((3, 2), "float32"))
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        step(np.ones((1, 2), "float32"), np.ones((3, 2), "float32"))
    return found[0], str(error.value)


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_a_gradient_waits_for_no_outputs_of_others(cluster, engine):
    for found, message in cluster(engine, 2).run(messages_of_a_gradient, "mse"):
        assert found == (1, 2, False)
        assert "as many targets as outputs" in message
