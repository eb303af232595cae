"""The models of the matrix: small, and of every kind.

The functions in `MODELS` take a cell, a function that makes its tables and the
number of processes, and return a model.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.layers.candidate_sampler import LogUniformSampler
from tests import oracles
from tests.layers.test_sampled_softmax import reference_losses

LENGTH = 4  # ids in an example
CLASSES = 3

REGULARIZERS = {
    "l1": keras.regularizers.L1(0.01),
    "l2": keras.regularizers.L2(0.05),
    "l1l2": keras.regularizers.L1L2(0.01, 0.02),
}
CONSTRAINTS = {
    "max norm": keras.constraints.MaxNorm(0.06, axis=1),
    "min max norm": keras.constraints.MinMaxNorm(0.04, 0.08, axis=1),
    "unit norm": keras.constraints.UnitNorm(axis=1),
    "non negative": keras.constraints.NonNeg(),
}


def pooled(cell, table, size):
    ids = keras.Input((LENGTH,), dtype="int32")
    pool = keras.layers.GlobalAveragePooling1D()
    features = [pool(rows) for rows in _all_tables(cell, table, ids)]
    return keras.Model(ids, _head(cell, _joined(features)))


def sequence(cell, table, size):
    """A class for each id; masked ids do not count."""
    ids = keras.Input((LENGTH,), dtype="int32")
    return keras.Model(ids, _head(cell, _joined(_all_tables(cell, table, ids))))


def bags(cell, table, size):
    """Means of rows, by a layer of this package's own."""
    ids = keras.Input((LENGTH,), dtype="int32")
    layer = table("table_0", cell.partitions[0], is_bag=True)
    features = layer(ids)
    if not isinstance(layer, ks.layers.ShardedEmbeddingBag):
        features = keras.layers.GlobalAveragePooling1D()(features)
    return keras.Model(ids, _head(cell, features))


def two_inputs(cell, table, size):
    """One table that both inputs read."""
    first = keras.Input((LENGTH,), dtype="int32")
    second = keras.Input((2,), dtype="int32")
    shared = table("shared", cell.partitions[0])
    pool = keras.layers.GlobalAveragePooling1D()
    features = _joined([pool(shared(first)), pool(shared(second))])
    return keras.Model([first, second], _head(cell, features))


class Calls(keras.layers.Layer):
    """Calls a layer that Keras does not know it has."""

    def __init__(self, layer):
        super().__init__()
        self._get = lambda: layer

    def call(self, inputs):
        return self._get()(inputs)


def closure(cell, table, size):
    """A table that functions call too, with other ids than the model does."""
    first = keras.Input((LENGTH,), dtype="int32")
    second = keras.Input((2,), dtype="int32")
    shared, other = (
        table(f"table_{i}", count) for i, count in enumerate(cell.partitions)
    )
    # Before the model calls it with ids of its own, and behind.
    rows = [
        keras.layers.Identity()(Calls(shared)(second)),
        shared(first),
        keras.layers.Lambda(lambda ids: shared(ids))(first[:, ::-1]),
        other(first),
    ]
    pool = keras.layers.GlobalAveragePooling1D()
    features = _joined([pool(of_ids) for of_ids in rows])
    return keras.Model([first, second], _head(cell, features))


