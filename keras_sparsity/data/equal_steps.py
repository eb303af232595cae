"""As many steps on all ranks, when some have fewer batches."""

import tensorflow as tf

from keras_sparsity.data.batches import empty_like, inner_shape
from keras_sparsity.data.stand_ins import nothing_of


def with_equal_steps(part, num_steps, collectives, are_full=False):
    """Gives a rank batches without rows until all ranks have ended.

    Args:
        part: `tf.data.Dataset` of this rank's batches.
        num_steps: how many steps all ranks shall have, or
            `tf.data.UNKNOWN_CARDINALITY`: until the last one ends.
        are_full: whether batches that are not full are dropped; ranks then end
            with the first of them that has no full part of one.
    """
    if num_steps == tf.data.INFINITE_CARDINALITY:
        return part.prefetch(tf.data.AUTOTUNE)
    steps = _without_end(part.prefetch(tf.data.AUTOTUNE))
    steps = _with_known_shapes(steps)
    if num_steps >= 0:
        steps = steps.take(num_steps).map(_unmarked)
        return steps.prefetch(tf.data.AUTOTUNE)

    # A server has no parts, and knows nothing of them.
    are_full = are_full and not collectives.num_servers
    return _while_any_is_left(steps, collectives, "min" if are_full else "max")


def ending_together(part, collectives):
    """Has all ranks end with the last worker, where no number is known.

    A dedicated server's part has no end.
    """
    if collectives.is_server:
        return _while_any_is_left(_marked(part, 0), collectives)
    return _while_any_is_left(_without_end(part), collectives)


def _while_any_is_left(marked, collectives, op="max"):
    """Marked batches, until no rank has one of its own left.

    Or, with `op="min"`, until one has none.

    Nothing may read ahead of the messages: ranks that stop early would have
    sent different numbers of them, and wait for the last one for ever.
    """

    @tf.autograph.experimental.do_not_convert
    def is_left_anywhere(batch, is_left):
        del batch
        (anywhere,) = collectives.all_reduce(
            [is_left], op=op, name="input/is_left"
        )
        return anywhere > 0

    @tf.autograph.experimental.do_not_convert
    def unmarked(state, element):
        return state, element[0]

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    # A map would be made parallel, which reads ahead; a scan never is.
    together = marked.take_while(is_left_anywhere).scan(0, unmarked)
    return together.with_options(options)


def _with_known_shapes(marked):
    """Gives batches without rows the shapes of the last one with some.

    What the pipeline does not know beforehand (the width of a parsed line),
    only data tells; layers behind it may refuse anything else.
    """
    flat = tf.nest.flatten(marked.element_spec[0])
    unknown = [
        i
        for i, spec in enumerate(flat)
        if isinstance(spec, tf.TensorSpec | tf.SparseTensorSpec)
        and spec.shape.rank is not None
        and None in spec.shape[1:]
    ]
    if not unknown:
        return marked

    @tf.autograph.experimental.do_not_convert
    def fill(shapes, element):
        batch, is_left = element
        leaves = tf.nest.flatten(batch)
        shapes = list(shapes)
        for j, i in enumerate(unknown):
            leaf = leaves[i]
            shapes[j] = tf.where(is_left > 0, inner_shape(leaf), shapes[j])
            shape = tf.concat([[0], shapes[j]], axis=0)
            leaves[i] = tf.cond(
                is_left > 0,
                lambda leaf=leaf: leaf,
                lambda leaf=leaf, shape=shape: empty_like(leaf, shape),
            )
        batch = tf.nest.pack_sequence_as(batch, leaves)
        return tuple(shapes), (batch, is_left)

    ones = [tf.ones([flat[i].shape.rank - 1], tf.int64) for i in unknown]
    return marked.scan(tuple(ones), fill)


@tf.autograph.experimental.do_not_convert
def _unmarked(batch, mark):
    del mark
    return batch


def _without_end(part):
    """Batches, marked by 1, and then batches without rows, marked by 0."""
    nothing = nothing_of(part.element_spec)
    rest = tf.data.Dataset.from_tensors(nothing).repeat()
    return _marked(part, 1).concatenate(_marked(rest, 0))


def _marked(dataset, mark):
    marks = tf.data.Dataset.from_tensors(tf.constant(mark, tf.int32)).repeat()
    return tf.data.Dataset.zip((dataset, marks))
