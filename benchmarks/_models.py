"""The models that benchmarks train: a function for each.

Args of each:
    num_processes: the global batch is so many times one process's part.
    num_steps: of how many batches there are examples.

Returns:
    `(model, x, y, loss)`.
"""

import keras
import numpy as np

import keras_sparsity as ks


def _zipf(shape, num_rows):
    return np.random.default_rng(1).zipf(1.2, size=shape) % num_rows


def language_model(num_processes, num_steps):
    words, length, count = 30_000, 16, 160 * num_processes * num_steps
    softmax = ks.layers.SampledSoftmax(words, num_sampled=256)
    model = keras.Sequential(
        [
            keras.Input((length,), dtype="int64"),
            ks.layers.ShardedEmbedding(words, 64),
            keras.layers.LSTM(64, return_sequences=True),
            softmax,
        ]
    )
    text = _zipf((count, length + 1), words)
    return model, text[:, :-1], text[:, 1:], softmax.loss()


def recommender(num_processes, num_steps):
    rows = (100_000, 30_000, 5_000, 300, 20)
    count = 2_048 * num_processes * num_steps
    inputs = keras.Input((len(rows),), dtype="int64")
    vectors = [
        ks.layers.ShardedEmbedding(n, 64, name=f"table_{i}")(inputs[:, i])
        for i, n in enumerate(rows)
    ]
    hidden = keras.layers.Concatenate()(vectors)
    hidden = keras.layers.Dense(128, activation="relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    x = np.stack([_zipf(count, n) for n in rows], axis=1)
    y = (x.sum(axis=1, keepdims=True) % 2).astype("float32")
    return model, x, y, "binary_crossentropy"


def resnet50(num_processes, num_steps):
    model = keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=10
    )
    count = 2 * num_processes * num_steps
    x = np.random.default_rng(1).random((count, 32, 32, 3), "float32")
    y = np.arange(count) % 10
    return model, x, y, "sparse_categorical_crossentropy"


MODELS = {
    "lm": language_model,
    "recommender": recommender,
    "resnet50": resnet50,
}
