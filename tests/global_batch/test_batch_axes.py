"""Which operations mix the examples of a batch, by hand-made graphs."""

import keras
import pytest
import tensorflow as tf

from keras_sparsity.global_batch.batch_axes import BatchAxes

ops = keras.ops
W = tf.ones([3, 3])

MIXING = {
    "in-batch negatives": lambda x, y: tf.matmul(x, y, transpose_b=True),
    "keras": lambda x, y: ops.matmul(x, ops.transpose(y)),
    "of themselves": lambda x, y: tf.einsum("ad,bd->ab", x, x),
    "of both views": lambda x, y: tf.matmul(
        *[tf.concat([x, y], axis=0)] * 2, transpose_b=True
    ),
    "after layers": lambda x, y: tf.matmul(
        tf.nn.l2_normalize(tf.nn.relu(x @ W + 1.0), axis=-1),
        tf.math.l2_normalize(y, axis=1),
        transpose_b=True,
    ),
    "correlation": lambda x, y: tf.matmul(x, y, transpose_a=True),
    "correlation of labels": lambda x, y: tf.einsum("bi,bj->ij", x, y),
    "differences of pairs": lambda x, y: x[:, None] - y[None, :],
    "expanded": lambda x, y: tf.expand_dims(x, 1) == tf.expand_dims(y, 0),
    "labels": lambda x, y: x[:, 0][:, None] == y[:, 0],
    "mean of the batch": lambda x, y: x - tf.reduce_mean(x, axis=0),
    "keras mean": lambda x, y: ops.mean(ops.reshape(x, (-1, 1, 3)), axis=0),
    "softmax over the batch": lambda x, y: tf.nn.softmax(x[:, 0]),
    "experts": lambda x, y: tf.reduce_sum(
        tf.one_hot(tf.argmax(x, axis=-1), 3), axis=0
    ),
    "capacity": lambda x, y: tf.cumsum(tf.cast(x > 0, tf.int32), axis=0),
    "quotient of sums": lambda x, y: (
        tf.reduce_sum(x * y) / (tf.reduce_sum(x) + tf.reduce_sum(y))
    ),
    "dice": lambda x, y: tf.math.divide_no_nan(
        ops.sum(ops.square(x - y)), 1.0 + ops.sum(y)
    ),
    # Products of whole batches, one number, that meets each example.
    "tensordot": lambda x, y: ops.sigmoid(ops.tensordot(x, y, 2) + x[:, :1]),
    "vectors": lambda x, y: tf.exp(x + tf.tensordot(x[:, 0], y[:, 0], 1)),
    "einsum": lambda x, y: tf.tanh(x - tf.einsum("bi,bi->", x, y)),
    "correlation by tensordot": lambda x, y: tf.tensordot(x, y, [[0], [0]]),
    "pairs by tensordot": lambda x, y: tf.tensordot(x, y, [[1], [1]]),
    "pairs by reshapes": lambda x, y: x[:, 0, None] - ops.reshape(y, (1, -1)),
    # Numbers that meet each example.
    "centered": lambda x, y: tf.square(y - (x - ops.mean(x)) @ W),
    "centered twice": lambda x, y: _squared(x - ops.mean(x) - y),
    "a divisor": lambda x, y: y / (tf.reduce_mean(x) + x),
    "relativistic": lambda x, y: tf.nn.sigmoid_cross_entropy_with_logits(
        y, x - tf.reduce_mean(x)
    ),
    "filled in": lambda x, y: tf.abs(tf.where(x > 0, x, tf.reduce_mean(x))),
    "normalized": lambda x, y: tf.math.l2_normalize(x),
    "scaled": lambda x, y: x / ops.max(x)[None],
    "above the mean": lambda x, y: x > ops.mean(x),
    "no more than the mean": lambda x, y: tf.minimum(x, ops.mean(x)),
    "weights by the mean": lambda x, y: tf.exp(-ops.mean(x)) * y,
}


def _squared(x):
    return x * x


def _attention(x, y):
    query, key, value = (tf.reshape(part, [-1, 3, 1]) for part in (x, y, x + y))
    scores = tf.nn.softmax(tf.matmul(query, key, transpose_b=True))
    return tf.einsum("bqk,bkd->bqd", scores, value)


def _factorization(x, y):
    fields = tf.stack([x, y], axis=1)
    sums = tf.square(tf.reduce_sum(fields, axis=1))
    return tf.reduce_sum(sums - tf.reduce_sum(fields**2, axis=1), axis=-1)


