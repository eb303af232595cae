"""Facts of ordinary `Embedding`s."""

import keras
import pytest

import keras_sparsity as ks
from keras_sparsity.update import lookups


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_several_processes_have_the_same_rows(num_processes):
    with ks.HybridStrategy().scope():
        layer = keras.layers.Embedding(4, 2, name="words")
        layer.build(None)
    lookups.mark([layer], num_processes)
    assert lookups.owner_of(layer.embeddings) == lookups.Lookup(
        4, num_processes > 1, None, "words"
    )


class OwnCall(keras.layers.Embedding):
    """May read its weights in other ways, too."""

    def call(self, inputs):
        return super().call(inputs) + keras.ops.sum(self.embeddings)


def test_other_layers_and_their_variables_are_none():
    with ks.HybridStrategy().scope():
        layer, own_call = keras.layers.Dense(2), OwnCall(4, 2)
        layer.build((None, 4))
        own_call.build(None)
    lookups.mark([layer, own_call, keras.layers.Embedding(4, 2)], 2)
    assert lookups.owner_of(layer.kernel) is None
    assert lookups.owner_of(own_call.embeddings) is None
