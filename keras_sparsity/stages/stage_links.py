"""Links between stages whose ranks share each mini-batch."""

import math

import numpy as np

from keras_sparsity.stages.machine_links import crossings, processor_seconds


def pieces(num_senders, num_receivers):
    """Who sends each piece of a batch, and who receives it.

    The ranks of a stage have equal parts of a batch, in the order of ranks.
    Pieces are as large as can be with whole ones in the parts of both stages.
    Two arrays, of a rank's number in its stage for each piece.

    Example:

    >>> senders, receivers = pieces(2, 3)
    >>> senders.tolist(), receivers.tolist()
    ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2])
    """
    number = math.lcm(num_senders, num_receivers)
    every = np.arange(number)
    return every * num_senders // number, every * num_receivers // number


class StageLink:
    """What travels between two neighbouring stages.

    Args:
        senders, receivers: ranges of the ranks of a stage and of the next one.

    Attributes:
        num_pieces: the number of pieces of a batch, see `pieces`.
        sent, received: arrays of the pieces that leave each machine, and that
            arrive there; of gradients the other way round.
        most: the most pieces on a machine's link, in one direction.

    Example:

    >>> from keras_sparsity.planning import Cluster
    >>> link = StageLink(range(1), range(1, 3), Cluster(3))
    >>> link.sent.tolist(), link.received.tolist(), link.most
    ([2, 0, 0], [0, 1, 1], 2)
    """

    def __init__(self, senders, receivers, cluster):
        self._cluster = cluster
        of_pieces = pieces(len(senders), len(receivers))
        self.num_pieces = len(of_pieces[0])
        self.sent, self.received = crossings(
            senders[0] + of_pieces[0], receivers[0] + of_pieces[1], cluster
        )
        self.most = int(max(self.sent.max(), self.received.max()))
        # Of a rank of each side: its pieces, and the messages that have them.
        # A message has all pieces of a pair of ranks.
        self._sides = [
            (self.num_pieces // len(ranks), int(np.bincount(side).max()))
            for ranks, side in zip(
                (senders, receivers),
                np.unique(of_pieces, axis=1),
                strict=True,
            )
        ]

    def processor_seconds(self, num_bytes):
        """Times of a pass's messages at a processor of each side.

        Args:
            num_bytes: those of a piece.

        Returns:
            List of two: of a sender, and of a receiver.
        """
        return [
            processor_seconds(self._cluster, number * num_bytes, num_messages)
            for number, num_messages in self._sides
        ]
