"""Losses of parts against stock Keras on the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity.global_batch import losses
from tests.conftest import engines


def scalar_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def _name(loss):
    """Of a loss, the same in each process."""
    return getattr(loss, "name", None) or getattr(loss, "__name__", str(loss))


def compile_loss_values():
    """Names and values through Keras's own handling of several outputs."""
    from keras.src.trainers.compile_utils import CompileLoss

    communicator = collectives.current()
    rng = np.random.default_rng(1)
    y_true = {"a": rng.random((5, 1)), "b": rng.integers(0, 3, (5,))}
    y_pred = {"a": rng.random((5, 1)), "b": rng.random((5, 3))}
    results = []
    rank, size = communicator.rank, communicator.size
    for is_part in (True, False):
        loss = {"a": "mse", "b": "crossentropy"}
        rows = slice(None)
        if is_part:
            loss = losses.globalize(loss, communicator)
            rows = slice(rank * 5 // size, (rank + 1) * 5 // size)
        compiled = CompileLoss(loss, {"a": 2.0, "b": 1.0}, output_names="ab")
        value = compiled(
            {k: tf.constant(v[rows], "float32") for k, v in y_true.items()},
            {k: tf.constant(v[rows], "float32") for k, v in y_pred.items()},
        )
        results.append((float(value), [m.name for m in compiled.metrics]))
    return results


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_several_outputs_keep_their_names(cluster, engine):
    for (value, names), (expected, stock_names) in cluster(engine, 2).run(
        compile_loss_values
    ):
        assert names == stock_names == ["a_loss", "b_loss"]
        assert value == pytest.approx(expected, rel=1e-6)


def gather_instead_of_sum():
    """A loss that compares the examples of a batch in pairs."""
    communicator = collectives.current()
    rng = np.random.default_rng(2)
    x = rng.normal(size=(6, 4)).astype("float32")
    labels = rng.integers(0, 2, (6,))

    def pairs(y_true, y_pred):
        same = keras.ops.cast(y_true[:, None] == y_true[None, :], "float32")
        products = tf.matmul(y_pred, y_pred, transpose_b=True)
        return keras.ops.mean(products * same)

    results = []
    for loss, rows in (
        (losses.GlobalMean(pairs, whole_batch=True), None),
        (pairs, slice(None)),
    ):
        if rows is None:
            rank, size = communicator.rank, communicator.size
            rows = slice(rank * 6 // size, (rank + 1) * 6 // size)
        kernel = tf.Variable(tf.eye(4))
        with tf.GradientTape() as tape:
            value = loss(
                tf.constant(labels[rows]), tf.constant(x[rows]) @ kernel
            )
        gradient = tape.gradient(value, kernel)
        if rows != slice(None):
            gradient = communicator.all_reduce(
                [gradient], op="mean", name="gradient"
            )[0]
        results.append((value.numpy(), gradient.numpy()))
    return results


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_whole_batch_serves_losses_that_are_no_sums(cluster, engine):
    for (value, gradient), (expected, stock) in cluster(engine, 2).run(
        gather_instead_of_sum
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient, stock, rtol=1e-4, atol=1e-6)


class TwoRanks:
    """Stands in where only the number of processes matters."""

    rank, size = 0, 2


@pytest.mark.parametrize(
    "loss",
    [
        "mse",
        keras.losses.mean_squared_error,
        keras.losses.Huber(),
        None,
        ["mse", None],
        ("mse", "mae"),
        {"a": "ce", "b": ["mse", "mae"]},
    ],
    ids=_name,
)
def test_unwrap_undoes_globalize(loss):
    wrapped = losses.globalize(loss, TwoRanks())
    assert losses.unwrap(wrapped) == loss
    for leaf in keras.tree.flatten(wrapped):
        assert leaf is None or isinstance(leaf, losses.GlobalMean)


def test_one_process_keeps_the_loss():
    loss = ["mse", keras.losses.Huber()]
    assert losses.globalize(loss) is loss


@pytest.mark.parametrize(
    "loss, name",
    [
        ("mse", "mse"),
        ("crossentropy", "crossentropy"),
        (keras.losses.MeanSquaredError(name="own"), "own"),
        (keras.losses.mean_squared_error, "mean_squared_error"),
        (scalar_loss, "scalar_loss"),
    ],
)
def test_names_are_those_of_stock(loss, name):
    assert losses.GlobalMean(loss).name == name


@pytest.mark.parametrize(
    "loss",
    ["mse", "crossentropy", keras.losses.Huber(delta=2.0, reduction="sum")],
    ids=_name,
)
def test_config_makes_the_same_loss(loss):
    loss = losses.GlobalMean(loss, whole_batch=False)
    config = keras.saving.serialize_keras_object(loss)
    copy = keras.saving.deserialize_keras_object(config)
    assert type(copy) is losses.GlobalMean
    assert (copy.name, copy.reduction) == (loss.name, loss.reduction)
    y_true, y_pred = np.array([[1.0], [0.0]]), np.array([[0.3], [0.6]])
    assert float(copy(y_true, y_pred)) == float(loss(y_true, y_pred))


def test_an_unknown_name_is_found_at_once():
    with pytest.raises(ValueError, match="no_such_loss"):
        losses.globalize("no_such_loss", TwoRanks())
