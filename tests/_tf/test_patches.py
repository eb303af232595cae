"""Each private name that is used, so that a new version says which broke."""

import contextlib
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf import keras_losses, patches

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("patch", patches.ALL, ids=repr)
def test_a_name_is_replaced_and_restored(patch):
    if patch is patches.SCALE_LOSS and not keras_losses.losses_are_scaled():
        pytest.skip("Keras 3.5 to 3.7 scale no losses")
    owner = patch.owner
    before, is_own = getattr(owner, patch.name), patch.name in vars(owner)
    was_in_place = patch.is_in_place  # by a scope of another test
    with patch.by(lambda stock: lambda *args: stock(*args)):
        assert patch.is_in_place
        with patch.by(lambda stock: lambda *args: stock(*args)):
            assert getattr(owner, patch.name).__wrapped__ is not before
        assert getattr(owner, patch.name).__wrapped__ is before
    assert getattr(owner, patch.name) is before
    assert (patch.name in vars(owner)) is is_own
    assert patch.is_in_place is was_in_place


def test_other_threads_keep_what_is_replaced():
    """They may make the input of the step that is computed here."""
    generator = keras.random.SeedGenerator(0)
    with (
        patches.next_seeds_are_changed(lambda generator, seed: None),
        futures.ThreadPoolExecutor() as threads,
    ):
        assert generator.next() is None
        assert threads.submit(generator.next).result() is not None


def test_calls_of_layers_stay_while_those_of_models_are_replaced():
    of_layers = keras.Layer.__call__
    with patches.MODEL_CALL.by(lambda stock: lambda *args: stock(*args)):
        assert keras.Model.__call__ is not of_layers
        assert keras.Layer.__call__ is keras.layers.Dense.__call__ is of_layers
    assert keras.Model.__call__ is of_layers


def test_a_scope_replaces_what_is_listed_for_it():
    stay = set(patches.UNADOPTED_RUNS.values())
    in_scope = {patches.COMPILE, *stay}
    if ks.collectives.current().size > 1:
        in_scope |= {patches.LOSS_CALL, patches.METRIC_INIT}
        in_scope.add(patches.EMBEDDING_WEIGHT)
    with ks.HybridStrategy().scope():
        found = {patch for patch in patches.ALL if patch.is_in_place}
    assert found == in_scope
    assert {patch for patch in patches.ALL if patch.is_in_place} == stay


def test_assignments_are_told():
    variable, told = keras.Variable([1.0]), []
    with patches.assignments_are_told(told.append):
        variable.assign([2.0])
        variable.assign_add([1.0])
        variable.assign_sub([1.0])
        with keras.StatelessScope():
            variable.assign([3.0])  # forgotten
    variable.assign([4.0])
    assert [v is variable for v in told] == [True] * 3


def test_roots_stay_roots():
    """Each element's result is its own, wherever in a tensor it is."""
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 1000), np.float32) + 1e-3

    def differing(context):
        @tf.function(reduce_retracing=True)
        def divide(x, y):
            with context():
                return x / keras.ops.sqrt(y)

        whole = divide(x, y).numpy()
        parts = [divide(x[i : i + 7], y[i : i + 7]) for i in range(0, 1000, 7)]
        return np.sum(whole != np.concatenate(parts))

    assert differing(patches.roots_stay_roots) == 0
    stock = keras.ops.sqrt(tf.constant(4.0))
    assert float(stock) == 2.0


def test_epoch_iterators_are_made_in():
    numbers, train = [], []

    @contextlib.contextmanager
    def scope(epoch_input):
        yield
        numbers.append(epoch_input.num_batches)
        train.append(epoch_input.trains)

    model = keras.Sequential([keras.layers.Dense(1)])
    x = np.ones((5, 1), "float32")
    with patches.epoch_iterators_are_made_in(scope):
        model.predict(x, batch_size=2, verbose=0)
        assert numbers == [3]
    model.predict(x, verbose=0)
    assert numbers == [3]
    model.compile("sgd", "mse")
    with patches.epoch_iterators_are_made_in(scope):
        model.fit(x, x, validation_data=(x, x), batch_size=1, verbose=0)
        model.evaluate(x, x, verbose=0)
    assert numbers == [3, 5, 5, 1]
    assert train == [False, True, False, False]
