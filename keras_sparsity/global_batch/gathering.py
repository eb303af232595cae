"""Rows of the global batch, in a step that computes on a part of it."""

import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity._tf import checks, contexts, keras_scopes
from keras_sparsity.collectives import order
from keras_sparsity.data import empty_parts

_gathered = []  # not empty while functions receive all processes' rows


def of_gathered():
    """While entered, tensors have all processes' rows already."""
    return contexts.on_top(_gathered, True)


@tf.autograph.experimental.do_not_convert
def gather_batch(x):
    """All processes' rows of a tensor, in the order of ranks.

    For losses that compare the examples of a batch (in-batch negatives of a
    retrieval model, contrastive losses): each process computes on its part of
    the global batch, and sees the examples of all in what this returns. Call
    it in a step: in a layer's or a model's `call`, in `compute_loss`, in a
    `train_step` or in `strategy.run`. Every process calls it as often.

    With x_r the rows of rank r and L_s the loss of which rank s takes the
    gradient, the gradient of x_r is

        sum over s of dL_s / dx_r

    so that a loss of all rows, by a Keras loss object, has the loss and the
    gradients of one process. A loss by plain operations is divided by
    `strategy.size`, as any in a step of your own.

    Args:
        x: tensor or array `(rows, ...)`, the rows of this process; ranks may
            have different numbers of rows.

    Returns:
        Tensor `(rows of all ranks, ...)`, equal on all ranks: each step sends
        `(size - 1) * rows` rows from each process. `x` in one process. A
        process without examples adds no rows.

    Raises:
        ValueError: if `x` is no tensor with rows, or of another dtype than
            numbers and bools; in a model in stages.

    Example:

    >>> import tensorflow as tf
    >>> gather_batch(tf.constant([[1.0, 2.0]])).shape  # one process
    TensorShape([1, 2])

    References:
        arXiv:1808.02621, 3.1 (the loss of the global batch).
    """
    expected = (
        "a tensor or array `(rows, ...)` of numbers or bools, in a layer's or "
        "a model's `call` or in a step"
    )
    is_other = isinstance(x, (tf.RaggedTensor, tf.SparseTensor))
    checks.check(not is_other, "x", x, expected)
    x = checks.tensor("x", x, expected)
    is_sent = x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_bool
    checks.check(is_sent and x.shape.rank != 0, "x", x, expected)
    strategy = tf.distribute.get_strategy()
    if hasattr(strategy, "stages_of_ranks") and strategy.size > 1:
        raise ValueError(
            "`ks.gather_batch` needs all processes, and of a model in stages "
            "those of one stage alone call a layer. Received: a call under a "
            f"{type(strategy).__name__}. Train under `ks.HybridStrategy`, or "
            "leave it out."
        )
    communicator = getattr(strategy, "collectives", None)
    communicator = communicator or collectives.current()
    is_whole = communicator.size == 1 or bool(_gathered)
    if is_whole or keras_scopes.in_symbolic_scope():
        return x
    sent = tf.cast(x, tf.int32) if x.dtype.is_bool else x
    # An id outside of a table is found first, see `exchange.pull.in_turn`.
    with tf.control_dependencies(order.held_sums()):
        sent = empty_parts.cut(sent)
        rows = communicator.all_gather(sent, name="gather_batch")
    return tf.cast(tf.ensure_shape(rows, [None, *x.shape[1:]]), x.dtype)