NOT_MIXING = {
    "dense": lambda x, y: tf.nn.relu(tf.matmul(x, W) + tf.ones([3])),
    "two towers": lambda x, y: tf.reduce_sum(x * y, axis=-1),
    "all candidates": lambda x, y: tf.matmul(x, W, transpose_b=True),
    "attention": _attention,
    "keras attention": lambda x, y: keras.layers.Attention()(
        [x[:, :, None], y[:, :, None]]
    ),
    "layer norm": lambda x, y: x - tf.reduce_mean(x, axis=1, keepdims=True),
    "softmax of classes": lambda x, y: tf.nn.softmax(x) * tf.nn.log_softmax(y),
    "interaction": lambda x, y: tf.matmul(
        x[:, :, None], y[:, :, None], transpose_b=True
    ),
    "factorization machine": _factorization,
    "flat": lambda x, y: tf.reshape(tf.stack([x, y], axis=1), [-1, 6]),
    "mean": lambda x, y: tf.reduce_mean(tf.square(x - y)),
    "mean by number": lambda x, y: (
        tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32)
    ),
    "sum of means": lambda x, y: (
        0.5 * (tf.reduce_mean(x) + tf.reduce_mean(y * y))
    ),
    "mean that keeps axes": lambda x, y: tf.reduce_mean(
        x, axis=[0, 1], keepdims=True
    ),
    "mean of steps": lambda x, y: tf.reduce_mean(
        tf.transpose(tf.stack([x, y]), [1, 0, 2]), axis=1
    ),
    "some of other rows": lambda x, y: tf.matmul(
        x, tf.gather(tf.ones([9, 3]), [1, 2]), transpose_b=True
    ),
    "a slice": lambda x, y: x[..., 1:] * y[:, :-1],
    "a row": lambda x, y: tf.reduce_sum(x[0] * W, axis=0),
    "a gathered row": lambda x, y: tf.reduce_sum(
        tf.gather(W, tf.cast(x[:, 0], tf.int32)) * y, axis=1
    ),
    "pooling": lambda x, y: tf.nn.max_pool1d(x[:, :, None], 2, 1, "SAME"),
    "loss": lambda x, y: keras.losses.CategoricalCrossentropy()(x, y),
    "product as loss": lambda x, y: 0.1 * ops.sqrt(ops.tensordot(x, y, 2)),
    "weights by tensordot": lambda x, y: ops.sigmoid(
        ops.tensordot(x[:, None], W, 1) + ops.tensordot(W, W, 2)
    ),
    "tensordot of weights": lambda x, y: (
        ops.sigmoid(ops.transpose(ops.tensordot(W, x, [[1], [1]]))) * y
    ),
    "mean added to losses": lambda x, y: tf.reduce_mean(
        2.0 * tf.reduce_sum(tf.abs(x - y), -1) / 3.0 + ops.mean(ops.square(x))
    ),
    "mean added to a weighted loss": lambda x, y: tf.sqrt(
        tf.reduce_mean((x + ops.mean(y)) * y[:, :1])
    ),
    "exponents": lambda x, y: tf.exp(x - tf.stop_gradient(ops.max(x))),
    "softmax of a sum": lambda x, y: tf.nn.softmax(x + ops.mean(x)),
    "a guard": lambda x, y: tf.where(ops.any(tf.math.is_nan(x)), 0.0, x) ** 2,
    "the largest": lambda x, y: tf.cast(x == ops.max(x), tf.float32) * y,
    "places": lambda x, y: tf.cast(x, tf.int32) + ops.sum(tf.cast(y, tf.int32)),
    "mean for each example": lambda x, y: tf.zeros_like(x) + ops.mean(y) * 2.0,
    "mean by number of ones": lambda x, y: x / ops.sum(tf.ones_like(x)),
    "of the condition's examples": lambda x, y: tf.compat.v1.where(
        x[:, 0] > 0, x, y
    ),
}


def mixing(function, batch):
    @tf.function
    def traced(x, y):
        first = len(tf.compat.v1.get_default_graph().get_operations())
        function(x, y)
        axes = BatchAxes([x, y])
        graph = tf.compat.v1.get_default_graph()
        found.extend(
            found_op.type
            for op in graph.get_operations()[first:]
            for found_op in axes.follow(op)
        )

    found = []
    spec = tf.TensorSpec([batch, 3], tf.float32)
    traced.get_concrete_function(spec, spec)
    return found


@pytest.mark.parametrize("batch", [None, 4])
@pytest.mark.parametrize("name", MIXING)
def test_what_mixes(name, batch):
    assert len(mixing(MIXING[name], batch)) == 1


@pytest.mark.parametrize("batch", [None, 4])
@pytest.mark.parametrize("name", NOT_MIXING)
def test_what_does_not(name, batch):
    assert mixing(NOT_MIXING[name], batch) == []
