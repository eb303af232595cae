"""A `fit` that goes on from a `ShardedCheckpoint`."""

import contextlib
import itertools
import logging

from keras_sparsity._tf import keras_input, keras_models, random_seeds
from keras_sparsity.callbacks.save_times import saves_within
from keras_sparsity.callbacks.sharded_checkpoint import ShardedCheckpoint
from keras_sparsity.collectives import agreed_seed
from keras_sparsity.conversion.saving import optimizers_of

_fits = itertools.count()


def checkpoint_last(callbacks):
    """Callbacks in their order; a checkpoint saves the state of the others."""
    return sorted(callbacks, key=lambda c: isinstance(c, ShardedCheckpoint))


def checkpoint_among(callbacks):
    """The `ShardedCheckpoint` among a `fit`'s callbacks, or None."""
    found = [c for c in callbacks if isinstance(c, ShardedCheckpoint)]
    if len(found) > 1:
        raise ValueError(
            "Give `fit` one ShardedCheckpoint. Received: "
            f"{[c.directory for c in found]}. `every_steps` and "
            "`every_seconds` can be combined in one."
        )
    return found[0] if found else None


@contextlib.contextmanager
def resuming(model, callbacks, arguments, communicator=None, trains=True):
    """Context of a `fit`: its first epoch and the order of its arrays.

    Args:
        model: the model to be trained.
        callbacks: list of all of its callbacks.
        arguments: `fit`'s, by name; gets `initial_epoch`.
        communicator, trains: see `ShardedCheckpoint.begin`.

    Yields:
        The `ShardedCheckpoint` among the callbacks, or None.
    """
    order_seed = next_order_seed()
    checkpoint = checkpoint_among(callbacks)
    with contextlib.ExitStack() as stack:
        if checkpoint:
            stack.callback(checkpoint.end)
            _warn_of_other_optimizers(model)
            arguments["initial_epoch"] = checkpoint.begin(
                model, callbacks, arguments, communicator, trains
            )
            order_seed = checkpoint.order_seed(order_seed)
            if saves_within(model):  # so that an epoch may be resumed
                stack.enter_context(keras_models.empty_logs_are_metrics(model))
        stack.enter_context(random_seeds.array_orders_change(order_seed))
        yield checkpoint


def _warn_of_other_optimizers(model):
    """They may have no state to compare a checkpoint with before a step."""
    others = [o for o in optimizers_of(model) if o is not model.optimizer]
    if others and model.distribute_strategy.rank == 0:
        logging.getLogger(__name__).warning(
            "ShardedCheckpoint keeps the state of `model.optimizer` alone. "
            "Received: %d further optimizers (%s), which begin anew when the "
            "training is resumed.",
            len(others),
            ", ".join(
                type(getattr(o, "inner_optimizer", o)).__name__ for o in others
            ),
        )


def next_order_seed():
    """A seed for the orders of one `fit`'s arrays; None if the user set one.

    For when the ranks share a seed that the user has not asked for: with one,
    TensorFlow repeats the order of `fit(x, y)` in every epoch. It depends on
    the ranks' seed and on how often this was called, so they agree on it.
    """
    seed = agreed_seed()
    if seed is None or random_seeds.global_seed() != seed:
        return None
    return (seed + next(_fits) * 2**31) % 2**62


class Input:
    """The input of a run, shown to a `ShardedCheckpoint` that awaits it.

    Attributes:
        awaited_by: the checkpoint, or None.
    """

    def __init__(self):
        self.awaited_by = None

    def shapes(self, iterator):
        """The shapes of a batch, without reading one.

        Keras reads a batch and throws it away. A generator's cannot be read
        again, and its prefetched batches would differ between the ranks.

        Args:
            iterator: Keras's epoch iterator.
        """
        if self.awaited_by:
            self.awaited_by.use_input(iterator)
            self.awaited_by = None
        return keras_input.batch_shapes(iterator)
