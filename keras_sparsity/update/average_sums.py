"""Numbers of the steps, from which averages of rows are brought up to date."""

import numpy as np
import tensorflow as tf

from keras_sparsity.update.closed_form.base import NO_MARK

# Means of the decay in terms of its product so far: rounding of 1e-16 adds to
# averages, so much larger. At 5e8 they were 2e-8 of the weights off.
_MOST_CANCELLATION = 1e6


class AverageSums:
    r"""The part of an optimizer's averages (`use_ema`) that is of late steps.

    Let :math:`\beta_j` be the momentum of the averages in step j: 0 in an
    optimizer's first step, else `form.average`. In the notation of
    `ClosedForm`, with :math:`B(t, T) = \prod_{j=t+1}^{T} \beta_j`, an average
    becomes

    .. math:: B(t, T) \bar{w} + \sum_{j=t+1}^{T} B(j, T) (1 - \beta_j) w_j

    in which :math:`w_j` is linear in numbers :math:`x_j` of step j. Those that
    depend on j alone have a mean
    :math:`A(T) = \beta_T A(T - 1) + (1 - \beta_T) x_T`, and their sum over the
    steps after t is :math:`A(T) - B(t, T) A(t)`. The sums of `StepSums` from t
    to j change for the last steps t alone: as many as the form's kernel has.
    For these the mean is kept for each t; afterwards, the sum is a constant.

    Args:
        form: `ClosedForm` with an `average`.
        sums, decays, marks: the variables of `StepSums`.
    """

    def __init__(self, form, sums, decays, marks):
        self._form = form
        self._sums, self._decays, self._marks = sums, decays, marks
        self._num_steps = form.kernel.shape[0]
        capacity = sums.shape[0]
        self._powers = tf.constant(
            form.average ** np.arange(capacity, dtype=np.float64)
        )
        # Of the products of the weight decay; of lasting sums; of marks.
        means = np.zeros((capacity, 1 + form.lasts + form.has_marks))
        means[0, 0] = 1.0
        self._means = tf.Variable(means, trainable=False)
        self._mean_sums = None
        if not form.lasts:
            self._mean_sums = tf.Variable(np.zeros(sums.shape), trainable=False)
        # The optimizer's first step; 0: before these.
        self._first = tf.Variable(0, dtype=tf.int32, trainable=False)

    def extend(self, step, added):
        """Adds a step that `StepSums` has been extended by.

        Args:
            step: its number.
            added: `Step`.

        Returns:
            Whether all rows have to be brought up to date before the next one.
        """
        momentum = added.momentum
        product = tf.gather(self._decays, step)
        numbers = [product]
        if self._form.lasts:
            numbers.append(product * tf.gather(self._sums, step)[0])
        if self._form.has_marks:
            numbers.append(added.mark)
        means = momentum * tf.gather(self._means, step - 1)
        means += (1 - momentum) * tf.stack(numbers)
        self._means.scatter_update(tf.IndexedSlices(means[None], step[None]))
        self._first.assign(tf.where(momentum == 0, step, self._first))
        if self._mean_sums is not None:
            self._extend_sums(step, 1 - momentum, product)
        return tf.abs(means[0]) > _MOST_CANCELLATION * tf.abs(product)

    def _extend_sums(self, step, share, product):
        # Of a fixed length, as XLA asks: before the first step is nothing, of
        # which zeros are added.
        places = step - 1 - tf.range(self._num_steps)
        is_step = places[:, None] >= 0
        places = tf.maximum(places, 0)
        change = product * tf.gather(self._sums, places)
        change -= tf.gather(self._mean_sums, places)
        change = tf.where(is_step, share * change, tf.zeros_like(change))
        self._mean_sums.scatter_add(tf.IndexedSlices(change, places))

    def gap(self, steps, now):
        """The part of an average that is of the steps between two.

        Args:
            steps: int32 tensor `(num_rows,)`, at most `now`.
            now: int32 scalar, the current step.

        Returns:
            `(sums, decay, factor)`, float64: list of tensors `(num_rows, 1)`
            and a factor of the weights `(num_rows, 1)`, of which
            `ClosedForm.moved` makes that part; the factor of the average.
        """
        factor = self._factor(steps, now)
        means = tf.gather(self._means, now)
        part = means - factor * tf.gather(self._means, steps)
        decay = part[:, :1] / tf.gather(self._decays, steps)[:, None]
        sums = tf.gather(self._sums, steps)
        if self._form.lasts:
            sums = part[:, 1:2] - sums * part[:, :1]
        else:
            last = tf.minimum(steps + self._num_steps, now)
            later = self._factor(last, now)
            rest = means[:1] - later * tf.gather(self._means, last)[:, :1]
            sums *= rest
            sums += later * tf.gather(self._mean_sums, steps)
        columns = tf.split(sums, sums.shape[1], axis=1)
        if self._form.has_marks:
            is_behind = (steps < now)[:, None]
            columns += [
                tf.gather(self._marks, steps)[:, None],
                tf.where(is_behind, part[:, -1:], NO_MARK),
            ]
        return columns, decay, factor

    def _factor(self, steps, now):
        """What is left of an average of earlier steps: `(num_rows, 1)`."""
        powers = tf.gather(self._powers, now - steps)
        is_over = (steps < self._first) & (self._first <= now)
        return tf.where(is_over, tf.zeros_like(powers), powers)[:, None]

    def reset(self):
        """Begins anew: all rows are up to date."""
        self._first.assign(0)
        if self._mean_sums is not None:
            zeros = tf.zeros(self._mean_sums.shape, tf.float64)
            self._mean_sums.assign(zeros)
