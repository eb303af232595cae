"""RALP's tables 1 and 2, and the splits, of networks as they were published.

Layers are convolutions, poolings and fully connected ones, the branches of a
module one after the other, for images of ImageNet's size and 1,000 classes.
"""

import keras
import pytest

from keras_sparsity.planning import Cluster, VariableSpec, transfer_bytes
from keras_sparsity.stages.cutting import Cutter
from keras_sparsity.stages.layer_placement import (
    LayerSize,
    layer_sizes,
    published_split,
    skewness,
)
from keras_sparsity.stages.profile import GradientSize, Profile
from keras_sparsity.stages.split_costs import split_costs

_NUM_WORKERS = 8


class _Network:
    """Layers one after the other; remembers the shape of what they make."""

    def __init__(self, rows, channels=3, has_bias=True):
        self.rows, self.channels = rows, channels
        self._has_bias = has_bias
        self.layers = []

    def conv(self, outputs, size, inputs=None, rows=None):
        """Of `size` x `size`, or of a pair of sizes."""
        height, width = size if isinstance(size, tuple) else (size, size)
        inputs = inputs or self.channels
        self.channels, self.rows = outputs, rows or self.rows
        self._add(
            "convolution",
            inputs * outputs * height * width + outputs * self._has_bias,
        )

    def pool(self, rows=None):
        self.rows = rows or self.rows
        self._add("pooling", 0)

    def dense(self, *sizes):
        inputs = self.channels * self.rows**2
        for outputs in sizes:
            self.layers.append(
                LayerSize("dense", inputs * outputs + outputs, outputs)
            )
            inputs = outputs

    def module(self, *branches):
        """Branches of one input: convolutions, and None for poolings."""
        inputs, outputs = self.channels, 0
        for branch in branches:
            self.channels = inputs
            for each in branch:
                self.conv(*each) if each else self.pool()
            outputs += self.channels
        self.channels = outputs

    def _add(self, kind, num_parameters):
        num_outputs = self.channels * self.rows**2
        self.layers.append(LayerSize(kind, num_parameters, num_outputs))


