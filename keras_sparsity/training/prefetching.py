"""Why rows are not prefetched where the user asked for it."""

import logging

from keras_sparsity._tf import contexts, keras_input
from keras_sparsity.conversion.saving import tables_of
from keras_sparsity.optimizer import HybridOptimizer


def why_not(model, iterator, can_look_ahead):
    """The reason why `fit` prefetches no rows; None if it does.

    Args:
        model: an adopted model that is built.
        iterator: Keras's iterator of its input.
        can_look_ahead: whether the model's rows could be pulled ahead.
    """
    strategy = model.distribute_strategy
    # Python is not asked for a batch before it is needed.
    if keras_input.is_read_by_python(iterator):
        return "the input is made by Python, batch by batch"
    if can_look_ahead:
        return None
    if not strategy.options.merges:
        return f'architecture="{strategy.architecture}" pulls row by row'
    if strategy.options.goes_through_machines(strategy.collectives):
        return (
            "the processes of a machine pull rows together "
            "(`local_aggregation`)"
        )
    tables = [table for table in tables_of(model) if table.is_sharded]
    if not tables:
        return "the model has no table that is spread over processes"
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, HybridOptimizer) and not any(
        optimizer.updates_rows_of(piece)
        for table in tables
        for piece in table.partitions
    ):
        return (
            "the optimizer updates all rows of its tables in each step (see "
            "`sparse_updates` of `ks.HybridOptimizer`)"
        )
    return (
        "no table's ids are inputs of a functional or sequential model, or "
        "made of them by operations"
    )


def tell(model, reason):
    """Logs it, on rank 0, once for each model and reason."""
    told = getattr(model, _TOLD, ())
    if reason is None or reason in told:
        return
    object.__setattr__(model, _TOLD, (*told, reason))
    if model.distribute_strategy.collectives.rank == 0:
        logging.getLogger(__name__).warning(
            "`prefetch=True` has no effect on the model '%s': %s.",
            model.name,
            reason,
        )


def run_of_model():
    """While entered, Keras's methods call `strategy.run`, not a custom loop."""
    return contexts.on_top(_runs, None)


def tell_of_loop(strategy):
    """Logs, on rank 0, once for a strategy, that custom loops do without.

    Args:
        strategy: the strategy whose `run` has been called. One of stages has
            no `prefetch`.
    """
    is_asked_for = getattr(strategy, "prefetch", False)
    if _runs or not is_asked_for or getattr(strategy, _TOLD, False):
        return
    setattr(strategy, _TOLD, True)
    communicator = strategy.collectives
    if communicator.rank == 0 and communicator.size > 1:
        logging.getLogger(__name__).warning(
            "`prefetch=True` has no effect in a custom loop: `strategy.run` "
            "does not know the next batch. Train the model with `fit`."
        )


_TOLD = "_keras_sparsity_no_prefetch"
_runs = []  # methods of models that are under way
