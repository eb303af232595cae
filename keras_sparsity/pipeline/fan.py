"""Messages between stages of which one has more ranks than the other."""

import functools
import itertools
import math

import numpy as np
import tensorflow as tf

from keras_sparsity.collectives.base import divided
from keras_sparsity.pipeline.links import Link
from keras_sparsity.pipeline.micro_batches import first_example


class Fan:
    """The ways to several ranks of a neighbouring stage, as one link.

    Each of them has some pieces of a batch, in the order of ranks.

    Args:
        links: dict from the number of a piece, in order, to the `Link` to the
            rank that has it.
        num_pieces: the number of pieces of each batch.
    """

    def __init__(self, links, num_pieces):
        self._links, self._num_pieces = links, num_pieces

    def shared(self, peers, parts_of_tails):
        """A `SharedFan` of these links."""
        return SharedFan(self._links, peers, parts_of_tails)

    def of(self, batch):
        """The link for a piece, or for a range of them as one."""
        if not isinstance(batch, range):
            return self._links[batch % self._num_pieces]
        places = [piece % self._num_pieces for piece in batch]
        return Fan({p: self._links[p] for p in places}, self._num_pieces)

    @property
    def pairs(self):
        """List of the `Collectives` of this rank and each of the others."""
        return [pair for link in self._each for pair in link.pairs]

    @property
    def wire(self):
        return self._each[0].wire

    def seconds_per_byte(self):
        """Measures the links, one after the other; the slowest counts."""
        speeds = [link.seconds_per_byte() for link in self._each]
        return tuple(np.max(speeds, axis=0))

    def send_activations(self, crossing, tensors, loss):
        """Sends each rank its part; see `Link.send_activations`."""
        values = crossing.with_masks(tensors)
        for link, _, part in self._divided(values):
            link.send_activations(crossing, crossing.without_masks(part), loss)
            loss = tf.zeros_like(loss)  # once

    def receive_activations(self, crossing, num_examples):
        """The tensors of all ranks, with their masks, and the sum of losses.

        The ranks have `num_examples` together.
        """
        parts, total = [], tf.zeros([])
        for link, _, number in self._bounds(num_examples):
            # A rank without examples sends those of a stand-in.
            tensors, loss = link.receive_activations(
                crossing, tf.maximum(number, 1)
            )
            values = crossing.with_masks(tensors)
            parts.append([value[:number] for value in values])
            total += loss
        whole = [tf.concat(each, 0) for each in zip(*parts, strict=True)]
        return crossing.without_masks(whole), total

    def send_gradients(self, tensors, numbers=()):
        """Sends each rank the gradients of its part, and the same numbers."""
        for link, begin, number in self._bounds(_num_examples(tensors)):
            parts = [tensor[begin : begin + number] for tensor in tensors]
            link.send_gradients(
                [_at_least_one(part) for part in parts], numbers
            )

    def receive_gradients(self, sent, numbers=()):
        """Gradients of all ranks' parts; see `Link.receive_gradients`."""
        parts, received = [], []
        for link, number, part in self._divided(sent):
            found = link.receive_gradients(part, numbers)
            parts.append([each[:number] for each in found[: len(sent)]])
            received = found[len(sent) :]  # the same of all
        whole = [tf.concat(each, 0) for each in zip(*parts, strict=True)]
        return [*whole, *received]

    @property
    def _each(self):
        """List of the links, each once."""
        return list(dict.fromkeys(self._links.values()))

    def _bounds(self, num_examples):
        """Triples of a link, its first example, and the number of them."""
        first = 0
        for link, pieces in itertools.groupby(self._links.values()):
            own = range(first, first + len(list(pieces)))
            yield link, *_bounds(num_examples, len(self._links), own)
            first = own.stop

    def _divided(self, tensors):
        """Triples of a link, the number of its examples, and its part.

        The part of no examples is one of its neighbour's, as a stand-in.
        """
        num_examples = _num_examples(tensors)
        for link, begin, number in self._bounds(num_examples):
            first = tf.minimum(begin, num_examples - 1)
            end = first + tf.maximum(number, 1)
            yield link, number, [tensor[first:end] for tensor in tensors]


