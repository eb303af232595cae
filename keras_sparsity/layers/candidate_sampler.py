"""Random classes that a step's softmax is computed over."""

import math
import typing

import keras
import tensorflow as tf

from keras_sparsity._tf import checks

# Keras hands labels to a loss as float32, exact up to here.
_MAX_CLASSES = 2**24


class LogUniformSampler(keras.random.SeedGenerator):
    """Distinct classes, low ids more often: ids go from frequent to rare.

    Each try draws class k with probability

        p(k) = (log(k + 2) - log(k + 1)) / log(num_classes + 1)

    and classes that were drawn before are rejected, until there are
    `num_sampled`, as in `tf.random.log_uniform_candidate_sampler` with
    `unique=True`. That operation keeps its random state in the kernel, where
    a function that one rank traces again starts anew; here a seed and the
    count of samples so far decide, so all ranks draw the same classes, and a
    saved model goes on where it stopped.

    Args:
        num_classes: classes are 0 to `num_classes` - 1.
        num_sampled: number of classes in a sample.
        seed: int, or None for a random one.

    Example:

    >>> sampler = LogUniformSampler(100, 3, seed=0)
    >>> ids, num_tries = sampler.sample()
    >>> ids.shape
    TensorShape([3])
    """

    def __init__(self, num_classes, num_sampled, seed=None):
        super().__init__(seed=seed)
        self.num_classes = num_classes
        self.num_sampled = num_sampled
        # Unlike a dropout's: ranks must not get streams of their own.
        self.state.is_same_on_all_ranks = True

    def sample(self):
        """The next sample.

        Returns:
            ids: int64 `(num_sampled,)`, all different.
            num_tries: int64 scalar, how many draws it took.
        """
        return self._sample(self.next())

    def following(self):
        """What the next call of `sample` is going to return."""
        return self._sample(tf.identity(self.state.value))

    def _sample(self, seed):
        seed = tf.cast(seed, tf.int64)

        def is_short(block, draws):
            del block
            return tf.size(tf.unique(draws).y) < self.num_sampled

        def extend(block, draws):
            return block + 1, tf.concat([draws, self._draw(seed, block)], 0)

        # Most often the first block is enough.
        _, draws = tf.while_loop(
            is_short,
            extend,
            [tf.constant(1, tf.int64), self._draw(seed, 0)],
            shape_invariants=[tf.TensorShape([]), tf.TensorShape([None])],
        )
        ids, index = tf.unique(draws)  # in the order in which they came
        last = tf.argmax(tf.equal(index, self.num_sampled - 1))
        ids = tf.ensure_shape(ids[: self.num_sampled], [self.num_sampled])
        return ids, last + 1

    def expected_count(self, ids, num_tries):
        """Expected number of times that each class is in a sample: <= 1.

        Args:
            ids: int tensor.
            num_tries: as returned by `sample`.

        Returns:
            float64 tensor of the shape of `ids`.
        """
        ids = tf.cast(ids, tf.float64)
        probability = tf.math.log1p(1.0 / (ids + 1.0)) / self._log_range
        num_tries = tf.cast(num_tries, tf.float64)
        return -tf.math.expm1(num_tries * tf.math.log1p(-probability))

    @property
    def _log_range(self):
        return math.log(self.num_classes + 1)

    def _draw(self, seed, block):
        # float64: float32 would leave out high ids of a large vocabulary.
        uniform = tf.random.stateless_uniform(
            [2 * self.num_sampled],
            # State words are 32 bits wide; a block counts above them.
            seed + tf.stack([tf.cast(block, tf.int64) * 2**32, 0]),
            dtype=tf.float64,
        )
        ids = tf.cast(tf.exp(uniform * self._log_range), tf.int64) - 1
        return tf.clip_by_value(ids, 0, self.num_classes - 1)


class Sample(typing.NamedTuple):
    """The classes of a step's softmax.

    Attributes:
        classes, num_tries: result of `LogUniformSampler.sample`.
        ids: of the rows that it takes: of the labels, and of these classes.
    """

    classes: tf.Tensor
    num_tries: tf.Tensor
    ids: tf.Tensor

    @classmethod
    def of(cls, labels, classes, num_tries):
        """One of labels int64 `(n,)`."""
        # One pull brings both.
        ids = tf.concat([labels, classes], axis=0)
        return cls(classes, num_tries, ids)


def class_ids(labels):
    """Labels of any shape as the loss takes them: int64 `(n,)`."""
    return tf.cast(tf.reshape(labels, [-1]), tf.int64)


def checked_numbers(num_classes, num_sampled):
    """The numbers of classes and of those in a sample."""
    num_classes = checks.positive_integer("num_classes", num_classes)
    num_sampled = checks.positive_integer("num_sampled", num_sampled)
    if num_sampled > num_classes:
        raise ValueError(
            "`num_sampled` must be at most `num_classes`: the classes of a "
            f"sample are all different. Received: num_sampled={num_sampled}, "
            f"num_classes={num_classes}. For so few classes use "
            "`keras.layers.Dense(num_classes)`."
        )
    if num_classes > _MAX_CLASSES:
        raise ValueError(
            f"`num_classes` must be at most 2**24 = {_MAX_CLASSES}: Keras "
            "hands labels to losses as float32, which is exact up to there. "
            f"Received: num_classes={num_classes}."
        )
    return num_classes, num_sampled


def checked_seed(seed):
    """A seed as `LogUniformSampler` takes it."""
    if seed is None:
        return None
    checks.check(
        checks.is_integer(seed) and -(2**31) <= seed < 2**32,
        "seed",
        seed,
        "an integer of 32 bits, or None for a random one",
    )
    return int(seed)
