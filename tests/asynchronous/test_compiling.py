"""What servers cannot do is refused, with what to do."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks

X = np.ones((4, 2), "int32")


def _strategy(**options):
    return ks.HybridStrategy(synchronous=False, max_staleness=1, **options)


def _model(layer=None):
    layer = layer or keras.layers.Embedding(3, 2)
    return keras.Sequential([keras.Input((2,), dtype="int32"), layer])


def _compiled(optimizer="sgd", layer=None, **options):
    model = _model(layer)
    with _strategy().scope():
        model.compile(optimizer, "mse", **options)
    return model


def _fit(model, x=X, **options):
    return model.fit(x, np.ones((4, 2, 2)), verbose=0, **options)


def _whole():
    return keras.layers.Embedding(3, 2, embeddings_regularizer="l2")


class _Own(keras.layers.Layer):
    """A layer of the user's with a table of its own."""

    def __init__(self):
        super().__init__(name="own")
        self.table = ks.ShardedTable(3, 2, owner_name="own")
        self.table_variable = self.table.variable

    def call(self, ids):
        return self.table.gather(ids)


def _gan_step():
    """A step that applies a second optimizer, which another part has."""

    class Model(keras.Sequential):
        def train_step(self, data):
            self.second.apply([tf.ones((3, 2))], self.weights)
            return {}

    model = Model([keras.Input((2,), dtype="int32"), *_model().layers])
    with _strategy().scope():
        model.second = keras.optimizers.SGD()
        model.compile("sgd", "mse")
    return _fit(model)


CASES = {
    "sharded table": (
        lambda: _compiled(layer=_Own()),
        "table of 'own'.*a ShardedTable.*keras.layers.Embedding",
    ),
    "XLA in one process": (
        lambda: _compiled(jit_compile=True),
        "jit_compile=True.*pulls and pushes.*jit_compile=False",
    ),
    "an id outside of a table": (
        lambda: _fit(_compiled(), x=X * 3),
        r"embeddings' has the rows \[0, 3\). Received: the id 3",
    ),
    "a second optimizer": (_gan_step, "`model.optimizer` alone"),
    "sharded layer": (
        lambda: _compiled(layer=ks.layers.ShardedEmbedding(3, 2)),
        'ShardedEmbedding.*keras.layers.Embedding.*delay="fixed"',
    ),
    "wrapped optimizer": (
        lambda: _compiled(ks.HybridOptimizer("sgd")),
        "HybridOptimizer.*that it wraps",
    ),
    "loss scaling": (
        lambda: _compiled(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        ),
        "LossScaleOptimizer.*mixed_bfloat16",
    ),
    "steps per execution": (
        lambda: _compiled(steps_per_execution=2),
        "steps_per_execution=2.*Use 1",
    ),
    "constraint": (
        lambda: _fit(
            _compiled(
                layer=keras.layers.Embedding(
                    3, 2, embeddings_constraint="non_neg"
                )
            )
        ),
        "embeddings' with a NonNeg.*Leave it out",
    ),
    "rule": (lambda: _fit(_compiled("nadam")), "a Nadam.*one of SGD"),
    "option": (
        lambda: _fit(_compiled(keras.optimizers.SGD(use_ema=True))),
        "use_ema=True.*Leave it out",
    ),
    "decay of untouched rows": (
        lambda: _fit(_compiled(keras.optimizers.SGD(weight_decay=0.1))),
        'SGD, sparse_updates="exact".*sparse_updates="lazy"',
    ),
    "untouched rows": (
        lambda: _fit(_compiled("adam")),
        'Adam, sparse_updates="exact".*sparse_updates="lazy"',
    ),
    "whole table": (
        lambda: _fit(_compiled(layer=_whole())),
        "whole table of 'embedding.*regularizer",
    ),
    "steps": (
        lambda: _fit(_compiled(), steps_per_epoch=1),
        "steps_per_epoch=1.*take",
    ),
    "single batch": (
        lambda: _compiled().train_on_batch(X, np.ones((4, 2, 2))),
        "train_on_batch.*Use `fit`",
    ),
    "compiled outside": (
        lambda: _compiled_outside(),
        "compiled outside of its.*SGD.*`with strategy.scope",
    ),
    "weights that a layer assigns": (
        lambda: _fit_assigned(),
        "assigns '.*kernel', as .*SpectralNormalization.*delay=.fixed",
    ),
    "weights that a callback assigns": (
        lambda: _fit_and_assign(lambda model: model.weights[0]),
        "a callback that assigns '.*embeddings'.*on_epoch_end",
    ),
    "slots that a callback assigns": (
        lambda: _fit_and_assign(lambda model: model.optimizer.variables[-1]),
        "a callback that assigns '.*accumulator'.*on_epoch_end",
    ),
    "own callback": (
        lambda: _fit(_compiled(), callbacks=[ks.callbacks.PartitionSearch()]),
        "a PartitionSearch.*ModelCheckpoint",
    ),
    "subclass of an own callback": (
        lambda: _fit(_compiled(), callbacks=[_Search()]),
        "a _Search.*ModelCheckpoint",
    ),
    "checkpoint within an epoch": (
        lambda: _fit(
            _compiled(),
            callbacks=[ks.callbacks.ShardedCheckpoint("unused", 3)],
        ),
        "a ShardedCheckpoint with every_steps=3",
    ),
    "within an epoch": (
        lambda: _fit(
            _compiled(),
            callbacks=[
                keras.callbacks.ModelCheckpoint("unused.keras", save_freq=2)
            ],
        ),
        "ModelCheckpoint with save_freq=2",
    ),
    "generator": (
        lambda: _compiled().fit(
            (each for each in [(X, X)]), shuffle=False, verbose=0
        ),
        "a generator or a PyDataset.*arrays",
    ),
    "own loop": (
        lambda: _own_loop(lambda: ks.HybridOptimizer("sgd")),
        "HybridOptimizer.*call `fit`",
    ),
    "own loop with a plain optimizer": (
        lambda: _own_loop(keras.optimizers.Adam),
        "each process would train alone.*call `fit`",
    ),
}


