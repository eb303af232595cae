"""Each private name that is used, so that a new version says which broke."""

import keras
import pytest

from keras_sparsity._tf import keras_models, tracking

pytestmark = pytest.mark.smoke


def test_trackers_and_ids():
    layer = keras.Sequential([keras.layers.Dense(1)])
    assert tracking.is_tracker(layer._tracker)
    assert not tracking.is_tracker(layer)
    old, new = layer.layers[0], keras.layers.Dense(2)
    holder = keras.layers.Layer()
    holder.attribute, holder.several = old, [{"a": old}]
    tracking.replace_held(holder, old, new)
    assert holder.attribute is new and holder.several[0]["a"] is new
    assert holder._layers == keras_models.sublayers(holder) == [new]
    assert holder._tracker.is_in_store("layers", new)
    assert not holder._tracker.is_in_store("layers", old)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, new(inputs))
    tracking.renew_ids(model, lambda known: known + 1)
    assert f"{id(new) + 1}_ib-0" in model._nodes


def test_containers_that_tensorflow_tracks():
    layer = keras.layers.Dense(1)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layer(inputs))
    assert layer in tracking.tracked_by_tensorflow(model._operations)
    for plain in ([layer], {"a": layer}, (layer,)):
        tracked = tracking.track_by_tensorflow(plain)
        assert type(tracked) is not type(plain)
        assert tracking.tracked_by_tensorflow(tracked) == plain
        assert tracking.tracked_by_tensorflow(plain) is None
    holder = keras.layers.Layer()
    holder.inner = layer
    names = [n for n in vars(holder) if tracking.is_dependency_of_tensorflow(n)]
    assert any(vars(holder)[name] for name in names)
