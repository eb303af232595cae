"""Losses of parts against stock Keras on the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity import collectives, compat, losses
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
    "crossentropy": (lambda r: "crossentropy", "classes"),
}


def _cases():
    for name in LOSSES:
        reductions = REDUCTIONS
        if name in ("function", "name", "scalar", "crossentropy"):
            reductions = REDUCTIONS[:1]
        for reduction in reductions:
            if reduction == "mean" and name != "mse":
                continue  # another name for "sum_over_batch_size"
            for mask in ("no mask", "mask", "nothing valid"):
                if mask != "no mask" and "dice" in name:
                    continue
                for weights in ("no weights", "weights", "place weights"):
                    if weights != "no weights" and "dice" in name:
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
            compat.resolve_loss(
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


def _name(loss):
    """Of a loss, the same in each process."""
    return getattr(loss, "name", None) or getattr(loss, "__name__", str(loss))


@pytest.mark.parametrize(("engine", "num_processes"), engines_and_sizes())
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


# Losses in steps and loops of the user's own: trained with and logged.


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


def fitted(strategy, make, loss, count=21, **options):
    """What `fit` and `evaluate` log, and the weights."""
    x, y = (array[:count] for array in examples())
    model = make()
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), loss, **options)
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


def trained(strategy):
    def own(kind):
        return dense(kind, kernel_regularizer="l2")

    mse = keras.losses.MeanSquaredError
    is_one = not isinstance(strategy, ks.HybridStrategy)
    globalize = (lambda loss: loss) if is_one else ks.losses.globalize
    return {
        "run, plain": loop(strategy, mse(), True),
        "run, plain, eager": loop(strategy, mse(), True, True),
        "run, global": loop(strategy, globalize(mse()), True),
        "run, several": loop(strategy, Sum(), True),
        "run, sum": loop(strategy, mse(reduction="sum"), True),
        "scope, plain": loop(strategy, mse(), False),
        "scope, global": loop(strategy, globalize(mse()), False),
        "several": fitted(strategy, dense, Sum()),
        "loss as metric": fitted(
            strategy, dense, "mse", 16, metrics=[keras.losses.Huber()]
        ),
        "own step": fitted(strategy, lambda: own(OwnStep), "mae"),
        "own step of Keras's loss": fitted(
            strategy, lambda: own(OwnStepOfKerasLoss), "mae"
        ),
        "own loss": fitted(strategy, lambda: own(OwnLoss), "mse"),
        "own loss and step": fitted(
            strategy, lambda: own(OwnLossAndStep), "mse"
        ),
        "endpoint": fitted(strategy, with_endpoint, None, 16),
    }


def trained_distributed():
    return trained(ks.HybridStrategy())


@pytest.mark.parametrize("engine", engines())
def test_own_loops_and_steps_train_and_log_as_in_one_process(cluster, engine):
    expected = trained(tf.distribute.get_strategy())
    for found in cluster(engine, 2).run(trained_distributed):
        wrong = {
            name: (found[name], values)
            for name, values in expected.items()
            if not np.allclose(found[name], values, rtol=1e-4, atol=1e-6)
        }
        assert not wrong
