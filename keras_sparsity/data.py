"""Each rank's part of the input."""


def distribute(dataset, collectives):
    """What `fit` is given: this rank's part of every global batch."""
    return dataset if collectives.size == 1 else dataset.map(
        lambda *batch: split_batch(
            batch if len(batch) > 1 else batch[0],
            collectives.rank, collectives.size)
    )


def split_batch(batch, rank, size):
    """Rows `[rank * B // size, (rank + 1) * B // size)` of each tensor."""
    import tensorflow as tf

    def part(x):
        n = tf.shape(x)[0] if tf.is_tensor(x) else len(x)
        return x[rank * n // size : (rank + 1) * n // size]

    return tf.nest.map_structure(part, batch)


def shard(dataset, collectives):
    return distribute(dataset, collectives)
