"""Many tensors in few messages: one per dtype that travels."""

import tensorflow as tf


def fused(tensors, wires, send):
    """Sends `tensors` as one flat message per travelling dtype.

    Args:
        tensors: List of tensors of any shapes.
        wires: The `Wire` of each.
        send: Function `(flat message, its tensors) -> flat message` of the
            same length, called once per dtype in order of appearance.

    Returns:
        The received tensors, of the shapes and dtypes of `tensors`.
    """
    messages = {}
    for index, wire in enumerate(wires):
        messages.setdefault(wire.dtype, []).append(index)
    arrived = [None] * len(tensors)
    for indices in messages.values():
        parts = [
            tf.reshape(wires[index].encode(tensors[index]), [-1])
            for index in indices
        ]
        message = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        message = send(message, [tensors[index] for index in indices])
        for index, part in zip(
            indices, _separated(message, parts), strict=True
        ):
            part = wires[index].decode(part)
            arrived[index] = _shaped_like(part, tensors[index])
    return arrived


def _separated(message, parts):
    if len(parts) == 1:
        return [message]
    sizes = [part.shape[0] for part in parts]
    if None in sizes:
        sizes = tf.stack([tf.size(part) for part in parts])
    return tf.split(message, sizes, num=len(parts))


def _shaped_like(flat, tensor):
    if tensor.shape.is_fully_defined():
        return tf.reshape(flat, tensor.shape)
    shaped = tf.reshape(flat, tf.shape(tensor))
    shaped.set_shape(tensor.shape)
    return shaped
