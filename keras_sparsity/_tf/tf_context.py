"""TensorFlow's eager context. Checked on TensorFlow 2.16 to 2.21."""

import functools

import tensorflow as tf

from keras_sparsity._tf import contexts


def _context_module():
    from tensorflow.python.eager import context

    return context


def anonymous_name():
    """The `shared_name` of a resource that lives as long as it is used.

    `context.anonymous_name()`.
    """
    return _context_module().anonymous_name()


def abort_collectives(message):
    """Makes all running and later native collectives fail with `message`.

    `context().abort_collective_ops`.
    """
    context = _context_module().context()
    context.abort_collective_ops(tf.errors.ABORTED, message)


def heartbeats_may_be_missed(seconds):
    """While entered, collectives are configured with this heartbeat timeout.

    After so many seconds without a heartbeat (10 by default) a process counts
    as lost.

    `context().configure_coordination_service(heartbeat_timeout_in_ms=...)`,
    which `MultiWorkerMirroredStrategy` calls.
    """
    context = _context_module().context()
    return contexts.own_attributes(
        context,
        configure_coordination_service=functools.partial(
            context.configure_coordination_service,
            heartbeat_timeout_in_ms=int(seconds * 1000),
        ),
    )
