"""Brings the gradients of all ranks together: one for each row, clipped."""

import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity.tables.exchange import split_gradient


class Update:
    """The aggregated gradient of one variable that the rule updates.

    `gradient` is dense, or `tf.IndexedSlices` without a row twice; `whole` is
    the model's variable, of which `variable` may be a partition.
    """

    def __init__(self, variable, gradient, whole):
        self.variable = variable
        self.gradient = gradient
        self.whole = whole

    @property
    def values(self):
        if isinstance(self.gradient, tf.IndexedSlices):
            return self.gradient.values
        return self.gradient


class Aggregation:
    """How the gradients of one model's variables are brought together.

    Args:
        variables: list of the model's variables.
        pieces: for each of them, the list of variables that the rule updates
            in its place: itself alone, or this rank's partitions of it.

    References:
        EuroSys 3.1 (each gradient's path), 4.3 (post-aggregation operations).
    """

    def __init__(self, variables, pieces):
        self._places = {
            id(variable): (variable, of_variable)
            for variable, of_variable in zip(variables, pieces, strict=True)
        }
        # Tables of which this rank may hold no row at all.
        self._spread = [
            variable
            for variable, of_variable in self._places.values()
            if of_variable[0] is not variable
        ]

    @property
    def places(self):
        """List of `(variable, pieces)`."""
        return list(self._places.values())

    def pieces_of(self, variable):
        """What the rule updates in its place; None if it is not known."""
        return self._places.get(id(variable), (None, None))[1]

    def is_spread(self, variable):
        return self.pieces_of(variable)[0] is not variable

    def aggregate(self, grads, variables, updates_rows_of):
        """The sum of the ranks' gradients.

        Args:
            grads: list of this rank's gradients: tensors or
                `tf.IndexedSlices`; of a spread table, those of the rows that
                this rank owns, which have arrived already.
            variables: list of the model's variables they belong to.
            updates_rows_of: whether only the touched rows of a variable are
                updated; else its gradient becomes dense.

        Returns:
            List of `Update`, one for each piece that has rows here.
        """
        communicator = collectives.current()
        updates = []
        dense = []
        for gradient, variable in zip(grads, variables, strict=True):
            is_slices = isinstance(gradient, tf.IndexedSlices)
            if self.is_spread(variable):
                updates.extend(self._split(variable, gradient))
                continue
            if is_slices and communicator.size > 1:
                gradient = _gather_slices(communicator, gradient, variable)
            update = Update(variable, gradient, variable)
            updates.append(update)
            if not is_slices:
                dense.append(update)
        if dense and communicator.size > 1:
            # One call: fused into few messages.
            reduced = communicator.all_reduce(
                [update.gradient for update in dense], name="optimizer/dense"
            )
            for update, gradient in zip(dense, reduced, strict=True):
                update.gradient = gradient
        for update in updates:
            if isinstance(update.gradient, tf.IndexedSlices):
                update.gradient = _one_gradient_per_row(
                    update, updates_rows_of(update.variable)
                )
        return updates

    def _split(self, variable, gradient):
        if not isinstance(gradient, tf.IndexedSlices):
            raise ValueError(
                f"The gradient of the sharded table {variable} must be the "
                "tf.IndexedSlices that the gradient tape gives. "
                f"Received: {gradient}."
            )
        slices = split_gradient(variable.table, gradient)
        return [
            Update(piece, of_piece, variable)
            for piece, of_piece in zip(
                self.pieces_of(variable), slices, strict=True
            )
            if piece.num_rows > 0
        ]

    def is_finite(self, updates):
        """Whether all gradients are, on all ranks: a bool tensor."""
        finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(u.values)) for u in updates]
        )
        communicator = collectives.current()
        if communicator.size > 1 and self._spread:
            (votes,) = communicator.all_reduce(
                [tf.cast(finite, tf.int32)], op="min", name="optimizer/finite"
            )
            finite = votes > 0
        return finite

    def clip(self, rule, grads, updates):
        """Clips aggregated gradients as a Keras optimizer is told to.

        Args:
            rule: the Keras optimizer.
            grads: list of tensors, the values to clip.
            updates: list of the `Update` of each.

        Returns:
            List of tensors.
        """
        if rule.clipvalue and rule.clipvalue > 0:
            limit = rule.clipvalue
            return [tf.clip_by_value(g, -limit, limit) for g in grads]
        if rule.clipnorm and rule.clipnorm > 0:
            squares = self.squared_norms(grads, updates)
            return [
                _scale_to(g, squares[id(u.whole)], rule.clipnorm)
                for g, u in zip(grads, updates, strict=True)
            ]
        if rule.global_clipnorm and rule.global_clipnorm > 0:
            squares = self.squared_norms(grads, updates)
            total = tf.add_n(list(squares.values()))
            return [_scale_to(g, total, rule.global_clipnorm) for g in grads]
        return grads

    def squared_norms(self, grads, updates):
        """Squared norm of each model variable's gradient, over all owners.

        Returns:
            Dictionary from the `id` of each of the model's variables.
        """
        squares = {id(v): tf.zeros([]) for v in self._spread}
        for gradient, update in zip(grads, updates, strict=True):
            square = tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32)))
            key = id(update.whole)
            squares[key] = squares[key] + square if key in squares else square
        spread = [id(v) for v in self._spread]
        communicator = collectives.current()
        if spread and communicator.size > 1:
            # One number for each table, all in one message (EuroSys 4.3).
            (summed,) = communicator.all_reduce(
                [tf.stack([squares[key] for key in spread])],
                name="optimizer/norms",
            )
            squares.update(zip(spread, tf.unstack(summed), strict=True))
        return squares


def _gather_slices(communicator, slices, variable):
    """IndexedSlices of all ranks, one after the other."""
    name = f"optimizer/rows/{variable.path}"
    return tf.IndexedSlices(
        communicator.all_gather(slices.values, name=f"{name}/values"),
        communicator.all_gather(slices.indices, name=f"{name}/ids"),
        slices.dense_shape,
    )


def _one_gradient_per_row(update, is_by_rows):
    slices = update.gradient
    if is_by_rows:
        rows, index = tf.unique(slices.indices)
        values = tf.math.unsorted_segment_sum(
            slices.values, index, tf.size(rows)
        )
        return tf.IndexedSlices(values, rows, slices.dense_shape)
    return tf.math.unsorted_segment_sum(
        slices.values, slices.indices, update.variable.shape[0]
    )


def _scale_to(gradient, squared_norm, limit):
    norm = tf.sqrt(squared_norm)
    scale = limit / tf.maximum(norm, limit)
    return gradient * tf.cast(scale, gradient.dtype)
