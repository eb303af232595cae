"""Gradients that wait for some steps before they are applied."""

import tensorflow as tf

from keras_sparsity._tf.own_variable import OwnVariable
from keras_sparsity.update.compensation import compensated_update, weights_of


class Delay:
    """Has the gradients of a step applied some steps later.

    The gradient of step t is computed from the weights before the updates by
    the gradients of steps t - s to t - 1: those of step t - s - 1's update.

    Args:
        num_steps: s, at least 1.
        compensation: the strength of `compensated`; None: gradients are applied
            as they are.

    References:
        Stale synchronous parallel training (Ho et al., NIPS 2013), with a
        delay that is always the largest.
    """

    def __init__(self, num_steps, compensation=None):
        self.num_steps, self._compensation = num_steps, compensation
        # Whether each of the last steps left gradients, the oldest first.
        self._is_waiting = [
            OwnVariable(False, tf.bool) for _ in range(num_steps)
        ]
        self._queues, self._weights = [], []
        self._updates = None  # the last ones, whose gradients are replaced

    def step(self, updates, apply):
        """Keeps the gradients of a step, and applies those that are due.

        Args:
            updates: list of `Update`, of the same variables in each step.
            apply: function of such a list, called with older gradients.
        """
        if not self._queues:
            self._queues = [_queue(u, self.num_steps) for u in updates]
            if self._compensation is not None:
                self._weights = [_weights(u, self.num_steps) for u in updates]
        self._check_is_same(updates)
        self._updates = updates
        oldest = [
            queue.exchange(update.gradient)
            for queue, update in zip(self._queues, updates, strict=True)
        ]
        read = []
        if self._compensation is not None:
            read = [
                kept.exchange(weights_of(update))
                for kept, update in zip(self._weights, updates, strict=True)
            ]
        self._apply_if_due(oldest, read, True, apply)

    def apply_next(self, apply):
        """Applies the oldest gradients that wait, if any do.

        Args:
            apply: as for `step`.
        """
        oldest = [queue.exchange(queue.nothing) for queue in self._queues]
        read = [kept.exchange(kept.nothing) for kept in self._weights]
        self._apply_if_due(oldest, read, False, apply)

    def is_waiting(self):
        """Whether gradients wait. Not in a traced function."""
        return any(variable.numpy() for variable in self._is_waiting)

    def emptied(self):
        """A `Delay` for other variables."""
        self.check_is_empty()
        return Delay(self.num_steps, self._compensation)

    def check_is_empty(self):
        """Raises ValueError if gradients wait, before tables are moved."""
        if self.is_waiting():
            raise ValueError(
                "Tables cannot move while gradients of their rows wait to be "
                "applied. Move them between calls of `fit`: under "
                "`synchronous=False` nothing waits at the end of an epoch."
            )

    def clear(self):
        """Forgets all gradients, as after a step that has failed."""
        for variable in self._is_waiting:
            variable.assign(False)

    def _apply_if_due(self, oldest, read, leaves_gradients, apply):
        is_due = _shifted(self._is_waiting, tf.constant(leaves_gradients))

        def due():
            updates = [
                update.replaced(queue.whole(gradient))
                for update, queue, gradient in zip(
                    self._updates, self._queues, oldest, strict=True
                )
            ]
            if self._compensation is not None:
                updates = [
                    compensated_update(update, self._compensation, weights)
                    for update, weights in zip(updates, read, strict=True)
                ]
            apply(updates)
            return True

        tf.cond(is_due, due, lambda: False)

    def _check_is_same(self, updates):
        found = [queue.kind for queue in self._queues]
        kinds = [_kind(update) for update in updates]
        if found != kinds:
            raise ValueError(
                "Under `synchronous=False` each step has gradients of the "
                "same variables. Received gradients of other ones, or of "
                f"other shapes: {kinds} after {found}. Train all variables in "
                "each step, or compile the model again."
            )


def _kind(update):
    """`(path, shape)` of a variable, and whether its gradient is of rows."""
    is_of_rows = isinstance(update.gradient, tf.IndexedSlices)
    return update.variable.path, tuple(update.variable.shape), is_of_rows


def _queue(update, num_steps):
    is_of_rows = isinstance(update.gradient, tf.IndexedSlices)
    return (_Slices if is_of_rows else _Dense)(update, num_steps)


class _Kept:
    """Tensors of the last steps: of a variable's rank, of any shape."""

    def __init__(self, variable, dtype, num_steps):
        rank = len(variable.shape)
        with tf.init_scope():
            self.nothing = tf.zeros([0] * rank, dtype)
        anything = tf.TensorShape([None] * rank)
        self._kept = [
            OwnVariable(self.nothing, dtype, anything) for _ in range(num_steps)
        ]

    def exchange(self, tensor):
        """Keeps a tensor; returns the oldest one, or `nothing`."""
        return _shifted(self._kept, tensor)


def _weights(update, num_steps):
    return _Kept(update.variable, update.variable.dtype, num_steps)


class _Dense(_Kept):
    """The gradients of a variable, of the last steps."""

    def __init__(self, update, num_steps):
        self.kind = _kind(update)
        self._shape = update.variable.shape
        super().__init__(update.variable, update.gradient.dtype, num_steps)

    def whole(self, gradient):
        return tf.ensure_shape(gradient, self._shape)


class _Slices:
    """The gradients of a variable's rows, of the last steps."""

    def __init__(self, update, num_steps):
        self.kind = _kind(update)
        gradient = update.gradient
        row_shape = update.variable.shape[1:]
        with tf.init_scope():
            self.nothing = tf.IndexedSlices(
                tf.zeros([0, *row_shape], gradient.values.dtype),
                tf.zeros([0], gradient.indices.dtype),
            )
            self._dense_shape = tf.constant(update.variable.shape)

        def kept(nothing, shape):
            return [
                OwnVariable(nothing, nothing.dtype, tf.TensorShape(shape))
                for _ in range(num_steps)
            ]

        self._values = kept(self.nothing.values, [None, *row_shape])
        self._indices = kept(self.nothing.indices, [None])

    def exchange(self, gradient):
        """Keeps a gradient; returns the oldest one, or `nothing`."""
        return tf.IndexedSlices(
            _shifted(self._values, gradient.values),
            _shifted(self._indices, gradient.indices),
            self._dense_shape,
        )

    def whole(self, gradient):
        return gradient


def _shifted(variables, newest):
    """Moves values along variables; returns the one that comes out.

    Assigning a value that was read copies no bytes.
    """
    values = [variable.read() for variable in variables]
    with tf.control_dependencies(values):
        for variable, value in zip(
            variables, [*values[1:], newest], strict=True
        ):
            variable.assign(value)
    return values[0]
