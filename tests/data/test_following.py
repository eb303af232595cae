"""Batches together with the inputs of the next one."""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.data import following

BATCHES = 3


@pytest.fixture
def dataset():
    """Ragged, sparse and dense inputs; and how many batches were read."""
    num_read = tf.Variable(0)
    x = {
        "ids": tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]]),
        "sparse": tf.sparse.from_dense(np.eye(5)),
        "row": tf.range(5),
    }
    data = tf.data.Dataset.from_tensor_slices((x, tf.range(5))).batch(2)
    data = data.map(lambda x, y: (num_read.assign_add(1), (x, y))[1])
    return data, num_read


def as_lists(tensor):
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.to_list()
    return tensor.numpy().tolist()


def test_each_batch_has_the_inputs_of_the_next(dataset):
    data, _ = dataset
    expected = [tf.nest.map_structure(as_lists, each) for each in data]
    found = [
        tf.nest.map_structure(as_lists, each)
        for each in following.with_following(data)
    ]
    assert [each.batch for each in found] == expected
    assert [y for _, y in expected] == [[0, 1], [2, 3], [4]]
    inputs = [each.following for each in found]
    assert inputs[:-1] == [x for x, _ in expected[1:]]
    assert inputs[-1] == {"ids": [], "sparse": [], "row": []}


def test_the_pipeline_runs_once_in_each_epoch(dataset):
    data, num_read = dataset
    followed = following.with_following(data)
    assert followed.cardinality() == data.cardinality() == BATCHES
    for epoch in range(2):
        assert len(list(followed)) == BATCHES
        assert num_read == BATCHES * (epoch + 1)


def test_elements_that_cannot_be_held_back():
    data = tf.data.Dataset.from_tensors((0, None))
    assert following.with_following(data) is None
