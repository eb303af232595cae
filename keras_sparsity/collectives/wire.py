"""The dtype in which a tensor travels, if an engine lacks its own."""

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Wire:
    """A conversion to a dtype that an engine carries, and back.

    Args:
        source: The tensor's own dtype.
        dtype: The dtype that travels.
        bitcast: Whether the bits stay and only the dtype's name changes.
    """

    source: tf.DType
    dtype: tf.DType
    bitcast: bool = False

    def num_bytes(self, elements):
        """Bytes of so many elements."""
        return elements * self.dtype.size

    def encode(self, tensor):
        if self.source == self.dtype:
            return tensor
        return (tf.bitcast if self.bitcast else tf.cast)(tensor, self.dtype)

    def decode(self, tensor, row_shape=None):
        del row_shape  # which `RowWire.decode` needs
        if self.source == self.dtype:
            return tensor
        return (tf.bitcast if self.bitcast else tf.cast)(tensor, self.source)

    def carry(self, tensor, send, *args, **kwargs):
        """Sends a tensor: `send(encoded, *args, **kwargs)`, decoded."""
        return self.decode(send(self.encode(tensor), *args, **kwargs))


def wires(carried, casts=None, bitcasts=None):
    """A function from a dtype to its `Wire` on an engine.

    Args:
        carried: Names of the dtypes that travel unchanged.
        casts: dict from a dtype's name to that of its cast.
        bitcasts: dict from a dtype's name to that of its bitcast.
    """
    found = {}
    for targets, bitcast in (
        ({name: name for name in carried}, False),
        (casts or {}, False),
        (bitcasts or {}, True),
    ):
        for source, target in targets.items():
            source, target = tf.as_dtype(source), tf.as_dtype(target)
            found[source] = Wire(source, target, bitcast)
    return found.__getitem__