def stateful(cell, table, size):
    """An RNN that goes on, batch after batch, where it stopped.

    Its states have the size of a rank's part of the batch.
    """
    ids = keras.Input(batch_shape=(cell.batch // size, LENGTH), dtype="int32")
    rows = table("table_0", cell.partitions[0])(ids)
    return keras.Model(
        ids, _head(cell, keras.layers.GRU(4, stateful=True)(rows))
    )


def normalized(cell, table, size, synchronized=False):
    """Each rank normalizes by the statistics of its own part."""
    embedding = table("table_0", cell.partitions[0])
    if isinstance(embedding, ks.layers.ShardedEmbedding):
        normalize = keras.layers.BatchNormalization(
            momentum=0.9, synchronized=synchronized, name="normalize"
        )
    else:
        normalize = oracles.NormalizationOfParts(
            1 if synchronized else size, momentum=0.9, name="normalize"
        )
    ids = keras.Input((LENGTH,), dtype="int32")
    pool = keras.layers.GlobalAveragePooling1D()
    return keras.Model(ids, _head(cell, normalize(pool(embedding(ids)))))


@keras.saving.register_keras_serializable(package="tests")
class Tied(keras.Model):
    """Scores each row by its product with the mean of an example's rows."""

    def __init__(self, embedding, rows):
        super().__init__()
        self.embedding = embedding
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.rows = rows

    def call(self, ids):
        hidden = self.hidden(keras.ops.mean(self.embedding(ids), axis=1))
        return keras.ops.softmax(
            keras.ops.matmul(hidden, keras.ops.transpose(self.kernel()))
        )

    def kernel(self):
        return self.embedding(keras.ops.arange(self.rows))


@keras.saving.register_keras_serializable(package="tests")
class ReadsWhole(Tied):
    """The same, as a retrieval layer that is given the table itself."""

    def kernel(self):
        return self.embedding.embeddings


def tied(cell, table, size, kind=Tied):
    return _called(kind(table("tied", cell.partitions[0]), cell.rows), cell)


class _Loss(keras.losses.Loss):
    """That of a function of labels and outputs."""

    def __init__(self, function, reduction):
        super().__init__(reduction=reduction)
        self.call = function


class StockSoftmax(keras.layers.Layer):
    """TensorFlow's sampled softmax, whose kernel is a stock embedding's."""

    def __init__(self, num_classes, num_sampled, seed, table, name):
        super().__init__(name=name)
        self._get = lambda: table  # not a layer of this one
        self.sampler = LogUniformSampler(num_classes, num_sampled, seed)

    def build(self, shape):
        self.bias = self.add_weight(
            (self.sampler.num_classes, 1), "zeros", name="bias"
        )

    def call(self, hidden):
        return hidden

    def loss(self, reduction):
        """The loss of the next sample, as a function of labels and hidden."""

        def loss(labels, hidden):
            kernel = tf.convert_to_tensor(self._get().embeddings)
            bias = tf.reshape(self.bias, [-1])
            labels = tf.cast(labels, tf.int64)
            return reference_losses(kernel, bias, hidden, labels, self.sampler)

        return _Loss(loss, reduction)


def tied_softmax(cell, table, size):
    """A softmax that samples, of classes whose weights are the table."""
    embedding = table("tied", cell.partitions[0])
    kind = ks.layers.SampledSoftmax
    if not isinstance(embedding, ks.layers.ShardedEmbedding):
        kind = StockSoftmax
    ids = keras.Input((LENGTH,), dtype="int32")
    pool = keras.layers.GlobalAveragePooling1D()
    hidden = keras.layers.Dense(4, "tanh", name="hidden")
    softmax = kind(cell.rows, 7, seed=5, table=embedding, name="softmax")
    return keras.Model(ids, softmax(hidden(pool(embedding(ids)))))


@keras.saving.register_keras_serializable(package="tests")
class LooksUp(keras.Model):
    """Looks up ids that it computes, some of them from rows."""

    def __init__(self, first, second, adds_loss):
        super().__init__()
        self.first, self.second = first, second
        self.inner = keras.Sequential([second] + [AddsLoss()] * adds_loss)
        self.hidden = keras.layers.Dense(5, activation="tanh")
        self.out = keras.layers.Dense(CLASSES, "softmax", dtype="float32")

    def call(self, ids):
        rows = self.first(ids)
        chosen = keras.ops.cast(rows[..., 0] > 0, "int32")
        found = [
            rows,
            self.inner(ids[:, ::-1]),
            self.first(ids),  # the same once more
            self.second(chosen),
            self.first(keras.ops.maximum(ids - 1, 0)),
        ]
        found = keras.ops.mean(keras.ops.concatenate(found, axis=2), axis=1)
        return self.out(self.hidden(found))


def looks_up(cell, table, size):
    tables = [table(f"table_{i}", n) for i, n in enumerate(cell.partitions)]
    # TensorFlow's guide to loops does without.
    return _called(LooksUp(*tables, cell.loop != "own loop"), cell)


@keras.saving.register_keras_serializable(package="tests")
class OwnStep(keras.Model):
    """A model with a `train_step` of its own, as in Keras's guide."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=outputs)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.logs(y, outputs, loss)

    def logs(self, y, outputs, loss):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return {m.name: m.result() for m in self.metrics}


@keras.saving.register_keras_serializable(package="tests")
class OwnLogs(OwnStep):
    """Logs a metric of each batch under another key than its name."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mean = keras.metrics.Mean()

    def logs(self, y, outputs, loss):
        self.mean.reset_state()
        # The ranks' parts weigh differently.
        self.mean.update_state(tf.argmax(outputs, axis=1) - y, sample_weight=y)
        return {"loss": self.mean.result() - 1}


def own_step(cell, table, size, kind=OwnStep):
    model = pooled(cell, table, size)
    return kind(model.inputs, model.outputs)


@keras.saving.register_keras_serializable(package="tests")
class AddsLoss(keras.layers.Layer):
    """Adds the mean square of its inputs."""

    def call(self, inputs):
        self.add_loss(0.5 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def with_added_loss(cell, table, size):
    ids = keras.Input((LENGTH,), dtype="int32")
    rows = AddsLoss()(table("table_0", cell.partitions[0])(ids))
    pool = keras.layers.GlobalAveragePooling1D()
    return keras.Model(ids, _head(cell, pool(rows)))


def with_logarithm(cell, table, size):
    """Of what is no number for an example of zeros."""
    ids = keras.Input((LENGTH,), dtype="int32")
    rows = table("table_0", cell.partitions[0])(ids - 1)
    pool = keras.layers.GlobalAveragePooling1D()
    logs = keras.ops.log(keras.ops.cast(ids, "float32"))
    return keras.Model(ids, _head(cell, _joined([pool(rows), logs])))


def with_added_losses(cell, table, size):
    """A layer's, a regularizer's of activities and those of weights."""
    ids = keras.Input((LENGTH,), dtype="int32")
    rows = [AddsLoss()(rows) for rows in _all_tables(cell, table, ids)]
    pool = keras.layers.GlobalAveragePooling1D()
    features = keras.layers.ActivityRegularization(l2=0.5)(_joined(rows))
    return keras.Model(ids, _head(cell, pool(features)))


def without_labels(cell, table, size):
    """Two inputs, and what a layer adds for the loss."""
    model = two_inputs(cell, table, size)
    return keras.Model(model.inputs, AddsLoss()(model.outputs[0]))


MODELS = {
    "logarithm": with_logarithm,
    "added losses": with_added_losses,
    "without labels": without_labels,
    "pooled": pooled,
    "bags": bags,
    "sequence": sequence,
    "two inputs": two_inputs,
    "closure": closure,
    "looks up": looks_up,
    "tied": tied,
    "tied softmax": tied_softmax,
    "read whole": functools.partial(tied, kind=ReadsWhole),
    "stateful": stateful,
    "normalized": normalized,
    "normalized, synchronized": functools.partial(
        normalized, synchronized=True
    ),
    "own step": own_step,
    "own logs": functools.partial(own_step, kind=OwnLogs),
    "added loss": with_added_loss,
}


def _all_tables(cell, table, ids):
    layers = [
        table(f"table_{index}", count)
        for index, count in enumerate(cell.partitions)
    ]
    if cell.ordinary:
        layers.append(
            keras.layers.Embedding(
                cell.rows, 3, mask_zero=cell.mask, name="ordinary"
            )
        )
    return [layer(ids) for layer in layers]


def _joined(features):
    return (
        features[0]
        if len(features) == 1
        else keras.layers.Concatenate()(features)
    )


def _head(cell, features):
    hidden = keras.layers.Dense(
        5,
        activation="tanh",
        kernel_regularizer=REGULARIZERS.get(cell.regularizer),
        name="hidden",
    )(features)
    return keras.layers.Dense(
        CLASSES, activation="softmax", dtype="float32", name="out"
    )(hidden)


def _called(model, cell):
    """With weights: what is not functional has none before a call."""
    model(np.zeros((1, LENGTH), "int32"))
    return model


def build(cell, embedding, size):
    """The cell's model, from the same values for either embedding."""
    keras.utils.set_random_seed(3)

    def table(name, num_partitions, is_bag=False):
        kind = embedding
        options = {
            "embeddings_regularizer": REGULARIZERS.get(cell.regularizer),
            "embeddings_constraint": CONSTRAINTS.get(cell.constraint),
            "mask_zero": cell.mask,
        }
        if embedding is ks.layers.ShardedEmbedding:
            options["num_partitions"] = num_partitions
            kind = ks.layers.ShardedEmbeddingBag if is_bag else embedding
        return kind(cell.rows, 4, name=name, **options)

    return MODELS[cell.model](cell, table, size)
