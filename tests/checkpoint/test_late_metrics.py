"""Metrics without variables before their first update are resumed, too."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.checkpoint_functions import InterruptAfter, Interruption
from tests.conftest import engines


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = ks.layers.ShardedEmbedding(50, 4)
        self.pool = keras.layers.GlobalAveragePooling1D()
        self.out = keras.layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.out(self.pool(self.table(x)))


class OwnStep(Model):
    """Has a metric that Keras does not build before the first step."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")
        self.score = keras.metrics.F1Score(name="score", average="macro")

    @property
    def metrics(self):
        return [self.score, self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.tracker.update_state(loss)
        self.score.update_state(y, outputs)
        return {metric.name: metric.result() for metric in self.metrics}


class NeedsValues(Model):
    """Two outputs with losses of their own, in eager steps."""

    def call(self, x):
        # Raises where Keras asks for shapes alone.
        outputs = super().call(x) + 0.0 * int(np.max(x.numpy()))
        return {"first": outputs, "second": outputs}


def train(kind, directory=None, interrupt_after=None):
    keras.utils.set_random_seed(3)
    model = kind()
    is_eager = kind is NeedsValues
    loss = "categorical_crossentropy"
    score = keras.metrics.F1Score(average="macro")
    with ks.HybridStrategy(architecture="hybrid").scope():
        model.compile(
            "adam",
            {"first": loss, "second": "mse"} if is_eager else loss,
            metrics={"second": [score]} if is_eager else None,
            run_eagerly=is_eager,
        )
    rng = np.random.default_rng(0)
    x = rng.integers(50, size=(26, 4), dtype="int32")
    y = np.eye(3, dtype="float32")[rng.integers(3, size=26)]
    labels = {"first": y, "second": y} if is_eager else y
    # With a batch of one example, which leaves a rank without any.
    data = tf.data.Dataset.from_tensor_slices((x, labels)).batch(5)
    callbacks = [InterruptAfter(interrupt_after)] if interrupt_after else []
    if directory:
        callbacks.append(
            ks.callbacks.ShardedCheckpoint(directory, every_steps=1)
        )
    try:
        model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    except Interruption:
        return None
    return model.history.history


def train_and_resume(kind, directory, interrupt_after):
    train(kind, directory, interrupt_after)
    return train(kind), train(kind, directory)


# After five of six steps only the batch of one example is left.
@pytest.mark.parametrize(("kind", "after"), [(OwnStep, 3), (NeedsValues, 6)])
def test_metrics_made_in_a_step_go_on(tmp_path, kind, after):
    undisturbed, resumed = train_and_resume(kind, tmp_path, after)
    assert len(undisturbed) == (2 if kind is OwnStep else 4)
    assert undisturbed == resumed


@pytest.mark.parametrize("engine", engines(usually="native"))
@pytest.mark.parametrize(("kind", "after"), [(OwnStep, 3), (NeedsValues, 6)])
def test_metrics_of_several_ranks_go_on(cluster, engine, tmp_path, kind, after):
    for undisturbed, resumed in cluster(engine, 2).run(
        train_and_resume, kind, tmp_path, after
    ):
        assert undisturbed == resumed
