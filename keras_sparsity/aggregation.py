"""Brings the gradients of all ranks together: one for each row, clipped."""

import functools

import tensorflow as tf

from keras_sparsity import (
    architectures,
    collectives,
    empty_parts,
    servers,
    touches,
)
from keras_sparsity.tables.addresses import narrowest
from keras_sparsity.tables.exchange import split_gradient
from keras_sparsity.tables.table_variable import TableVariable

_DENSE = "optimizer/dense"
_HOW_TO_CHANGE_ROWS = (
    " Change the values only: "
    "`tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)`."
)


class Update:
    """The aggregated gradient of one variable that the rule updates.

    `gradient` is dense, or `tf.IndexedSlices` by the rows of `variable`;
    `whole` is the model's variable, of which `variable` may be a partition.
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
        dense, sparse: `"mean"` or `"sum"`, for dense gradients and for those
            that are rows, see `ks.HybridOptimizer`.

    References:
        EuroSys 3.1 (each gradient's path), 4.3 (post-aggregation operations).
    """

    def __init__(self, variables, pieces, dense="mean", sparse="mean"):
        self._places = {
            id(variable): (variable, of_variable)
            for variable, of_variable in zip(variables, pieces, strict=True)
        }
        self._scales_dense = dense == "sum"
        self._scales_sparse = sparse == "sum"
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

    def aggregate(self, grads, variables, needs_rows=lambda variable: False):
        """One gradient for each of the model's variables, of all ranks.

        Args:
            grads: list of this rank's gradients: tensors or
                `tf.IndexedSlices`; of a spread table, those of the rows that
                this rank owns, which have arrived already.
            variables: list of the model's variables they belong to.
            needs_rows: whether of a variable, given to this function, only
                the touched rows may be updated.

        Returns:
            List of `Update`. Rows may occur twice.
        """
        communicator = collectives.current()
        architecture = architectures.of()
        updates = []
        dense = []
        served = []
        touched = []
        ended = []
        rows = set()
        for gradient, variable in zip(grads, variables, strict=True):
            is_slices = isinstance(gradient, tf.IndexedSlices)
            if is_slices and not self.is_spread(variable):
                gradient = empty_parts.cut_slices(gradient)
            if is_slices:
                rows.add(id(variable))
            if self.is_spread(variable):
                _check_is_slices(gradient, variable)
                ended.append((variable, None, None))
            elif is_slices and is_all_reduced(variable):
                ended.append((variable, gradient.indices, None))
                if needs_rows(variable):
                    touched.append((len(updates), _touched(gradient)))
                gradient = _dense(gradient, variable)
                is_slices = False
            elif is_slices:
                counts = None
                if communicator.size > 1:
                    with tf.name_scope("all_gather"):
                        gradient, counts = _gather_slices(
                            communicator,
                            gradient,
                            variable,
                            architecture.merges,
                        )
                ended.append((variable, gradient.indices, counts))
            update = Update(variable, gradient, variable)
            updates.append(update)
            if is_slices:
                continue
            by_servers = architecture.dense == "ps" and id(variable) not in rows
            (served if by_servers else dense).append(update)
        touches.end_step(ended)
        if dense and communicator.size > 1:
            with tf.name_scope("all_reduce"):
                reduced = _all_reduce(
                    communicator,
                    [update.gradient for update in dense]
                    + [is_touched for _, is_touched in touched],
                )
            for update in dense:
                update.gradient = reduced.pop(0)
            for (place, _), is_touched in zip(touched, reduced, strict=True):
                updates[place].gradient = _rows_of(
                    updates[place].gradient, is_touched
                )
        if served and communicator.size > 1:
            summed = servers.summed(
                communicator,
                empty_parts.selected([update.gradient for update in served]),
                in_one_message=architecture.merges,
            )
            for update, gradient in zip(served, summed, strict=True):
                update.gradient = gradient
        for update in updates if communicator.size > 1 else ():
            is_of_rows = id(update.variable) in rows
            if self._scales_sparse if is_of_rows else self._scales_dense:
                # Each rank's loss has its share of the global batch already.
                update.gradient = tf.math.scalar_mul(
                    communicator.size, update.gradient
                )
        return updates

    def by_piece(self, updates, updates_rows_of):
        """What the rule updates: pieces, with one gradient for each row.

        Args:
            updates: list of `Update`, one for each of the model's variables.
            updates_rows_of: whether only the touched rows of a variable are
                updated; else its gradient becomes dense.

        Returns:
            List of `Update`, one for each piece that has rows here.
        """
        pieces = []
        for update in updates:
            if self.is_spread(update.whole):
                pieces.extend(self._split(update))
            else:
                pieces.append(update)
        for piece in pieces:
            if isinstance(piece.gradient, tf.IndexedSlices):
                make = _dense
                if updates_rows_of(piece.variable):
                    make = _each_row_once
                piece.gradient = make(piece.gradient, piece.variable)
        return pieces

    def _split(self, update):
        table = update.whole.table
        return [
            Update(piece, of_piece, update.whole)
            for piece, of_piece in zip(
                table.partitions,
                split_gradient(table, update.gradient),
                strict=True,
            )
            if piece.num_rows > 0
        ]

    def transform(self, function, updates):
        """Lets a user's function change the gradients.

        Args:
            function: `function(gradients, variables) -> gradients`.
            updates: list of `Update`, one for each of the model's variables,
                as `each_row_once` gives them.

        Returns:
            List of `Update`.
        """
        gradients = [update.gradient for update in updates]
        changed = function(list(gradients), [u.variable for u in updates])
        if not isinstance(changed, (list, tuple)):
            raise ValueError(
                "`transform_gradients` must return the list of gradients. "
                f"Received: {changed!r} (of type {type(changed).__name__})."
            )
        if len(changed) != len(gradients):
            raise ValueError(
                "`transform_gradients` must return one gradient for each that "
                f"it is given, {len(gradients)}. Received: {len(changed)}. To "
                "leave one out, return zeros in its place."
            )
        return [
            Update(u.variable, _like(u, gradient), u.whole)
            for gradient, u in zip(changed, updates, strict=True)
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


def _all_reduce(communicator, gradients):
    """The sums over the ranks, in the dtypes in which they are to travel.

    In several messages, none of which waits for the gradients of the others.
    """
    of_dtypes = {}
    for place, gradient in enumerate(gradients):
        of_dtypes.setdefault(gradient.dtype, []).append(place)
    results = [None] * len(gradients)
    for dtype, places in of_dtypes.items():
        wire = architectures.wire(dtype)
        reduce = communicator.all_reduce
        if wire.dtype != wire.source:
            # A ring would add up in the narrow dtype, servers in the wide one.
            reduce = functools.partial(_by_servers, communicator)
        of_dtype = [gradients[place] for place in places]
        for number, bucket in enumerate(architectures.buckets(of_dtype)):
            reduced = reduce(
                empty_parts.selected([of_dtype[i] for i in bucket]),
                name=f"{_DENSE}/{dtype.name}/{number}",
            )
            for i, value in zip(bucket, reduced, strict=True):
                results[places[i]] = value
    return results


def _by_servers(communicator, gradients, name):
    return servers.summed(communicator, gradients, role=f"{name}/")


def _gather_slices(communicator, slices, variable, merges):
    """IndexedSlices of all ranks, one after the other.

    If it `merges`, each row of a rank once, whatever its batch repeats. Before
    the indices of each rank goes one that none has, so that what counts
    touches knows whose they are. In every step: a message of its own, in the
    steps that are sampled, would have ranks wait for each other that do not
    agree on these.

    Returns:
        The slices, and a function that gives their number of each rank.
    """
    name = f"optimizer/rows/{variable.path}"
    if merges:
        slices = _each_row_once(slices, variable)
    dtype = narrowest(variable.shape[0])
    mark = tf.constant([dtype.max], dtype)
    values = architectures.wire(slices.values.dtype).carry(
        slices.values, communicator.all_gather, name=f"{name}/values"
    )
    marked = communicator.all_gather(
        tf.concat([mark, tf.cast(slices.indices, dtype)], axis=0),
        name=f"{name}/ids",
    )
    marked = tf.cast(marked, slices.indices.dtype)
    is_index = tf.not_equal(marked, dtype.max)
    indices = tf.boolean_mask(marked, is_index)

    def counts():
        starts = tf.where(tf.logical_not(is_index))[:, 0]
        ends = tf.concat([starts[1:], [tf.size(marked, tf.int64)]], axis=0)
        return ends - starts - 1

    return tf.IndexedSlices(values, indices, slices.dense_shape), counts


def is_all_reduced(variable, strategy=None):
    """Whether a gradient that is rows is summed as a dense one.

    Args:
        variable: one that every rank has whole.
        strategy: by default the one that is entered.
    """
    if collectives.current().size == 1:
        return False
    if isinstance(variable, TableVariable):
        return variable.table.architecture == "allreduce"
    return architectures.of_rows(variable, strategy) == "allreduce"


def _touched(slices):
    """How often each row of a variable has a gradient."""
    ones = tf.ones_like(slices.indices, slices.values.dtype)
    num_rows = slices.dense_shape[0]
    return tf.math.unsorted_segment_sum(ones, slices.indices, num_rows)


def _rows_of(gradient, is_touched):
    """`tf.IndexedSlices` of the rows of a dense gradient that were touched."""
    rows = tf.where(is_touched > 0)[:, 0]
    shape = tf.shape(gradient, tf.int64)
    return tf.IndexedSlices(tf.gather(gradient, rows), rows, shape)


def _check_is_slices(gradient, variable):
    if not isinstance(gradient, tf.IndexedSlices):
        raise ValueError(
            f"The gradient of the sharded table {variable} must be the "
            "tf.IndexedSlices that the gradient tape gives. "
            f"Received: {gradient}."
        )


def each_row_once(updates):
    """The same updates, with the gradients of repeated rows added up."""
    return [
        Update(u.variable, _each_row_once(u.gradient, u.variable), u.whole)
        if isinstance(u.gradient, tf.IndexedSlices)
        else u
        for u in updates
    ]


def _each_row_once(slices, variable):
    del variable
    rows, index = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, index, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def _dense(slices, variable):
    return tf.math.unsorted_segment_sum(
        slices.values, slices.indices, variable.shape[0]
    )


def _like(update, changed):
    """What a user's function made of a gradient, if it is of its kind."""
    gradient = update.gradient
    is_slices = isinstance(gradient, tf.IndexedSlices)
    if not isinstance(changed, tf.IndexedSlices if is_slices else tf.Tensor):
        expected = "tf.IndexedSlices" if is_slices else "a tensor"
        raise ValueError(
            "`transform_gradients` must return gradients of the kind that it "
            f"is given. For the variable {update.variable.path}, received: "
            f"{changed!r}. Expected: {expected}."
            + _HOW_TO_CHANGE_ROWS
            * is_slices
        )
    new, old = (
        (changed.values, gradient.values) if is_slices else (changed, gradient)
    )
    if new.dtype != old.dtype or not new.shape.is_compatible_with(old.shape):
        raise ValueError(
            "`transform_gradients` must return gradients of the shape and "
            "dtype that it is given. For the variable "
            f"{update.variable.path}, received: {new.shape}, "
            f"{new.dtype.name}. Expected: {old.shape}, {old.dtype.name}."
        )
    if not is_slices:
        return changed
    checks = []
    if changed.indices is not gradient.indices:
        checks = [
            tf.debugging.assert_equal(
                tf.cast(changed.indices, gradient.indices.dtype),
                gradient.indices,
                "`transform_gradients` must leave the rows of "
                f"{update.variable.path} as they are, in their order."
                + _HOW_TO_CHANGE_ROWS,
            )
        ]
    with tf.control_dependencies([c for c in checks if c is not None]):
        values = tf.identity(changed.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def _scale_to(gradient, squared_norm, limit):
    norm = tf.sqrt(squared_norm)
    scale = limit / tf.maximum(norm, limit)
    return gradient * tf.cast(scale, gradient.dtype)
