"""Methods that are bound on one model, and the arguments of their calls."""

import contextlib
import types

import keras
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
