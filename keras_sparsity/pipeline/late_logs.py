"""Logs that all ranks show alike, some steps late."""

import tensorflow as tf


class LateLogs:
    """The vectors of logs that a stage knows and does not show yet.

    They travel from the last stage with gradients. All stages show those of
    the mini-batch that has come back to the first one: N - 1 steps ago, or
    4 (N - 1) with `messages_ahead`.

    Args:
        number: the steps between knowing and showing them.
    """

    def __init__(self, number):
        self._number, self._rows = number, None

    def push(self, row):
        """Takes the newest vector; returns the one to show, 0 at first."""
        if self._rows is None:
            with tf.init_scope():
                zeros = tf.zeros([self._number + 1, row.shape[0]])
                self._rows = tf.Variable(zeros, trainable=False)
        rows = tf.concat([self._rows[1:], row[None]], 0)
        self._rows.assign(rows)
        return rows[0]

    def clear(self):
        """Forgets all; eagerly."""
        if self._rows is not None:
            self._rows.assign(tf.zeros_like(self._rows))
