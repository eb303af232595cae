"""Each private name that is used, so that a new version says which broke."""

import keras
import pytest

from keras_sparsity._tf import keras_callbacks

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("name", keras_callbacks.LEARNT)
def test_callbacks_have_what_they_learn(name):
    given = {"ModelCheckpoint": ("a.keras",)}.get(name, ())
    callback = getattr(keras.callbacks, name)(*given)
    callback.set_model(keras.Sequential([keras.layers.Dense(1)]))
    callback.on_train_begin()
    if name == "EarlyStopping":  # Keras 3.5 sets its best there.
        callback.on_epoch_end(0, {"val_loss": 1.0})
    for attribute in keras_callbacks.LEARNT[name]:
        assert attribute in vars(callback)


def test_what_was_learnt_outlives_the_first_epoch():
    callback = keras.callbacks.EarlyStopping(mode="min")
    callback.set_model(keras.Sequential([keras.layers.Dense(1)]))
    callback.on_train_begin()
    learnt = {"best": 1.0, "wait": 2, "best_epoch": None}
    keras_callbacks.set_learnt(callback, learnt)
    assert callback.best_epoch == 0
    callback.on_epoch_end(3, {"val_loss": 2.0})
    assert (callback.best, callback.wait) == (1.0, 3)
    callback.on_epoch_end(4, {"val_loss": 0.5})
    assert callback.best == 0.5


def _stopping():
    callback = keras.callbacks.EarlyStopping(mode="min")
    callback.set_model(keras.Sequential([keras.layers.Dense(1)]))
    callback.on_train_begin()
    return callback


def test_a_second_training_learns_anew():
    """As in stock Keras; one that had failed leaves nothing."""
    callback, stock = _stopping(), _stopping()
    keras_callbacks.set_learnt(callback, {"best": 1.0})
    stock.on_epoch_end(0, {"val_loss": 1.0})
    for each in (callback, stock):
        each.on_train_begin()
        each.on_epoch_end(0, {"val_loss": 2.0})
    # 2.0, but Keras 3.5 and 3.12 keep the first training's.
    assert callback.best == stock.best
    callback = _stopping()
    for best in (5.0, 1.0):
        keras_callbacks.set_learnt(callback, {"best": best})
    callback.on_epoch_end(0, {"val_loss": 2.0})
    assert callback.best == 1.0