def _vgg(*blocks):
    network = _Network(224)
    for block in blocks:
        for outputs in block:
            network.conv(outputs, 3)
        network.pool(network.rows // 2)
    network.dense(4096, 4096, 1000)
    return network.layers


def _alexnet():
    network = _Network(224)
    network.conv(64, 11, rows=55)
    network.pool(27)
    network.conv(192, 5)
    network.pool(13)
    for outputs in (384, 384, 256):
        network.conv(outputs, 3)
    network.pool(6)
    network.dense(4096, 4096, 1000)
    return network.layers


def _overfeat():
    network = _Network(231)
    network.conv(96, 11, rows=56)
    network.pool(28)
    network.conv(256, 5, rows=24)
    network.pool(12)
    for outputs in (512, 1024, 1024):
        network.conv(outputs, 3)
    network.pool(6)
    network.dense(3072, 4096, 1000)
    return network.layers


def _lenet():
    network = _Network(28)
    for outputs in (32, 64):
        network.conv(outputs, 5)
        network.pool(network.rows // 2)
    network.dense(512, 1000)
    return network.layers


def _resnet50():
    network = _Network(224)
    network.conv(64, 7, rows=112)
    network.pool(56)
    for number, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(number):
            inputs = network.channels
            if block == 0:
                network.conv(4 * width, 1)
            network.conv(width, 1, inputs)
            network.conv(width, 3)
            network.conv(4 * width, 1)
    network.pool(1)
    network.dense(1000)
    return network.layers


def _googlenet():
    network = _Network(224)
    network.conv(64, 7, rows=112)
    network.pool(56)
    network.conv(64, 1)
    network.conv(192, 3)
    network.pool(28)
    for sizes in [
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
        14,
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
        7,
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
        1,
    ]:
        if isinstance(sizes, int):
            network.pool(sizes)
            continue
        alone, first, third, narrow, fifth, pooled = sizes
        network.module(
            [(alone, 1)],
            [(first, 1), (third, 3)],
            [(narrow, 1), (fifth, 5)],
            [None, (pooled, 1)],
        )
    network.dense(1000)
    return network.layers


def _inception_v3():
    wide, high = (1, 7), (7, 1)
    network = _Network(299, has_bias=False)
    for outputs, rows in ((32, 149), (32, 147), (64, 147)):
        network.conv(outputs, 3, rows=rows)
    network.pool(73)
    network.conv(80, 1)
    network.conv(192, 3, rows=71)
    network.pool(35)
    for pooled in (32, 64, 64):
        network.module(
            [(64, 1)],
            [(48, 1), (64, 5)],
            [(64, 1), (96, 3), (96, 3)],
            [None, (pooled, 1)],
        )
    network.rows = 17
    network.module([(384, 3)], [(64, 1), (96, 3), (96, 3)], [None])
    for n in (128, 160, 160, 192):
        network.module(
            [(192, 1)],
            [(n, 1), (n, wide), (192, high)],
            [(n, 1), (n, high), (n, wide), (n, high), (192, wide)],
            [None, (192, 1)],
        )
    network.rows = 8
    network.module(
        [(192, 1), (320, 3)],
        [(192, 1), (192, wide), (192, high), (192, 3)],
        [None],
    )
    for _ in range(2):
        # The two last convolutions of a branch stand side by side.
        network.module(
            [(320, 1)],
            [(384, 1), (384, (1, 3))],
            [(384, (3, 1), 384)],
            [(448, 1), (384, 3), (384, (1, 3))],
            [(384, (3, 1), 384)],
            [None, (192, 1)],
        )
    network.pool(1)
    network.dense(1000)
    return network.layers


_VGG11 = _vgg([64], [128], [256] * 2, [512] * 2, [512] * 2)
_VGG19 = _vgg([64] * 2, [128] * 2, [256] * 4, [512] * 4, [512] * 4)


@pytest.mark.parametrize(
    ("layers", "published"),
    [
        (_alexnet(), -2.27),
        (_googlenet(), -0.74),
        (_inception_v3(), -0.96),
        (_lenet(), -1.16),
        (_overfeat(), -2.11),
        (_resnet50(), -1.26),
        (_VGG11, -3.62),
        (_VGG19, -3.02),
    ],
    ids="AlexNet GoogLeNet Inception LeNet Overfeat ResNet VGG11 VGG19".split(),
)
def test_table_1(layers, published):
    assert skewness(layers) == pytest.approx(published, abs=0.005001)


def _all_reduce_bytes(layers):
    """Bytes on a worker's link, of all gradients, in one direction."""
    number = sum(layer.num_parameters for layer in layers)
    whole = VariableSpec("whole", (number,))
    cost = transfer_bytes(whole, "allreduce", Cluster(_NUM_WORKERS))
    return cost.busiest_bytes / 2


def _split_cost(layers, num_examples):
    """The `SplitCost` of the published split, with one tail worker."""
    split = published_split(layers, num_examples)
    profile = Profile(
        names=("",) * len(layers),
        sizes=tuple(layers),
        seconds=(0.0,) * len(layers),
        num_examples=1,
        crossing_bytes={split: 4 * layers[split].num_outputs},
        gradients=tuple(GradientSize(4 * x.num_parameters) for x in layers),
        update_seconds=(0.0,) * len(layers),
    )
    of_batch = _NUM_WORKERS * num_examples
    (cost,) = split_costs(profile, _NUM_WORKERS, 1, of_batch)
    return cost


@pytest.mark.parametrize(
    ("layers", "num_examples", "published"),
    [
        (_alexnet(), 512, (0.23, 3.23, 0.47)),
        # Printed as 0.50, 6.93 and 0.64.
        (_VGG11, 64, (0.495, 6.93, 0.645)),
    ],
    ids=["AlexNet", "VGG11"],
)
def test_table_2(layers, num_examples, published):
    """Of eight machines, sums over all links, in GiB, both directions."""
    found = (
        4 * sum(layer.num_parameters for layer in layers),
        _NUM_WORKERS * _all_reduce_bytes(layers),
        2 * _split_cost(layers, num_examples).star_bytes,
    )
    in_gib = [each / 2**30 for each in found]
    assert in_gib == pytest.approx(published, abs=0.005001)


@pytest.mark.parametrize(
    ("layers", "num_examples"),
    [(_alexnet(), 512), (_VGG11, 64), (_VGG19, 64), (_overfeat(), 64)],
    ids=["AlexNet", "VGG11", "VGG19", "Overfeat"],
)
def test_the_split_is_behind_the_last_pooling(layers, num_examples):
    split = published_split(layers, num_examples)
    kinds = [layer.kind for layer in layers]
    assert kinds[split] == "pooling" and "pooling" not in kinds[split + 1 :]


@pytest.mark.parametrize(
    ("layers", "num_examples", "megabytes"),
    [
        (_VGG11, 64, (930, 346, 71)),
        (_VGG19, 64, (1006, 692, 147)),
        (_alexnet(), 512, (433, 254, 151)),
    ],
    ids=["VGG11", "VGG19", "AlexNet"],
)
def test_bytes_on_the_busiest_link(layers, num_examples, megabytes):
    cost = _split_cost(layers, num_examples)
    ways = _all_reduce_bytes(layers), cost.star_bytes, cost.busiest_bytes
    assert [round(way / 1e6) for way in ways] == list(megabytes)


def test_a_model_without_skew_is_left_alone():
    alike = [LayerSize("dense", 100, 10)] * 4
    assert skewness(alike) == pytest.approx(0, abs=1e-12)
    assert published_split(alike, 8) is None
    assert published_split(alike[:1], 8) is None


def test_sizes_of_a_model():
    shared = keras.layers.Dense(3)
    x = inputs = keras.Input((8, 8, 2))
    x = keras.layers.Conv2D(4, 3)(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = shared(keras.layers.Dense(3)(x))
    model = keras.Model(inputs, shared(x))
    assert layer_sizes(Cutter(model)) == [
        LayerSize("convolution", 9 * 2 * 4 + 4, 6 * 6 * 4),
        LayerSize("other", 2 * 4, 6 * 6 * 4),
        LayerSize("pooling", 0, 4),
        LayerSize("dense", 4 * 3 + 3, 3),
        LayerSize("dense", 3 * 3 + 3, 3),
        LayerSize("dense", 0, 3),
    ]
    x = keras.Input((None, 2))
    (size,) = layer_sizes(Cutter(keras.Model(x, keras.layers.Dense(1)(x))))
    assert size.num_outputs == 16
