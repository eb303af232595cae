"""Sums of a head's gradients by its tails, as a parameter server makes them."""

import tensorflow as tf


class HeadSums:
    """Workers send their gradients to their tail, which sends back the sums.

    Each has one vector for each dtype. A tail is told of their sizes, as only
    the workers trace the head.

    Args:
        pairs: list of the `Collectives` of each worker and its tail: of a
            worker one, of a tail those of its workers.
        tails: `Collectives` of the tails; None at a worker.
        dtypes: list of the dtypes of the head's weights.

    Attributes:
        is_tail: whether this rank is a tail.
    """

    def __init__(self, pairs, tails, dtypes):
        self._pairs, self._tails = pairs, tails
        self.is_tail = tails is not None
        self._dtypes = sorted(set(dtypes))

    def summed(self, gradients):
        """The sums over all workers; a worker calls it.

        Args:
            gradients: list of tensors.
        """
        (pair,) = self._pairs
        places = [
            [i for i, g in enumerate(gradients) if g.dtype.name == dtype]
            for dtype in self._dtypes
        ]
        vectors = [
            tf.concat(
                [
                    tf.zeros([0], dtype),
                    *(tf.reshape(gradients[i], [-1]) for i in of_dtype),
                ],
                0,
            )
            for dtype, of_dtype in zip(self._dtypes, places, strict=True)
        ]
        sizes = tf.stack([tf.size(v, tf.int64) for v in vectors])
        pair.broadcast([sizes], root=0, name="head/sizes")
        pair.broadcast(vectors, root=0, name="head/gradients")
        sums = pair.broadcast(vectors, root=1, name="head/sums")
        found = list(gradients)
        for of_dtype, vector in zip(places, sums, strict=True):
            shapes = [tf.shape(gradients[i]) for i in of_dtype]
            counts = [tf.size(gradients[i]) for i in of_dtype]
            parts = tf.split(vector, counts) if counts else []
            for i, part, shape in zip(of_dtype, parts, shapes, strict=True):
                found[i] = tf.ensure_shape(
                    tf.reshape(part, shape), gradients[i].shape
                )
        return found

    def serve(self):
        """Sums what the workers of a tail send; this tail calls it."""
        of_workers, like = [], []
        for pair in self._pairs:
            (sizes,) = pair.broadcast(
                [tf.zeros([len(self._dtypes)], tf.int64)],
                root=0,
                name="head/sizes",
            )
            like = [
                tf.zeros(size[None], dtype)
                for size, dtype in zip(
                    tf.unstack(sizes), self._dtypes, strict=True
                )
            ]
            of_workers.append(
                pair.broadcast(like, root=0, name="head/gradients")
            )
        sums = [tf.add_n(each) for each in zip(*of_workers, strict=True)]
        if self._tails.size > 1:
            sums = self._tails.all_reduce(sums, name="head/tails")
        for pair in self._pairs:
            pair.broadcast(sums, root=1, name="head/sums")
