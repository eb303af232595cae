"""Whether `fit`'s input is cut into the batches of an interrupted epoch."""

import logging

import tensorflow as tf

from keras_sparsity.data import marks

_LOG = logging.getLogger(__name__)


def given(arguments):
    """A dict of the facts that `fit`'s arguments tell.

    Without the arguments themselves, which may hold all data.
    """
    x = arguments.get("x")
    is_dataset = isinstance(x, tf.data.Dataset)
    return {
        "batch_size": arguments.get("batch_size"),
        "split_by": marks.reordered_by(x) if is_dataset else None,
    }


def of_run(given, params, collectives):
    """A dict that differs where the batches of an epoch may differ.

    Args:
        given: result of the function `given`.
        params: those that Keras gives to callbacks, with an epoch's number of
            batches if that is known.
        collectives: the processes that train.
    """
    return {
        **given,
        "num_batches": params.get("steps"),
        "num_workers": collectives.num_workers,
    }


def tell_of_changes(before, now):
    """Warns if the rest of an epoch is not the rest of that before.

    Args:
        before, now: results of `of_run`; {} of a checkpoint of earlier
            versions.
    """
    names = "split_by", "num_workers"
    ways = [[each.get(name) for name in names] for each in (before, now)]
    if any(way for way, _ in ways) and before and ways[0] != ways[1]:
        _LOG.warning(
            "The input is split %s, and was split %s before the interruption. "
            "Its global batches hold other examples now, so that examples of "
            "this epoch are seen twice or not at all. Go on with as many "
            "processes, or from the end of an epoch, or give `fit` the "
            "dataset without `shard` from the start.",
            *(_spell_way(*way) for way in reversed(ways)),
        )
        return  # which may change the number of batches, too
    told = {
        "num_batches": "batches in an epoch",
        "batch_size": "examples in a batch",
    }
    for name, noun in told.items():
        was, is_now = before.get(name), now[name]
        if None not in (was, is_now) and was != is_now:
            _LOG.warning(
                "The input has %s %s, and had %s before the interruption. "
                "Examples of this epoch are seen twice or not at all. Give "
                "`fit` the same input and batch size until the epoch has "
                "ended.",
                is_now,
                noun,
                was,
            )
            return


def _spell_way(way, num_workers):
    noun = "process" if num_workers == 1 else "processes"
    return f"by {way or 'batches'} for {num_workers} {noun}"