class SharedFan(Fan):
    """A `Fan` of which all tails have the whole batch.

    Args:
        links: as for `Fan`: those of the own parts.
        peers: `Collectives` of the tails.
        parts: list of the range of each tail's parts.
    """

    def __init__(self, links, peers, parts):
        super().__init__(links, parts[-1].stop)
        self._peers, self._parts = peers, parts

    def of(self, batch):
        """This: all parts are one micro-batch."""
        del batch
        return self

    def receive_activations(self, crossing, num_examples):
        own, loss = super().receive_activations(crossing, num_examples)
        counts = tf.stack(
            [
                _bounds(num_examples, self._num_pieces, each)[1]
                for each in self._parts
            ]
        )
        whole = []
        for value, spec in zip(
            crossing.with_masks(own), crossing.specs, strict=True
        ):
            wire = self.wire(value.dtype)
            gathered = self._peers.all_gather(
                wire.encode(value), f"tail/parts/{len(whole)}", counts
            )
            whole.append(tf.ensure_shape(wire.decode(gathered), spec.shape))
        (loss,) = self._peers.all_reduce([loss], name="tail/losses")
        return crossing.without_masks(whole), loss

    def _bounds(self, num_examples):
        for part, link in self._links.items():
            own = range(part, part + 1)
            yield link, *_bounds(num_examples, self._num_pieces, own)


def _bounds(num_examples, number, own):
    """The first example of a range of a batch's parts, and their number."""
    begin, end = (
        first_example(num_examples, number, place)
        for place in (own.start, own.stop)
    )
    return begin, end - begin


def _num_examples(tensors):
    return tf.shape(tensors[0])[0] if tensors else tf.zeros([], tf.int32)


def _at_least_one(part):
    """A part, or of none the gradient of the stand-in, which is zero."""
    missing = tf.maximum(0, 1 - tf.shape(part)[0])
    ends = [[0, missing], *([[0, 0]] * (part.shape.rank - 1))]
    return tf.pad(part, ends)


def fan(collectives, parts_of_ranks, wire_dtype=None):
    """As `between`, for a head and a tail; a tail's is always a `Fan`.

    Args:
        collectives, wire_dtype: as for `between`. The workers come first.
        parts_of_ranks: as `stages.split_costs.parts_of_ranks` gives them.
    """
    ranks = [rank for rank, parts in enumerate(parts_of_ranks) for _ in parts]
    number = len(ranks) // 2  # of parts, each of a worker and of a tail
    meetings = [
        (pair, range(part, part + 1))
        for part, pair in enumerate(
            zip(ranks[:number], ranks[number:], strict=True)
        )
    ]
    before, behind = _links(collectives, meetings, wire_dtype)
    return Fan(before, number) if before else None, _as_one(behind, number)


@functools.cache
def _pair(collectives, first, second):
    """`Collectives` of two ranks, at these; all ranks call it."""
    pair = [first, second]
    alone = [[rank] for rank in range(collectives.size) if rank not in pair]
    return divided(collectives, [pair, *alone], f"pair/{first}/{second}")


def between(collectives, num_ranks, wire_dtype=None):
    """`(link to the stage before, link to the one behind)`; None at an end.

    Args:
        collectives: `Collectives` of all ranks.
        num_ranks: for each stage, the number of its ranks, which follow each
            other.
        wire_dtype: see `Link`.
    """
    num_pieces = math.lcm(*num_ranks)
    found = _links(collectives, _meetings(num_ranks), wire_dtype)
    return tuple(_as_one(of_pieces, num_pieces) for of_pieces in found)


def _links(collectives, meetings, wire_dtype):
    """Dicts from pieces to `Link`s, to the stage before and the one behind.

    Args:
        collectives, wire_dtype: as for `between`.
        meetings: as `_meetings` gives them.
    """
    found = {}, {}
    for ranks, pieces in meetings:
        pair = _pair(collectives, *ranks)
        if collectives.rank in ranks:
            link = Link(pair, wire_dtype)
            found[1 - pair.rank].update(dict.fromkeys(pieces, link))
    return found


def _as_one(of_pieces, num_pieces):
    if len(set(of_pieces.values())) > 1:
        return Fan(of_pieces, num_pieces)
    return next(iter(of_pieces.values()), None)


def _meetings(num_ranks):
    """Pairs of ranks of neighbouring stages, with the pieces that they share.

    Example:

    >>> list(_meetings([1, 2]))
    [((0, 1), range(0, 1)), ((0, 2), range(1, 2))]
    >>> list(_meetings([2, 2]))  # two replicas
    [((0, 2), range(0, 1)), ((1, 3), range(1, 2))]
    """
    num_pieces, first = math.lcm(*num_ranks), 0
    for here, behind in itertools.pairwise(num_ranks):
        for i, j in itertools.product(range(here), range(behind)):
            own = own_pieces(num_pieces, here, i)
            others = own_pieces(num_pieces, behind, j)
            shared = range(
                max(own.start, others.start), min(own.stop, others.stop)
            )
            if shared:
                yield (first + i, first + here + j), shared
        first += here


def own_pieces(num_pieces, num_ranks, rank):
    """The range of a rank's pieces of each batch, of a stage's ranks."""
    width = num_pieces // num_ranks
    return range(rank * width, (rank + 1) * width)
