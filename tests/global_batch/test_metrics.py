"""Metrics of parts against stock Keras on the whole data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity.global_batch import metrics
from tests.conftest import engines, engines_and_sizes

BATCH, CLASSES = 11, 4


class Counts(keras.metrics.Metric):
    """Variables of several dtypes and aggregations; returns them as such."""

    def __init__(self, name="counts"):
        super().__init__(name=name)
        add = self.add_variable
        self.examples = add((), "zeros", dtype="int32", name="examples")
        self.any_high = add((), "zeros", dtype="bool", name="any_high")
        self.constant = add((), "zeros", aggregation="mean", name="constant")
        self.total = add((2,), "zeros", dtype="float64", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        del sample_weight
        rows = keras.ops.shape(y_true)[0]
        self.examples.assign(self.examples + rows)
        high = keras.ops.any(y_pred > 0.9)
        self.any_high.assign(keras.ops.logical_or(self.any_high, high))
        self.constant.assign(2.0)
        total = keras.ops.cast(keras.ops.sum(y_pred), "float64")
        self.total.assign(self.total + total)

    def result(self):
        return {
            "examples": self.examples,
            "any_high": self.any_high,
            "constant": self.constant,
            "total": self.total,
        }


def _arrays():
    rng = np.random.default_rng(0)
    probabilities = rng.random((BATCH, CLASSES)).astype("float32")
    classes = rng.integers(0, CLASSES, (BATCH,))
    return {
        "probabilities": probabilities / probabilities.sum(1, keepdims=True),
        "classes": classes,
        "one_hot": np.eye(CLASSES, dtype="float32")[classes],
        "other_classes": (classes + rng.integers(0, 2, BATCH)) % CLASSES,
        "binary": rng.integers(0, 2, (BATCH, 1)).astype("float32"),
        "scores": rng.random((BATCH, 1)).astype("float32"),
        "targets": rng.normal(size=(BATCH, 2)).astype("float32"),
        "outputs": rng.normal(size=(BATCH, 2)).astype("float32"),
        "weights": rng.random(BATCH).astype("float32"),
    }


METRICS = {
    "sparse_accuracy": (
        keras.metrics.SparseCategoricalAccuracy,
        ("classes", "probabilities"),
    ),
    "top_k": (
        lambda: keras.metrics.SparseTopKCategoricalAccuracy(k=2),
        ("classes", "probabilities"),
    ),
    "auc": (keras.metrics.AUC, ("binary", "scores")),
    "auc_labels": (
        lambda: keras.metrics.AUC(
            curve="PR", multi_label=True, num_labels=CLASSES
        ),
        ("one_hot", "probabilities"),
    ),
    "precision": (keras.metrics.Precision, ("binary", "scores")),
    "recall_top_k": (
        lambda: keras.metrics.Recall(top_k=2),
        ("one_hot", "probabilities"),
    ),
    "sensitivity": (
        lambda: keras.metrics.SensitivityAtSpecificity(0.5),
        ("binary", "scores"),
    ),
    "mean_iou": (
        lambda: keras.metrics.MeanIoU(CLASSES),
        ("classes", "other_classes"),
    ),
    "f1": (keras.metrics.F1Score, ("one_hot", "probabilities")),
    "r2": (keras.metrics.R2Score, ("targets", "outputs")),
    "rmse": (keras.metrics.RootMeanSquaredError, ("targets", "outputs")),
    "cosine": (keras.metrics.CosineSimilarity, ("targets", "outputs")),
    "counts": (Counts, ("binary", "scores")),
}


def _compared(communicator, name, weighted, is_traced):
    """The global results after two updates, and stock Keras's."""
    make, roles = METRICS[name]
    arrays = _arrays()
    whole, part = make(), make()
    part.name = whole.name
    rank, size = communicator.rank, communicator.size
    rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)

    def update(metric, rows):
        inputs = [tf.constant(arrays[role][rows]) for role in roles]
        weights = tf.constant(arrays["weights"][rows]) if weighted else None
        metric.update_state(*inputs, sample_weight=weights)

    def results():
        return metrics.global_results([part], communicator)

    if is_traced:
        results = tf.function(results)
    for _ in range(2):  # what is read between updates changes nothing
        update(whole, slice(None))
        update(part, rows)
        found = results()
    expected = whole.result()
    if not isinstance(expected, dict):
        expected = {whole.name: expected}
    return found, expected


def compare_with_stock(names):
    communicator = collectives.current()
    wrong = []
    for name in names:
        for weighted in (False, True):
            if weighted and name == "mean_iou":
                continue  # it casts weights to integers, and warns
            # The traced function reads what is assigned after its tracing.
            found, expected = _compared(
                communicator, name, weighted, is_traced=weighted
            )
            if list(found) != list(expected):
                wrong.append((name, list(found), list(expected)))
                continue
            for key, stock in expected.items():
                if not np.allclose(
                    keras.ops.convert_to_numpy(found[key]),
                    keras.ops.convert_to_numpy(stock),
                    rtol=1e-5,
                ):
                    wrong.append((name, weighted, key))
    return wrong


