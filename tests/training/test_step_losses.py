"""Losses of custom loops and own steps, against one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.conftest import engines


def examples():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(21, 3)).astype("float32")  # a short last batch
    return x, x[:, :1] * 2 - x[:, 1:2] + 0.3


def dense(kind=keras.Sequential, **options):
    start = keras.initializers.GlorotUniform(seed=2)
    layer = keras.layers.Dense(1, kernel_initializer=start, **options)
    return kind([keras.Input((3,)), layer])


def loop(strategy, loss_of, is_in_run, is_eager=False):
    """A loop that logs what the loss gives, as such and by a metric."""
    x, y = examples()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    dataset = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        model = dense()
        optimizer = keras.optimizers.SGD(0.1)
        if isinstance(strategy, ks.HybridStrategy):
            optimizer = ks.HybridOptimizer(optimizer)
        optimizer.build(model.trainable_variables)
        mean = keras.metrics.Mean()

    def step(batch):
        with tf.GradientTape() as tape:
            loss = loss_of(batch[1], model(batch[0], training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        mean.update_state(loss)
        return loss

    run = step
    if is_in_run:

        def run(batch):
            return strategy.run(step, args=(batch,))

    run = run if is_eager else tf.function(run)
    if is_in_run:
        logged = [run(batch) for batch in dataset]
    else:
        with strategy.scope():
            logged = [run(batch) for batch in dataset]
    logged = [float(strategy.reduce("MEAN", x, axis=None)) for x in logged]
    return [*logged, float(mean.result()), *_flat(model)]


def _flat(model):
    return np.concatenate([w.ravel() for w in model.get_weights()]).tolist()


class Sum(keras.losses.Loss):
    """Consists of others."""

    def __init__(self):
        super().__init__()
        self.others = [keras.losses.MeanSquaredError(), keras.losses.Huber()]

    def call(self, y_true, y_pred):
        return sum(other(y_true, y_pred) for other in self.others)


class OwnStep(keras.Sequential):
    """Trains with a loss object that `compile` does not know."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="tracked")

    def loss_of(self, x, y, outputs):
        return keras.losses.MeanSquaredError()(y, outputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result(), "of batch": loss}

    def test_step(self, data):
        x, y = data
        return {"of batch": self.loss_of(x, y, self(x, training=False))}


class OwnStepOfKerasLoss(OwnStep):
    def loss_of(self, x, y, outputs):
        return self.compute_loss(x, y, outputs)


class OwnLoss(keras.Sequential):
    """A loss of `compile`, another one, a regularizer and a plain mean."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        loss += keras.losses.Huber()(y, y_pred)
        size = ks.collectives.current().size
        kernel = self.trainable_variables[0]
        return loss + keras.ops.mean(keras.ops.square(kernel)) / size


class OwnLossAndStep(OwnStepOfKerasLoss, OwnLoss):
    pass


class Endpoint(keras.layers.Layer):
    """As in Keras's guide: a layer that computes the model's loss."""

    def __init__(self):
        super().__init__()
        self.loss_of = keras.losses.MeanSquaredError()

    def call(self, inputs):
        outputs, targets = inputs
        self.add_loss(self.loss_of(targets, outputs))
        return outputs


def with_endpoint():
    x, y = keras.Input((3,)), keras.Input((1,))
    return keras.Model([x, y], Endpoint()([dense()(x), y]))


def distiller():
    """Keras's own class whose loss has plain means over the examples."""
    teacher, student = dense(), dense()
    teacher.set_weights([np.full((3, 1), 0.5), np.ones(1)])
    loss = keras.distillation.FeatureDistillation(loss="mse")
    return keras.distillation.Distiller(teacher, student, loss)


def fitted(strategy, make, loss, count=21, metrics=None):
    """What `fit` and `evaluate` log, and the weights."""
    x, y = (array[:count] for array in examples())
    model = make()
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics)
    if loss is None:
        x, y = [x, y], None
    arguments = {"batch_size": 8, "verbose": 0}
    logs = model.fit(x, y, shuffle=False, epochs=2, **arguments).history
    logs.update(model.evaluate(x, y, return_dict=True, **arguments))
    return [
        *np.ravel([logs[k] for k in sorted(logs) if k != "of batch"]),
        *np.ravel(logs.get("of batch", ())),
        *_flat(model),
    ]


# Those of one more thing than others have.
MORE = [
    "run, plain, eager",
    "run, sum",
    "scope, global",
    "several",
    "own step of Keras's loss",
    "own loss",
]


def trained(strategy, are_more):
    def own(kind):
        return dense(kind, kernel_regularizer="l2")

    mse = keras.losses.MeanSquaredError
    is_one = not isinstance(strategy, ks.HybridStrategy)
    globalize = (lambda loss: loss) if is_one else ks.losses.globalize
    loops = {
        "run, plain": (mse(), True),
        "run, plain, eager": (mse(), True, True),
        "run, global": (globalize(mse()), True),
        "run, several": (Sum(), True),
        "run, sum": (mse(reduction="sum"), True),
        "scope, plain": (mse(), False),
        "scope, global": (globalize(mse()), False),
    }
    fits = {
        "several": (dense, Sum()),
        "loss as metric": (dense, "mse", 16, [keras.losses.Huber()]),
        "own step": (lambda: own(OwnStep), "mae"),
        "own step of Keras's loss": (lambda: own(OwnStepOfKerasLoss), "mae"),
        "own loss": (lambda: own(OwnLoss), "mse"),
        "own loss and step": (lambda: own(OwnLossAndStep), "mse"),
        "endpoint": (with_endpoint, None, 16),
    }
    if hasattr(keras, "distillation"):  # Keras 3.12
        fits["distiller"] = distiller, keras.losses.MeanSquaredError()
    return {
        name: train(strategy, *arguments)
        for train, kinds in ((loop, loops), (fitted, fits))
        for name, arguments in kinds.items()
        if (name in MORE) == are_more
    }


def trained_distributed(are_more):
    return trained(ks.HybridStrategy(), are_more)


@pytest.mark.parametrize(
    "are_more", [False, pytest.param(True, marks=pytest.mark.all_cells)]
)
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_own_loops_and_steps_train_and_log_as_in_one_process(
    cluster, engine, are_more
):
    expected = trained(tf.distribute.get_strategy(), are_more)
    for found in cluster(engine, 2).run(trained_distributed, are_more):
        wrong = {
            name: (found[name], values)
            for name, values in expected.items()
            if not np.allclose(found[name], values, rtol=1e-4, atol=1e-6)
        }
        assert not wrong
