"""The turns in which stages run passes, without a flush."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Turns:
    """The turns of a pipeline whose weights are updated in each of them.

    In a turn a stage runs the forward pass of a mini-batch, and then the
    backward pass of an earlier one and its update. Every stage reads mini-batch
    t in turn t.

    Activations are used in the turn in which they are computed, their
    gradients in the turn after: stage k of N is N - 1 - k mini-batches ahead.
    So two turns last no less than the passes of two stages and two messages.

    With `messages_ahead`, each message travels during a whole turn: it is
    computed in the turn before and used in the turn after. So a turn lasts no
    less than its passes, or a message. From each stage to the next one a
    forward pass is two turns later, and a backward pass two turns earlier.
    Stage k is 4 (N - 1 - k) mini-batches ahead.

    Attributes:
        num_stages: N.
        messages_ahead: whether messages travel during a turn of their own.

    Example:

    >>> turns = Turns(3, messages_ahead=True)
    >>> [(turns.forward(k), turns.backward(k)) for k in range(3)]
    [(0, 8), (2, 6), (4, 4)]

    References:
        PipeDream (arXiv:1806.03377), 3.1: communication as a stage.
    """

    num_stages: int
    messages_ahead: bool = False

    def num_ahead(self, stage):
        """The mini-batches whose forward passes come before a backward pass."""
        behind = self.num_stages - 1 - stage
        return 4 * behind if self.messages_ahead else behind

    def forward(self, stage):
        """Turns between reading a mini-batch and its forward pass."""
        return 2 * stage if self.messages_ahead else 0

    def backward(self, stage):
        """Turns between reading a mini-batch and its backward pass.

        Those of stage 0 are the turns in which the pipeline empties.
        """
        return self.forward(stage) + self.num_ahead(stage)

    def num_beyond(self, stage):
        """The updates between a backward pass and the first stage's.

        The backward pass's own does not count. Without `messages_ahead` those
        of equation 6, by which a pass takes half a turn.

        References:
            SpecTrain (arXiv:1809.02839), equation 6.
        """
        return 2 * stage if self.messages_ahead else stage // 2
