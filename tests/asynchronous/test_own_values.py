"""Values that no rule updates: what workers' batches make of them."""

import keras
import numpy as np
import pytest

from keras_sparsity.asynchronous.own_values import OwnValues
from tests import asynchronous_values as values


class _State(keras.layers.Layer):
    def build(self, shape):
        for name, dtype in (("mean", "float32"), ("count", "uint8")):
            self.add_weight(shape=(2,), dtype=dtype, name=name, trainable=False)
        self.add_weight(shape=(2,), dtype="bool", name="flag", trainable=False)


def _own(begun):
    layer = _State()
    layer.build((None, 2))
    for variable, value in zip(layer.weights, begun, strict=True):
        variable.assign(value)
    return OwnValues(keras.Sequential([keras.Input((2,)), layer])), layer


def test_batches_count_alike_whoever_took_them():
    own, layer = _own([[1.0, 2.0], [250, 7], [False, True]])
    assert own.changed() == {}
    first = {0: np.float32([4, 2]), 1: np.uint8([252, 7])}
    second = {1: np.uint8([254, 8]), 2: np.array([True, True])}
    # The third one has taken no batch.
    idle = {0: np.float32([99, 99])}
    own.combine([(3, first), (1, second), (0, idle)])
    mean, count, flag = layer.get_weights()
    np.testing.assert_array_equal(mean, [(3 * 4 + 1) / 4, 2])
    np.testing.assert_array_equal(count, [(250 + 2 + 4) % 256, 8])
    np.testing.assert_array_equal(flag, [True, True])
    assert set(own.changed()) == {0, 1, 2}
    own.begin_epoch()
    assert own.changed() == {}


def test_values_of_all_workers_batches(cluster):
    ranks = cluster("native", 3).run(values.own_values)
    count = values.COUNT
    begun = [(0, 0.0)] * 3
    for epoch in range(2):
        steps, means = zip(*(each[1][epoch] for each in ranks), strict=True)
        taken = np.subtract(steps, [number for number, _ in begun])
        assert taken.sum() == count and len(set(taken)) > 1
        mean = np.average(means, weights=taken)
        begun = list(zip(steps, means, strict=True))
    for found, _, _, sent in ranks:
        np.testing.assert_equal(found, ranks[0][0])
        assert found["count"] == 2 * count and found["flags"].all()
        assert found["mean"] == pytest.approx(mean, rel=1e-6)
        # Rank 0's weight, which nobody has sent.
        assert found["frozen"] != 6 and max(sent) == 3
    masks = [mask for *_, mask, _ in ranks]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert not np.array_equal(masks[one], masks[other])
