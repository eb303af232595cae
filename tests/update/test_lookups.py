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


def test_other_layers_and_their_variables_are_none():
    with ks.HybridStrategy().scope():
        layer = keras.layers.Dense(2)
        layer.build((None, 4))
    lookups.mark([layer, keras.layers.Embedding(4, 2)], 2)
    assert lookups.owner_of(layer.kernel) is None