class _Search(ks.callbacks.PartitionSearch):
    pass


def _compiled_outside():
    model = _compiled()
    model.compile("sgd", "mse")
    _fit(model)


def _fit_assigned():
    dense = keras.layers.SpectralNormalization(keras.layers.Dense(2))
    model = keras.Sequential([keras.Input((2,)), dense])
    with _strategy().scope():
        model.compile("sgd", "mse")
    model.fit(X, np.ones((4, 2)), verbose=0)


def _fit_and_assign(chosen):
    model = _compiled(keras.optimizers.Adagrad())

    def assign(batch, logs):
        variable = chosen(model)
        variable.assign(variable + 1)

    _fit(
        model,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=assign)],
    )


def _own_loop(make):
    strategy = _strategy()
    with strategy.scope():
        variable = keras.Variable(1.0)
        optimizer = make()
    gradients = [(tf.constant(1.0), variable)]
    strategy.run(lambda: optimizer.apply_gradients(gradients))


@pytest.mark.parametrize("case", list(CASES))
def test_it_is_refused(case):
    function, message = CASES[case]
    # The latter in a step.
    errors = ValueError, tf.errors.InvalidArgumentError
    with pytest.raises(errors, match=f"(?s){message}"):
        function()


def test_a_model_of_another_strategy_is_refused():
    model = _model()
    with ks.HybridStrategy().scope():
        model.compile("sgd", "mse")
    with _strategy().scope(), pytest.raises(ValueError, match="by another"):
        model.compile("sgd", "mse")


def test_compiled_and_fitted_again_it_trains_on():
    model = _compiled(keras.optimizers.SGD(0.5))
    first = _fit(model, epochs=2).history["loss"]
    start = model.get_weights()
    second = _fit(model).history["loss"]
    assert second[0] < first[-1] < first[0]
    model.set_weights(start)
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.SGD(0.5), "mse")
    assert _fit(model).history["loss"] == pytest.approx(second)
