"""Lets a user's function change aggregated gradients."""

import tensorflow as tf

_HOW_TO_CHANGE_ROWS = (
    " Change the values only: "
    "`tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)`."
)


def transform(function, updates):
    """Lets a user's function change the gradients.

    Args:
        function: `function(gradients, variables) -> gradients`.
        updates: list of `Update`, one for each of the model's variables, in
            which each row occurs once.

    Returns:
        List of `Update`.

    References:
        arXiv 3.1 (reading aggregated gradients).
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
            "`transform_gradients` must return one gradient for each that it "
            f"is given, {len(gradients)}. Received: {len(changed)}. To leave "
            "one out, return zeros in its place."
        )
    return [
        update.replaced(_checked(update, gradient))
        for gradient, update in zip(changed, updates, strict=True)
    ]


def _checked(update, changed):
    """A changed gradient, if it is of the kind of the given one."""
    gradient = update.gradient
    if not isinstance(gradient, tf.IndexedSlices):
        _check_kind(update, changed, tf.Tensor, "a tensor")
        _check_shape(update, changed, gradient)
        return changed
    _check_kind(
        update,
        changed,
        tf.IndexedSlices,
        "tf.IndexedSlices",
        _HOW_TO_CHANGE_ROWS,
    )
    _check_shape(update, changed.values, gradient.values)
    with tf.control_dependencies(_same_rows(update, changed)):
        values = tf.identity(changed.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def _check_kind(update, changed, kind, expected, hint=""):
    if not isinstance(changed, kind):
        raise ValueError(
            "`transform_gradients` must return gradients of the kind that it "
            f"is given. For the variable {update.variable.path}, received: "
            f"{changed!r}. Expected: {expected}.{hint}"
        )


def _check_shape(update, new, old):
    if new.dtype != old.dtype or not new.shape.is_compatible_with(old.shape):
        raise ValueError(
            "`transform_gradients` must return gradients of the shape and "
            "dtype that it is given. For the variable "
            f"{update.variable.path}, received: {new.shape}, "
            f"{new.dtype.name}. Expected: {old.shape}, {old.dtype.name}."
        )


def _same_rows(update, changed):
    """Operations that fail if a function has changed the rows' indices."""
    gradient = update.gradient
    if changed.indices is gradient.indices:
        return []
    check = tf.debugging.assert_equal(
        tf.cast(changed.indices, gradient.indices.dtype),
        gradient.indices,
        "`transform_gradients` must leave the rows of "
        f"{update.variable.path} as they are, in their order."
        + _HOW_TO_CHANGE_ROWS,
    )
    return [] if check is None else [check]
