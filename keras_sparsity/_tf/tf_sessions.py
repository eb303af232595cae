"""Calls of a session. Checked on TensorFlow 2.16 to 2.21."""

import numpy as np
import tensorflow as tf


def function_of(session, feeds, fetches, targets=()):
    """A function of the feeds' values; returns a list of the fetches'.

    `Session._do_run`: `run` and what `make_callable` returns look for all feeds
    and fetches in the graph again with each call, for four times as long as a
    call takes here.

    Args:
        session: a `tf.compat.v1.Session`.
        feeds: list of tensors.
        fetches: list of tensors, none twice, and none of the feeds.
        targets: list of operations, or tensors, that run with them.
    """
    refs = [feed.ref() for feed in feeds]
    dtypes = [feed.dtype.as_numpy_dtype for feed in feeds]
    operations = [getattr(target, "op", target) for target in targets]
    fetches = list(fetches)

    def run(*values):
        values = map(np.asarray, values, dtypes)
        fed = dict(zip(refs, values, strict=True))
        return session._do_run(None, operations, fetches, fed, None, None)

    return run


def as_function(result):
    """The result of `tf.cond`, whose branches run as functions.

    `Operation._set_attr`: TensorFlow puts the operations of branches among the
    others, unless told otherwise. It begins none of these any more when a call
    is cancelled, but ends a function that it has begun.
    """
    condition = result.op.inputs[0].op
    lowers = tf.compat.v1.AttrValue(b=False)
    condition._set_attr("_lower_using_switch_merge", lowers)
    return result
