"""Finds inputs that differ between the ranks.

Every rank cuts its part from what should be the same batch. A shuffle or a
generator without a common seed gives each rank other batches; examples are
then trained on twice or never, and nothing else would tell.

A number for each batch is computed where it passes through the input
pipeline, and combined with those of all batches before it. The latest are
kept in a small table, whose rows the ranks compare from time to time
(`check_inputs`): a difference in any batch so far changes the last row. A few
earlier ones are kept, too, for ranks that have not read as far. So
the pipeline needs no messages, which could wait for each other, reads
nothing twice (generators often cannot), and later differences are found too.
"""

import itertools
import weakref

import numpy as np
import tensorflow as tf

# The latest batches that are remembered: more than a pipeline reads ahead.
_NUM_KEPT = 256
# And of the batches up to 1, 3, 7, 15, ... the last ones: of two ranks, the one
# that has read less has compared half of it at least.
_NUM_EARLIER = 64
# Of larger tensors so many elements are looked at, in equal distances.
# Measured on 2 cores, in the pipeline's threads: 0.1 ms for a batch of
# 64 x 20 floats.
_NUM_SAMPLED = 16384
# Odd numbers of 62 bits that mix well (any would do).
_FACTOR = 0x2545F4914F6CDD1D
_INCREMENT = 0x14057B7EF767814F

_alive = weakref.WeakValueDictionary()
_numbers = itertools.count()

_FIX = (
    "Every rank must read the same global batches in the same order: seed "
    "the shuffle (`keras.utils.set_random_seed(seed)` before the data is "
    "made, `dataset.shuffle(n, seed=seed)`) and the generators "
    "(`numpy.random.default_rng(seed)`, `torch.manual_seed(seed)` for a torch "
    "`DataLoader`), with the same seed on every rank, "
    "and read files in a sorted order. Draw random numbers inside of "
    "`dataset.map` by `tf.random.stateless_uniform` and the like, with seeds "
    "of the dataset's own (`tf.data.Dataset.random(seed=seed)`): other "
    "operations draw in the order of the parallel calls. A Python generator "
    "that goes on after an iteration has lost the batches that were read "
    "ahead, on each rank other ones: use a `tf.data.Dataset`."
)


def fingerprint(batch):
    """A number that identifies a batch; a scalar int64 tensor.

    Example:

    >>> one, other = fingerprint([1, 2]), fingerprint([2, 1])
    >>> bool(one == other)
    False
    """
    value = tf.constant(0, tf.int64)
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if leaf is not None and not isinstance(leaf, tf.experimental.Optional):
            leaf = tf.convert_to_tensor(leaf)
            if leaf.dtype not in (tf.variant, tf.resource):
                value = _mix(value, _hash(leaf))
    return value


class Fingerprints:
    """Notes the batches of one dataset on this rank."""

    def __init__(self, collectives):
        self._collectives = collectives
        self.number = next(_numbers)
        _alive[self.number] = self
        num_kept = _NUM_KEPT + _NUM_EARLIER
        with tf.device("CPU:0"):
            # Rows: number of the iteration, of the batch, value.
            self._kept = tf.Variable(
                tf.fill([num_kept, 3], tf.constant(-1, tf.int64)),
                trainable=False,
                name="fingerprints",
            )
            self._iterations = tf.Variable(
                tf.constant(0, tf.int64), trainable=False, name="iterations"
            )

    def note(self, dataset):
        """Notes `(element, fingerprint)` pairs; passes the elements on."""

        @tf.autograph.experimental.do_not_convert
        def note(state, pair):
            iteration, index, value = state
            element, fingerprint = pair
            iteration = tf.cond(
                index == 0,
                lambda: self._iterations.assign_add(1),
                lambda: iteration,
            )
            value = _mix(value, fingerprint)
            row = tf.stack([iteration, index, value])
            places = tf.stack([index % _NUM_KEPT, _NUM_KEPT + _log2(index + 1)])
            self._kept.scatter_update(tf.IndexedSlices([row, row], places))
            return (iteration, index + 1, value), element

        zero = tf.constant(0, tf.int64)
        # The dataset keeps `note`, which keeps this object, alive.
        return dataset.scan((zero, zero, zero), note)

    def latest(self):
        """dict from (iteration, batch) to the value up to that batch."""
        return {
            (int(iteration), int(index)): int(value)
            for iteration, index, value in self._kept.numpy()
            if iteration >= 0
        }


def check_inputs(collectives):
    """Compares the input of the ranks so far; call on all ranks.

    Raises:
        ValueError: on every rank, if any two read different batches.
    """
    if collectives.size == 1:
        return
    mine = {number: each.latest() for number, each in sorted(_alive.items())}
    everyone = collectives.gather_objects(mine, name="input/fingerprints")
    everyone = everyone[: collectives.num_workers]  # servers read nothing
    for number in sorted(set.intersection(*map(set, everyone))):
        check_alike({r: each[number] for r, each in enumerate(everyone)})


def check_alike(tables):
    """Raises ValueError if ranks have read different batches of a dataset.

    Args:
        tables: dict from a rank to its `Fingerprints.latest`.
    """
    for key in sorted(set().union(*tables.values())):
        read = {r: table[key] for r, table in tables.items() if key in table}
        if len(set(read.values())) > 1:
            raise ValueError(_message(key, read))


def _message(key, read):
    iteration, index = key
    lines = "\n".join(
        f"  rank {rank}: {np.uint64(value % 2**64):016x}"
        for rank, value in read.items()
    )
    return (
        "The ranks read different input: their global batches differ at "
        f"batch {index} (counted from 0) of iteration {iteration} or before. "
        f"Fingerprints of the batches up to it:\n{lines}\n{_FIX}"
    )


def _log2(number):
    """The largest power of 2 that is not larger, as its exponent."""
    powers = tf.constant([2**i for i in range(_NUM_EARLIER - 1)], tf.int64)
    is_reached = tf.cast(powers <= number, tf.int64)
    return tf.reduce_sum(is_reached) - 1


def _mix(value, other):
    return tf.bitwise.bitwise_xor(value * _FACTOR + _INCREMENT, other)


def _hash(tensor):
    """A number from a tensor's values, their order and its shape."""
    shape = tf.shape(tensor, out_type=tf.int64)
    flat = tf.reshape(tensor, [-1])
    size = tf.size(flat, out_type=tf.int64)
    # Odd, so as not to meet the same column in every row.
    stride = tf.bitwise.bitwise_or(size // _NUM_SAMPLED, 1)
    bits = _bits(flat[::stride])
    order = tf.range(tf.size(bits, out_type=tf.int64)) * _FACTOR + _INCREMENT
    total = tf.reduce_sum(bits * order)
    axes = tf.range(1, tf.size(shape, out_type=tf.int64) + 1)
    return _mix(total, tf.reduce_sum(shape * (axes * _FACTOR)))


def _bits(flat):
    """The elements as int64, different ones as different numbers."""
    dtype = flat.dtype
    if dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(flat, 2**62)
    if dtype.is_complex:
        return _bits(tf.math.real(flat)) * 3 + _bits(tf.math.imag(flat))
    if dtype.is_floating:
        integer = {2: tf.int16, 4: tf.int32, 8: tf.int64}.get(dtype.size)
        if integer is None:  # 8 bits
            return _bits(tf.cast(flat, tf.float32))
        flat = tf.bitcast(flat, integer)
    return tf.cast(flat, tf.int64)
