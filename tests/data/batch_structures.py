"""Batches of all structures, and their rows."""

import numpy as np
import tensorflow as tf


def structures():
    x = np.arange(10.0).reshape(5, 2)
    ragged = tf.ragged.constant([[1], [2, 3], [], [4], [5, 6]])
    return {
        "array": x,
        "tuple": (x, np.arange(5)),
        "tuple of one": (x,),
        "pair without labels": ((x, np.arange(5)),),
        "pair with labels": ((x, np.arange(5)), np.arange(5)),
        "dict": {"a": x, "b": (np.arange(5), np.array(list("abcde")))},
        "none": (x, None),
        "optional": (x, tf.experimental.Optional.empty(None)),
        "ragged": (ragged, np.arange(5)),
        "sparse": (tf.sparse.from_dense(np.arange(15).reshape(5, 3)),),
    }


def listed(structure):
    """Rows as lists, whatever they are kept in."""

    def leaf(x):
        if x is None or isinstance(x, tf.experimental.Optional):
            return None
        if isinstance(x, tf.RaggedTensor):
            return x.to_list()
        if isinstance(x, tf.SparseTensor):
            x = tf.sparse.to_dense(x)
        return np.asarray(x).tolist()

    return [leaf(x) for x in tf.nest.flatten(structure)]


def read(dataset, epochs=2):
    """Rows of each batch of this rank, in each epoch."""
    return [[listed(batch)[0] for batch in dataset] for _ in range(epochs)]
