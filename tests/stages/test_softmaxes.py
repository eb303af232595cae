"""Costs of a model that ends in a `SampledSoftmax`."""

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.stages.cutting import Cutter
from keras_sparsity.stages.model_facts import variable_specs
from keras_sparsity.stages.profile import gradient_sizes, places_of_heads
from keras_sparsity.stages.softmaxes import computed_with_losses
from keras_sparsity.stages.timing import call_seconds


def _cutter(use_bias=True):
    words = keras.Input((3,), dtype="int32")
    x = ks.layers.ShardedEmbedding(50, 4, name="rows")(words)
    x = keras.layers.Dense(6, name="hidden")(x)
    softmax = ks.layers.SampledSoftmax(
        90, num_sampled=20, use_bias=use_bias, name="softmax"
    )
    return Cutter(keras.Model(words, softmax(x))), softmax


def test_rows_of_labels_and_of_a_sample():
    cutter, _ = _cutter()
    embedding, dense, softmax = gradient_sizes(cutter)
    assert softmax.parameter_bytes == 4 * 90 * (6 + 1)
    assert softmax.dense_bytes == 0
    of_rows = (2 + 2 * 4 * 6) + (2 + 2 * 4)
    assert softmax.owned_bytes(4) == (4 * 3 + 20) * of_rows
    # Not more than all classes.
    assert softmax.owned_bytes(40) == 90 * of_rows
    alphas = [spec.alpha for spec in variable_specs(cutter, num_examples=4)]
    share = (4 * 3 + 20) / 90
    assert alphas == [4 * 3 / 50, None, None, share, share]


def test_places_between_embedding_and_softmax():
    cutter, _ = _cutter()
    embedding, dense, softmax = gradient_sizes(cutter)
    for calls, expected in [
        ([embedding, dense, softmax], [0, 1]),
        ([dense, dense, softmax], [0, 1]),
        ([dense, embedding, softmax], [1]),
        # Another output behind the softmax stays with it.
        ([embedding, softmax, dense], [0]),
        ([softmax, embedding, dense], []),
    ]:
        assert places_of_heads([0, 1], calls) == expected


def test_its_pass_is_measured_with_its_loss():
    cutter, softmax = _cutter(use_bias=False)
    before = [v.numpy() for v in (softmax.kernel, softmax.sampler.state)]
    assert len(call_seconds(cutter, 8)) == 3
    *_, part = cutter.parts([0, 1])
    with keras.StatelessScope():
        (losses,) = computed_with_losses(part, cutter.calls)(
            [tf.random.normal([2, 3, 6])]
        )
    # Of each label, in place of the hidden states.
    assert losses.shape == [6]
    assert (losses > 1).numpy().all()
    after = [v.numpy() for v in (softmax.kernel, softmax.sampler.state)]
    for value, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(value, other)
