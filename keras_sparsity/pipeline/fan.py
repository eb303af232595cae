"""Messages between a tail and the heads of all workers."""

import tensorflow as tf

from keras_sparsity.collectives.base import divided
from keras_sparsity.pipeline.links import Link
from keras_sparsity.pipeline.micro_batches import shares


class Fan:
    """The ways from all workers to the tail, as one link to the stage before.

    The workers' parts become one batch, in the order of ranks.

    Args:
        links: list of the `Link` to each worker.
    """

    def __init__(self, links):
        self._links = links

    @property
    def wire(self):
        return self._links[0].wire

    def receive_activations(self, crossing, num_examples):
        """The tensors of all workers, with their masks, and the sum of losses.

        Args:
            crossing: `Crossing`.
            num_examples: the number of the whole batch's examples.
        """
        parts, total = [], tf.zeros([])
        for link, number in self._with_numbers(num_examples):
            # A worker without examples sends those of a stand-in.
            tensors, loss = link.receive_activations(
                crossing, tf.maximum(number, 1)
            )
            values = crossing.with_masks(tensors)
            parts.append([value[:number] for value in values])
            total += loss
        whole = [tf.concat(each, 0) for each in zip(*parts, strict=True)]
        return crossing.without_masks(whole), total

    def send_gradients(self, tensors):
        """Sends each worker the gradients of its part."""
        if not tensors:
            return
        begin = 0
        for link, number in self._with_numbers(tf.shape(tensors[0])[0]):
            parts = [tensor[begin : begin + number] for tensor in tensors]
            begin += number
            link.send_gradients([_at_least_one(part) for part in parts])

    def _with_numbers(self, num_examples):
        numbers = shares(num_examples, len(self._links))
        return zip(self._links, numbers, strict=True)


def _at_least_one(part):
    """A part, or of none the gradient of the stand-in, which is zero."""
    missing = tf.maximum(0, 1 - tf.shape(part)[0])
    ends = [[0, missing], *([[0, 0]] * (part.shape.rank - 1))]
    return tf.pad(part, ends)


def fan(collectives, tail, wire_dtype=None):
    """`(link to the stage before, link to the one behind)` of a rank.

    Args:
        collectives: `Collectives` of all ranks.
        tail: the rank that all others send to.
        wire_dtype: see `Link`.
    """
    workers = [rank for rank in range(collectives.size) if rank != tail]
    pairs = []
    for worker in workers:
        alone = [[other] for other in workers if other != worker]
        pairs.append(
            divided(collectives, [[worker, tail], *alone], f"tail/{worker}")
        )
    links = [Link(pair, wire_dtype) for pair in pairs]
    if collectives.rank == tail:
        return Fan(links), None
    return None, links[workers.index(collectives.rank)]
