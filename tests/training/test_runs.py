"""Runs on input of every structure, as stock Keras in one process."""

import contextlib
import csv
import itertools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import epoch_iterator

import keras_sparsity as ks
from keras_sparsity._tf import keras_input
from tests.callbacks.test_stopping import StopsOnRank1
from tests.conftest import engines

pytestmark = pytest.mark.smoke


def orders_of_epochs():
    """The labels of each step, over epochs, of shuffled arrays."""
    # As at the start of a script that sets no seed.
    tf.random.set_seed(ks.collectives.agreed_seed())
    x = np.arange(32, dtype="float32").reshape(32, 1)
    seen = []

    class Noting(keras.Sequential):
        def train_step(self, data):
            seen.append(data[0].numpy().ravel().tolist())
            return super().train_step(data)

    noting = Noting([keras.Input((1,)), keras.layers.Dense(1)])
    with ks.HybridStrategy().scope():
        noting.compile("sgd", "mse", run_eagerly=True)
    noting.fit(x, x, batch_size=32, epochs=3, verbose=0)
    return seen


def test_arrays_are_shuffled_alike_and_anew_in_each_epoch(cluster):
    first, second = cluster("native", 2).run(orders_of_epochs)
    assert len(first) == len(second) == 3
    for ours, theirs in zip(first, second, strict=True):
        assert sorted(ours + theirs) == list(range(32))
    assert first[0] != first[1] != first[2]


class Sides(keras.Model):
    """Ten times the first input, and the second, of any structure."""

    def __init__(self):
        super().__init__()
        self.scale = keras.layers.Dense(1, use_bias=False)

    def call(self, inputs):
        first, *others = keras.tree.flatten(inputs)
        self.add_loss(keras.ops.mean(keras.ops.square(self.scale(first))))
        return sum((10 * keras.ops.sum(x, 1) for x in others), first[:, 0])


def structures():
    """Inputs without labels, in each structure that Keras takes."""
    a = np.arange(7, dtype="float32").reshape(7, 1)
    b = a + 100
    return {
        "list": [a, b],
        "list of one": [a],
        "dict of one": {"a": a},
        "nested": {"a": [a, b], "c": (b,)},
    }


def without_labels(strategy=None):
    """What a model gives for inputs alone, in each way of giving them."""
    results = {}
    scope = strategy.scope if strategy else contextlib.nullcontext
    size = strategy.size if strategy else 1
    for kind, x in structures().items():
        sides = Sides()
        sides.scale.kernel_initializer = keras.initializers.Constant(0.5)
        with scope():
            sides.compile(keras.optimizers.SGD(0.01))
        # A dataset has no lists, and takes a tuple for labels and weights.
        of_tuples = keras.tree.lists_to_tuples(x)
        dataset = tf.data.Dataset.from_tensor_slices((of_tuples,)).batch(4)
        whole_batches = dataset.take(1)
        if size > 1:
            whole_batches = strategy.shard(whole_batches)
        options = {"verbose": 0}
        results[kind] = [
            sides.predict(x, batch_size=4, **options),
            sides.predict(dataset, **options),
            sides.predict(whole_batches, **options),
            sides.predict_on_batch(x),
            sides.evaluate(x, batch_size=4, **options),
            sides.evaluate(dataset, **options),
            sides.fit(
                x, batch_size=4, shuffle=False, epochs=2, **options
            ).history["loss"],
            sides.fit(dataset, shuffle=False, **options).history["loss"],
            sides.train_on_batch(x),
            sides.test_on_batch(x),
            sides.get_weights()[0],
        ]
    return results


def without_labels_on_ranks():
    return without_labels(ks.HybridStrategy(prefetch=True))


