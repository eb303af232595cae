"""Interface of the closed forms of rules."""

import abc
import dataclasses

import numpy as np
import tensorflow as tf

# The last mark of rows that are not behind.
NO_MARK = -1.0


@dataclasses.dataclass(frozen=True)
class ClosedForm(abc.ABC):
    r"""Any number of a rule's steps in which the gradient of a row is zero.

    Let step t be the last one with a gradient, T the current one,
    :math:`a_j` the step size and :math:`d_j = 1 - \eta_j \lambda` the weight
    decay of step j. Then the weights become

    .. math:: w \prod_j d_j - f\Big(\sum_{j=t+1}^{T} a_j g_p(j - t)
              \prod_{l > j} d_l\Big)

    in which the sums are numbers of t and T, not of a row, and f is a function
    of the row's slots.

    Attributes:
        weight_decay: lambda; 0.0: none.
        lasts: whether g is 1 for ever, and the only one.
        has_marks: whether steps have a `mark`.
        changes_new_rows: whether rows whose slots are as an optimizer starts
            them change, without weight decay.
        is_non_negative: whether negative weights become zero in each step.
            Steps without a gradient move a weight in one direction, so that it
            is enough to do so after the last one.
        average: momentum of the averages of the weights (`use_ema`); None:
            there are none.
        is_linear: whether `moved` is linear in the weights and the sums, or in
            the last mark: then it also gives the average of the weights of
            several steps, from the averages of these.
    """

    weight_decay: float
    is_non_negative: bool = dataclasses.field(default=False, kw_only=True)
    average: float | None = dataclasses.field(default=None, kw_only=True)
    lasts = False
    has_marks = False
    changes_new_rows = False
    is_linear = True

    @property
    @abc.abstractmethod
    def factors(self):
        """Dict from kinds of slots to their factor in each step."""

    @property
    @abc.abstractmethod
    def kernel(self):
        """The functions :math:`g_p`: float64 array `(num_steps, num_sums)`.

        Row i is of j - t = i + 1; later steps move no row any more.
        """

    def step_size(self, iterations, learning_rate, rule):
        """The number :math:`a_j` of the step that is about to be applied.

        1 of a rule that has it in its slots.

        Args:
            iterations: float64 scalar, number of steps applied before.
            learning_rate: float64 scalar.
            rule: the Keras optimizer.

        Returns:
            float64 scalar.
        """
        del iterations, learning_rate, rule
        return tf.ones([], tf.float64)

    def mark(self, iterations, learning_rate):
        """Another number of that step: float64 scalar."""
        del iterations, learning_rate

    def kernel_of(self, kernel, mark, marks):
        """The kernel of one step, from its own mark and earlier ones.

        Args:
            kernel: `self.kernel`, as a tensor.
            mark: float64 scalar, the step's mark.
            marks: float64 tensor `(num_steps,)`: row i is the mark of the first
                step after a row's last gradient, if that was i + 1 steps ago.
        """
        del mark, marks
        return kernel

    @abc.abstractmethod
    def moved(self, weights, slots, sums):
        """The weights after these steps, from the decayed ones.

        Args:
            weights: tensor `(num_rows, dim)`.
            slots: dict from kinds to tensors of the same shape, as they were
                behind step t.
            sums: list of tensors `(num_rows, 1)`; if steps have marks, those
                of steps t + 1 and T come last. For rows that are not behind,
                sums are zero, and the last mark is `NO_MARK`.
        """

    def slot_after(self, kind, slots, factor):
        """A slot after these steps.

        Args:
            kind: its kind.
            slots: dict from kinds to tensors `(num_rows, dim)`.
            factor: product of its factors in all steps, `(num_rows, 1)`; None
                if these are 1.
        """
        return slots[kind] if factor is None else slots[kind] * factor


def num_steps_of(factor, tolerance=1e-13):
    """Number of steps after which the powers of a factor do not count."""
    if factor <= 0:
        return 1
    tail = np.log(tolerance * (1 - factor))
    return int(np.ceil(tail / np.log(factor)))


def powers(factor, num_steps):
    """Column of the powers of a factor: those of 1 to `num_steps`."""
    steps = np.arange(1, num_steps + 1, dtype=np.float64)
    return float(factor) ** steps[:, None]


def as_float32(number):
    """A number that `keras.ops.cast` has turned into float32 on its way."""
    return float(np.float32(number))
