"""Embeddings that are sharded, and those that are not."""

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests.conversion.test_exporting import (
    DIM,
    ITEMS,
    VOCABULARY,
    BuildsItsTable,
    tables_in,
)


class OwnEmbedding(keras.layers.Embedding):
    pass


outside = keras.layers.Embedding(VOCABULARY, DIM)


def test_nothing_sharded_is_said():
    inputs = keras.Input((3,))
    dense = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    with pytest.warns(UserWarning, match="nothing is sharded"):
        ks.shard_embeddings(dense)
    with pytest.warns(UserWarning, match="'mine' .OwnEmbedding.*Derive"):
        ks.shard_embeddings(
            keras.Sequential([OwnEmbedding(VOCABULARY, DIM, name="mine")])
        )
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(outside)])
    assert ks.shard_embeddings(model).layers[0].function is not outside
    reads = keras.layers.Lambda(lambda ids: outside(ids))
    model = keras.Sequential([keras.Input((3,)), reads])
    with pytest.warns(UserWarning, match="outside .in .*Make the layer an"):
        ks.shard_embeddings(model)
    unbuilt = keras.Sequential([BuildsItsTable()])
    with pytest.raises(ValueError, match="has no weights yet. Build it"):
        ks.shard_embeddings(unbuilt)
    lora = keras.Sequential([keras.layers.Embedding(8, 4, lora_rank=2)])
    with pytest.raises(ValueError, match="uses LoRA.*lora_rank=2"):
        ks.shard_embeddings(lora)


def test_what_a_layer_builds_later_is_sharded():
    class Later(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Embedding(ITEMS, DIM)
            self.second = BuildsItsTable()

        def call(self, ids):
            return self.first(ids) + self.second(ids)

    sharded = ks.shard_embeddings(Later())
    ids = np.array([[1, 2]])
    before = sharded(ids)
    assert [type(layer) for layer in tables_in(sharded)] == [
        ks.layers.ShardedEmbedding
    ] * 2
    assert len(sharded.weights) == 2
    np.testing.assert_array_equal(ks.export(sharded)(ids), before)
