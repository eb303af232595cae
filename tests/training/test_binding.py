"""Methods that are bound on one model, and the arguments of their calls."""

import contextlib
import gc
import types
import weakref

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity._tf import keras_models
from keras_sparsity.collectives.differences import raise_if_different
from keras_sparsity.health import agreement
from keras_sparsity.training import binding
from keras_sparsity.training.binding import Binding, bound_arguments


class Doubling(Binding):
    def count_params(self):
        return 2 * self._stock["count_params"]()


def test_a_method_is_bound_on_one_model_alone():
    one, other = (
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        for _ in range(2)
    )
    keras_models.set_distribute_strategy(one, ks.HybridStrategy())
    Doubling(one, ["count_params"])
    assert (one.count_params(), other.count_params()) == (6, 3)
    assert one.count_params.__name__ == "count_params"


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (keras.optimizers.Adam(clipnorm=1.0), r"'second'.*Adam\(clipnorm=1.0"),
        (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            "'second'.*LossScaleOptimizer",
        ),
        (keras.optimizers.Adam(), None),
        (ks.HybridOptimizer(keras.optimizers.Adam(clipnorm=1.0)), None),
    ],
)
def test_a_further_optimizer_may_not_look_at_parts(optimizer, message):
    told = contextlib.nullcontext()
    if message:
        told = pytest.raises(ValueError, match=f"{message}.*HybridOptimizer")
    with told:
        binding._check_further("second", optimizer)


def test_further_optimizers_in_containers_may_not_look_at_parts():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with ks.HybridStrategy().scope():
        model.compile("sgd", "mse")
    model.critics = {"first": [keras.optimizers.Adam(clipnorm=1.0)]}
    bound = Doubling(model, [])
    bound._collectives = types.SimpleNamespace(
        size=2, check_equal=lambda *told: None
    )
    place = r"critics\['first'\]\[0\]"
    with pytest.raises(ValueError, match=f"{place}.*Adam.*model.{place} = "):
        bound._check_optimizer()


def test_ranks_of_which_one_has_made_another_model():
    """Keras then gives the next model other names there."""
    one, other = (
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        for _ in range(2)
    )
    keras_models.set_distribute_strategy(one, ks.HybridStrategy())
    bound = Doubling(one, ["count_params"])

    def check_equal(facts, *told):
        others = {**facts, **agreement.of_model(other)}
        raise_if_different([facts, others], *told)

    bound._collectives = types.SimpleNamespace(size=2, check_equal=check_equal)
    with pytest.raises(ValueError, match="(?s)dense.*Keras numbers their na"):
        bound._check_same_call("fit", {})


def test_arguments_that_a_call_gives_by_name():
    def function(a, b=2, *, c=3, **kwargs): ...

    assert bound_arguments(function, (1,), {}) == {"a": 1}
    given = bound_arguments(function, (1, 5), {"c": 4, "d": 6})
    assert given == {"a": 1, "b": 5, "c": 4, "d": 6}


_SCHEDULES = None, "gpipe", "spectrain", "bounded"


class Seeing(keras.layers.Layer):
    """Notes the graphs in which it is called."""

    seen = []

    def call(self, rows):
        if not keras.backend.is_keras_tensor(rows):
            self.seen.append(weakref.ref(rows.graph))
        return rows


def left_of_a_model(schedule):
    """What is left of a model, its variables and graphs, once dropped."""
    Seeing.seen.clear()
    strategy = ks.HybridStrategy()
    if schedule == "bounded":
        strategy = ks.HybridStrategy(synchronous=False, max_staleness=1)
    elif schedule:
        strategy = ks.PipelineStrategy(schedule=schedule)

    def train():
        with strategy.scope():
            # Larger tables are updated by the rows that were pulled.
            layers = [keras.layers.Embedding(2000, 32), keras.layers.Flatten()]
            if not schedule:
                layers[0] = ks.layers.ShardedEmbedding(2000, 32)
            last = Seeing(), keras.layers.Dense(1)
            model = keras.Sequential([keras.Input((2,), dtype="int32")])
            for layer in (*layers, *last):
                model.add(layer)
            rule = "adagrad" if schedule == "bounded" else "adam"
            model.compile(rule, "mse")
        x = np.ones((4, 2), "int32")
        model.fit(x, np.ones((4, 1)), shuffle=False, verbose=0)
        model.predict(x, verbose=0)
        Seeing.seen.extend(map(weakref.ref, (model, *model.weights)))

    train()
    keras.utils.clear_session()
    gc.collect()
    assert len(Seeing.seen) > 4  # and graphs
    return [str(held()) for held in Seeing.seen if held() is not None]


@pytest.mark.parametrize(
    ("engine", "size", "schedule"),
    [
        ("local", 1, None),
        *[("native", 2, each) for each in _SCHEDULES],
    ],
)
def test_a_model_that_is_dropped_is_freed(cluster, engine, size, schedule):
    """With the graph of its step, which holds the memory of variables."""
    left = cluster(engine, size).run(left_of_a_model, schedule)
    assert left == [[]] * size
