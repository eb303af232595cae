"""The input of dedicated servers, which read none.

A server takes part in the steps of the workers without examples. Of its
dataset it needs the shapes alone. The number of batches is that of the
workers, who tell where an epoch ends if nobody knows it before (see
`equal_steps.ending_together`).
"""

import tensorflow as tf

from keras_sparsity.collectives.differences import raise_if_different
from keras_sparsity.data.batches import mapped, rows_between
from keras_sparsity.data.equal_steps import ending_together
from keras_sparsity.data.stand_ins import Counted, nothing_of, zeros


def agreed(facts, what, fix, collectives):
    """The facts of worker 0, which all workers must have.

    Args:
        facts: what the workers compare; a server's are not looked at.
        what, fix: as for `Collectives.check_equal`.

    Raises:
        ValueError: on every rank, if workers have different facts.
    """
    if not collectives.num_servers:
        collectives.check_equal(facts, what, fix)
        return facts
    # Not by their places: after a loss fewer ranks are left.
    mine = collectives.is_server, facts
    everyone = collectives.gather_objects(mine, name=f"workers/{what}")
    of_workers = [each for is_server, each in everyone if not is_server]
    raise_if_different(of_workers, what, fix)
    # A server that comes back alone hears of no worker.
    return of_workers[0] if of_workers else facts


def agreed_number(dataset, fix, collectives, known=None):
    """The number of batches, once the ranks' datasets are seen to be alike.

    Args:
        fix: as for `agreed`.
        known: the number, if it is known from elsewhere.
    """
    number = int(dataset.cardinality())
    name = {
        tf.data.INFINITE_CARDINALITY: "infinite",
        tf.data.UNKNOWN_CARDINALITY: "unknown",
    }.get(number, number)
    what, spec = "The input dataset", str(dataset.element_spec)
    facts = {"element_spec": spec, "number of batches": name}
    agreed(facts, what, fix, collectives)
    if collectives.num_servers:
        # Of a server the shapes alone: it may have no files to count.
        collectives.check_equal(spec, f"{what}'s element_spec", fix)
        if number == tf.data.UNKNOWN_CARDINALITY and known:
            number = known
        (number,) = collectives.broadcast(
            [tf.constant(number, tf.int64)], name="input/number"
        )
    return int(number)


def parts_of_server(dataset, number, collectives, are_counted=False):
    """As many batches as workers have, each of one example of zeros.

    Args:
        dataset: `tf.data.Dataset` of batches of these shapes, not read.
        number: the workers' number of batches, or an unknown or infinite one.
        are_counted: whether they are `Counted`, as of no examples.

    Returns:
        `tf.data.Dataset` of batches whose number of rows is not static.
    """
    one = tf.data.Dataset.from_tensors(nothing_of(dataset.element_spec))

    def example(nothing):
        start, stop = tf.unstack(tf.constant([0, 1], tf.int64))
        batch = rows_between(zeros(nothing), start, stop)
        counts = tf.zeros([2], tf.int64)
        return Counted(batch, counts) if are_counted else batch

    parts = mapped(one, example).repeat(number if number >= 0 else None)
    if number == tf.data.UNKNOWN_CARDINALITY:
        return ending_together(parts, collectives)
    return parts