@pytest.mark.parametrize(
    ("engine", "num_processes"), engines_and_sizes("horovod")
)
def test_results_are_of_the_whole_data(cluster, engine, num_processes):
    names = list(METRICS)
    results = cluster(engine, num_processes).run(compare_with_stock, names)
    assert results == [[]] * num_processes


def model_results():
    """Compiled metrics of two outputs, on an uneven split."""
    communicator = collectives.current()
    rng = np.random.default_rng(3)
    x = rng.normal(size=(7, 3)).astype("float32")
    y = {"a": rng.integers(0, 2, (7, 1)), "b": rng.integers(0, 3, (7,))}
    rank, size = communicator.rank, communicator.size
    results = []
    for is_part in (True, False):
        keras.utils.set_random_seed(5)
        inputs = keras.Input((3,))
        model = keras.Model(
            inputs,
            {
                "a": keras.layers.Dense(1, "sigmoid", name="a")(inputs),
                "b": keras.layers.Dense(3, "softmax", name="b")(inputs),
            },
        )
        model.compile(
            loss={"a": "mse", "b": "sparse_categorical_crossentropy"},
            metrics={"a": ["accuracy", "auc"], "b": "accuracy"},
            weighted_metrics={"b": ["accuracy"]},
        )
        rows = slice(None)
        if is_part:
            rows = slice(rank * 7 // size, (rank + 1) * 7 // size)
        weights = np.arange(7.0)
        model.test_on_batch(
            x[rows],
            {key: value[rows] for key, value in y.items()},
            sample_weight={"a": weights[rows], "b": weights[rows]},
        )
        found = (
            metrics.global_results(model, communicator)
            if is_part
            else model.get_metrics_result()
        )
        results.append(
            {
                key: float(value)
                for key, value in found.items()
                if not key.endswith("loss")  # tests/global_batch/test_losses.py
            }
        )
    return results


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_models_results_have_stocks_keys(cluster, engine):
    for found, expected in cluster(engine, 2).run(model_results):
        assert list(found) == list(expected)
        assert len(found) == 4
        assert found == pytest.approx(expected, rel=1e-5)


def empty_parts():
    communicator = collectives.current()
    results = []
    for name in ("sparse_accuracy", "auc", "precision", "r2", "mean_iou"):
        make, roles = METRICS[name]
        arrays = _arrays()
        metric, whole = make(), make()
        rows = slice(0, 1) if communicator.rank == 1 else slice(0, 0)
        metric.update_state(*[arrays[role][rows] for role in roles])
        whole.update_state(*[arrays[role][:1] for role in roles])
        (found,) = metrics.global_results([metric], communicator).values()
        results.append(
            np.allclose(float(found), float(whole.result()), equal_nan=True)
        )
    return results


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_empty_parts_count_nothing(cluster, engine):
    for result in cluster(engine, 2).run(empty_parts):
        assert all(result)


def test_one_process_reads_its_own_state():
    metric = keras.metrics.Mean(name="m")
    metric.update_state([1.0, 2.0])
    results = metrics.global_results([metric], collectives.current())
    assert float(results["m"]) == 1.5


def mean_output(y_true, y_pred):
    return tf.reduce_mean(y_pred)


@pytest.mark.parametrize("is_traced", [False, True])
def test_metrics_can_ignore_empty_parts(is_traced):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(
        loss="mse",
        metrics=["f1_score", "r2_score", mean_output],
        run_eagerly=not is_traced,
    )
    metrics.ignore_empty_parts(model._compile_metrics)
    rng = np.random.default_rng(4)
    x = rng.normal(size=(6, 3)).astype("float32")
    y = np.eye(2, dtype="float32")[rng.integers(0, 2, (6,))]

    def batches():  # of unknown numbers of rows, one of them none
        for rows in (slice(0, 4), slice(0, 0), slice(4, 6)):
            yield x[rows], y[rows]

    spec = [tf.TensorSpec([None, n], tf.float32) for n in (3, 2)]
    dataset = tf.data.Dataset.from_generator(
        batches, output_signature=tuple(spec)
    ).apply(tf.data.experimental.assert_cardinality(3))
    found = model.evaluate(dataset, verbose=0, return_dict=True)
    expected = model.evaluate(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(4),
        verbose=0,
        return_dict=True,
    )
    assert "mean_output" in found
    del found["loss"], expected["loss"]  # the mean of nothing, in stock Keras
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-6)
