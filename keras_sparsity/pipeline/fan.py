"""Messages between tails and the heads of their workers."""

import tensorflow as tf

from keras_sparsity.collectives.base import divided
from keras_sparsity.pipeline.links import Link
from keras_sparsity.pipeline.micro_batches import shares


class Fan:
    """The ways from workers to their tail, as one link to the stage before.

    The workers' parts become one batch, in the order of ranks.

    Args:
        links: dict from the number of a worker's micro-batch to its `Link`.
    """

    def __init__(self, links):
        self._links = links

    def of(self, batch):
        """The link for a micro-batch, or for a range of them as one."""
        if isinstance(batch, range):
            return Fan({place: self._links[place] for place in batch})
        return self._links[batch]

    @property
    def pairs(self):
        """List of the `Collectives` of each worker and this rank."""
        return [pair for link in self._links.values() for pair in link.pairs]

    @property
    def wire(self):
        return next(iter(self._links.values())).wire

    def seconds_per_byte(self):
        """Measures the links, one after the other; the slowest counts."""
        return max(link.seconds_per_byte() for link in self._links.values())

    def receive_activations(self, crossing, num_examples):
        """The tensors of all workers, with their masks, and the sum of losses.

        Args:
            crossing: `Crossing`.
            num_examples: the number of the workers' examples.
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
        return zip(self._links.values(), numbers, strict=True)


def _at_least_one(part):
    """A part, or of none the gradient of the stand-in, which is zero."""
    missing = tf.maximum(0, 1 - tf.shape(part)[0])
    ends = [[0, missing], *([[0, 0]] * (part.shape.rank - 1))]
    return tf.pad(part, ends)


def fan(collectives, workers_of_tails, wire_dtype=None):
    """`(link to the stage before, link to the one behind)` of a rank.

    Args:
        collectives: `Collectives` of all ranks. The workers come first.
        workers_of_tails: dict from a tail's rank to the range of its workers.
        wire_dtype: see `Link`.
    """
    found = {}
    for tail, workers in workers_of_tails.items():
        for worker in workers:
            pair = [worker, tail]
            alone = [
                [rank] for rank in range(collectives.size) if rank not in pair
            ]
            found[worker] = divided(
                collectives, [pair, *alone], f"tail/{tail}/{worker}"
            )
    if collectives.rank in found:
        return None, Link(found[collectives.rank], wire_dtype)
    own = workers_of_tails[collectives.rank]
    return Fan({rank: Link(found[rank], wire_dtype) for rank in own}), None
