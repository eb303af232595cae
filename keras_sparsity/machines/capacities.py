"""Lengths to which the native engine pads: 8 to an octave.

At most 12.5 % of a message is padding to the next one. A new capacity costs
0.2 ms once (2 processes, loopback).
"""

import numpy as np

# In elements. Integers, as all machines must compute the same ones.
CAPACITIES = np.array(
    [step << octave for octave in range(38) for step in range(8, 16)], np.int64
)


def capacity(length):
    """The padded length of a part of `length` elements, one of `CAPACITIES`.

    Example:

    >>> [capacity(length) for length in (0, 8, 17, 570)]
    [8, 8, 18, 576]
    """
    octave = max(0, int(length).bit_length() - 4)
    return max(8, -(-int(length) >> octave)) << octave