def run_within_executions():
    """Errors where Keras cannot end an epoch within an execution.

    Of `fit`, by its own batches and by those of its validation, `evaluate`,
    and `fit` of as many batches as an execution needs.
    """
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with ks.HybridStrategy().scope():
        model.compile("sgd", "mse", steps_per_execution=2)
    odd, even = ((np.ones((n, 1)),) * 2 for n in (10, 8))
    options = {"batch_size": 2, "verbose": 0}
    errors = []
    with mock.patch.object(keras_input, "ENDS_EXECUTIONS", False):
        for run in (
            lambda: model.fit(*odd, **options),
            lambda: model.fit(*even, validation_data=odd, **options),
            lambda: model.evaluate(*odd, **options),
            lambda: model.fit(*even, validation_data=even, **options),
        ):
            try:
                run()
                errors.append(None)
            except ValueError as error:
                errors.append(str(error))
    return errors


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_epochs_that_end_within_an_execution(cluster, engine):
    for *refused, fitted in cluster(engine, 2).run(run_within_executions):
        assert all("Received: 5 batches" in error for error in refused)
        assert fitted is None


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_inputs_without_labels_keep_their_structure(cluster, engine):
    expected = without_labels()
    for found in cluster(engine, 2).run(without_labels_on_ranks):
        for kind, values in expected.items():
            for index, value in enumerate(values):
                np.testing.assert_allclose(
                    found[kind][index], value, 1e-5, err_msg=f"{kind} {index}"
                )


def test_one_process_takes_batches_that_no_other_could_share():
    """Such as a graph's nodes and edges, of other numbers."""

    class Graph(keras.Model):
        def call(self, inputs):
            nodes, edges = inputs["nodes"], inputs["edges"]
            return keras.ops.take(nodes, edges[:, 1], axis=0)

    model = Graph()
    with ks.HybridStrategy().scope():
        model.compile("sgd", "mse")
    nodes = np.arange(3, dtype="float32")[:, None]
    x = {"nodes": nodes, "edges": np.array([[0, 1], [1, 2], [2, 2], [2, 0]])}
    expected = nodes[[1, 2, 2, 0]]
    np.testing.assert_array_equal(model.predict_on_batch(x), expected)
    assert model.test_on_batch(x, expected) == 0


def runs_on_a_generator(strategy):
    """Losses, and predictions, on a generator that goes on after each run."""

    def numbered():
        for number in itertools.count():
            yield np.full((2, 4, 1), number, "float32")

    data = ((x, 0 * y) for x, y in numbered())
    model = keras.Sequential([keras.Input((1,))])
    for name in ("first", "second"):
        model.add(keras.layers.Dense(1, kernel_initializer="ones", name=name))
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.0), "mae")
    quiet = {"verbose": 0}
    found = []
    for epochs in ({"epochs": 2}, {}, {}):
        fitted = model.fit(
            data, steps_per_epoch=3, shuffle=False, **epochs, **quiet
        )
        found += fitted.history["loss"]
    validation = {"validation_data": data, "validation_steps": 3}
    fitted = model.fit(
        *(np.ones((8, 1)), np.ones((8, 1))), epochs=3, **validation, **quiet
    )
    found += fitted.history["val_loss"]
    if hasattr(epoch_iterator.EpochIterator, "reset"):  # since Keras 3.7
        found += [model.evaluate(data, steps=5, **quiet) for _ in range(2)]
        found += model.predict(data, steps=3, **quiet).ravel().tolist()
    return found


def runs_on_ranks():
    return runs_on_a_generator(ks.HybridStrategy())


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_runs_leave_further_batches_to_a_generator(cluster, engine):
    expected = runs_on_ranks()
    # Of the batches 0 to 2, 3 to 5, 6 to 8, ...
    np.testing.assert_allclose(expected[:4], [1, 4, 7, 10])
    for found in cluster(engine, 2).run(runs_on_ranks):
        np.testing.assert_allclose(found, expected)


def predictions_of_sharded():
    """What `predict` gives for a dataset that is split by elements."""
    strategy = ks.HybridStrategy()
    model = keras.Sequential([keras.layers.Identity()])
    with strategy.scope():
        model.compile()
    dataset = tf.data.Dataset.range(11).map(lambda i: i[None]).batch(6)
    shard = strategy.shard(dataset)
    read = next(iter(shard)).numpy().ravel().tolist()
    with pytest.raises(ValueError, match="without `strategy.shard`"):
        model.predict(shard.map(lambda x: x), verbose=0)
    return read, model.predict(shard, verbose=0)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_predictions_are_in_the_order_of_the_dataset(cluster, engine):
    found = cluster(engine, 3).run(predictions_of_sharded)
    for rank, (read, outputs) in enumerate(found):
        assert read == [rank, rank + 3]  # else it would not be reordered
        np.testing.assert_array_equal(outputs.ravel(), np.arange(11))


class Words(keras.layers.Layer):
    """Makes texts of each number, as many as the largest one says."""

    def call(self, numbers):
        count = tf.reduce_max(numbers, 0, keepdims=True)
        count = tf.cast(count[0, :1], tf.int32)
        texts = tf.strings.join(
            [tf.strings.as_string(numbers, 0), "ä\0"], "\xff"
        )
        return tf.tile(texts, tf.concat([[1], count], 0))

    def compute_output_spec(self, numbers):
        return keras.KerasTensor((None, None), "string")


def text_and_sparse_predictions():
    """Of parts of one width, of one example, and the error of two widths.

    And sparse predictions, of batches of two examples and of one; where this
    Keras has none, the error's text.
    """
    of_texts = keras.Sequential([Words()])
    with ks.HybridStrategy().scope():
        of_texts.compile()
    numbers = np.array([[2], [1], [0], [2], [2]], "int32")
    found = [of_texts.predict(x, verbose=0) for x in (numbers, numbers[:1])]
    sparse = keras.layers.CategoryEncoding(4, "one_hot", sparse=True)
    model = keras.Sequential([sparse])
    stock = keras.Sequential([sparse])
    stock.compile(run_eagerly=True)  # the layer asks for the batch's size
    stock = _sparse_predictions(stock, numbers[:3])
    with ks.HybridStrategy().scope():
        model.compile()
    codes = _sparse_predictions(model, numbers[:3])
    # Last: Horovod sends no message after it.
    with pytest.raises(Exception) as raised:
        of_texts.predict(numbers[:3], verbose=0)
    return *found, str(raised.value), codes, stock


def _sparse_predictions(model, numbers):
    try:
        codes = model.predict(numbers, batch_size=2, verbose=0)
    except AttributeError as error:  # Keras 3.5
        return str(error)
    return tf.sparse.to_dense(codes).numpy()


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_text_and_sparse_predictions(cluster, engine):
    expected, alone = [
        [[f"{i}\xffä\0".encode()] * 2 for i in numbers]
        for numbers in ([2, 1, 0, 2, 2], [2])
    ]
    processes = cluster(engine, 2)
    ranks = processes.run(text_and_sparse_predictions)
    if engine == "horovod":
        processes.stop()  # It sends no message after the error.
    for texts, one, message, codes, stock in ranks:
        np.testing.assert_array_equal(codes, stock)
        if not isinstance(stock, str):
            np.testing.assert_array_equal(codes, np.eye(4)[[2, 1, 0]])
        assert texts.tolist() == expected
        assert one.tolist() == alone
        if engine == "native":
            assert "shapes, by rank" in message


def runs_with_a_list(path):
    """What runs do with a `CallbackList` of the user's, each with messages.

    Args:
        path: of a file that `CSVLogger` writes.

    Returns:
        `(epochs, their losses, error of a backup, error of other inputs)`.
    """
    rank = ks.collectives.current().rank
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with ks.HybridStrategy().scope():
        model.compile("sgd", "mse")
    x = np.arange(8, dtype="float32").reshape(8, 1)
    callbacks = keras.callbacks.CallbackList(
        [keras.callbacks.CSVLogger(path), StopsOnRank1()],
        add_history=True,
        model=model,
    )
    given = list(callbacks.callbacks)
    history = model.fit(x, x, epochs=9, verbose=0, callbacks=callbacks)
    assert callbacks.callbacks == given
    backup = keras.callbacks.BackupAndRestore(path)
    errors = []
    for inputs, callback in ((x, backup), (x + rank, StopsOnRank1())):
        listed = keras.callbacks.CallbackList([callback], model=model)
        with pytest.raises(ValueError) as caught:
            model.fit(inputs, x, verbose=0, callbacks=listed)
        errors.append(str(caught.value))
    listed = keras.callbacks.CallbackList([backup], model=model)
    with pytest.raises(ValueError, match="BackupAndRestore"):
        model.evaluate(x, x, verbose=0, callbacks=listed)
    return history.epoch, history.history["loss"], *errors


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_list_of_the_users_does_as_any_other(cluster, engine, tmp_path):
    path = tmp_path / "log.csv"
    for epochs, losses, backup, inputs in cluster(engine, 2).run(
        runs_with_a_list, str(path)
    ):
        assert epochs == [0, 1]
        assert "BackupAndRestore" in backup
        assert "read different input" in inputs
        with path.open() as file:  # that one rank has written
            lines = list(csv.DictReader(file))
        assert [float(line["loss"]) for line in lines] == losses
