"""Numbers of the steps, from which rows that are behind are brought up."""

import functools
import typing

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.update.average_sums import AverageSums
from keras_sparsity.update.closed_form.base import NO_MARK

# Steps after which all rows are brought up to date, however large the table:
# one dense step in so many. At 3 MB of sums.
_MOST_STEPS = 1 << 16
_FEWEST_STEPS = 1 << 12
# Products of weight decay are not to fall below.
_SMALLEST = 1e-100
# In place of a decay of all there is.
_NOTHING = 1e-60
# The number of steps from when another optimizer keeps the rows.
_ENDED = -1


class Step(typing.NamedTuple):
    """Numbers of a step: float64 scalars.

    Attributes:
        size, decay: :math:`a_j` and :math:`d_j` of `ClosedForm`.
        mark: `ClosedForm.mark`; None: none.
        momentum: of the averages; None: there are none.
    """

    size: tf.Tensor
    decay: tf.Tensor
    mark: tf.Tensor | None
    momentum: tf.Tensor | None


class Gap(typing.NamedTuple):
    """The steps by which rows are behind.

    Attributes:
        sums: list of tensors `(num_rows, 1)`, see `ClosedForm.moved`.
        decay: product of the weight decay, `(num_rows, 1)`; None: there is
            none.
        factors: dict from kinds of slots to `(num_rows, 1)`.
    """

    sums: list
    decay: tf.Tensor
    factors: dict


class StepSums:
    """The sums of a `ClosedForm` from each earlier step to the current one.

    Step T adds to the sums of the last steps alone: as many as the form's
    kernel has. All is in float64, and divided by the product of the weight
    decay so far, which would else change every sum in each step.

    Args:
        form: `ClosedForm`.
        num_rows: number of rows of the table.
    """

    def __init__(self, form, num_rows):
        self._form = form
        num_steps, num_sums = form.kernel.shape
        fewest = max(_FEWEST_STEPS, 2 * num_steps)
        self.capacity = max(fewest, min(num_rows, _MOST_STEPS))
        self._now = tf.Variable(0, dtype=tf.int32, trainable=False)
        self._sums = tf.Variable(
            np.zeros((self.capacity, num_sums)), trainable=False
        )
        self._decays = tf.Variable(np.ones(self.capacity), trainable=False)
        # Of the step after each.
        self._marks = None
        if form.has_marks:
            self._marks = tf.Variable(np.ones(self.capacity), trainable=False)
        self._average = None
        if form.average is not None:
            self._average = AverageSums(
                form, self._sums, self._decays, self._marks
            )
        # Captured by traced functions, so that none has a copy.
        self._kernel = tf.constant(form.kernel, tf.float64)
        self._powers = {
            kind: _powers(float(factor), self.capacity)
            for kind, factor in form.factors.items()
            if factor != 1
        }

    @property
    def now(self):
        """Number of steps since all rows were up to date."""
        return self._now.read_value()

    def checked_now(self):
        """The same; an error if `end` was called before."""
        now = self.now
        is_known = tf.debugging.assert_none_equal(
            now,
            _ENDED,
            message="This function was traced before the model was compiled "
            "again, and another optimizer keeps its table's rows now. Trace "
            "it anew, after `compile`; that of a model's `predict` by "
            "`model.make_predict_function(force=True)`.",
        )
        with tf.control_dependencies([is_known]):
            return tf.identity(now)

    def end(self):
        """The rows, which are up to date, get another optimizer."""
        self._now.assign(_ENDED)

    def next_step(self, rule):
        """`Step` that a rule is about to apply."""
        rate = tf.cast(tf.convert_to_tensor(rule.learning_rate), tf.float64)
        iterations = tf.cast(tf.convert_to_tensor(rule.iterations), tf.float64)
        size = self._form.step_size(iterations, rate, rule)
        mark = self._form.mark(iterations, rate)
        decay = 1 - rate * self._form.weight_decay
        # Sums are divided by it.
        nothing = tf.constant(_NOTHING, tf.float64)
        decay = tf.where(tf.abs(decay) < nothing, nothing, decay)
        momentum = None
        if self._form.average is not None:
            is_later = tf.cast(iterations > 0, tf.float64)
            momentum = is_later * self._form.average
        return Step(size, decay, mark, momentum)

    def extend(self, added):
        """Adds a step.

        Args:
            added: `Step`.

        Returns:
            Whether it is full: it has to be reset before the next step.
        """
        now = self._now.read_value()
        step = now + 1
        # Gathered: after a scatter, reading a variable copies all of it.
        product = added.decay * tf.gather(self._decays, now)
        if self._form.lasts:
            total = self._total(now, added, product)
            self._sums.scatter_update(tf.IndexedSlices(total[None], step[None]))
        else:
            of_last = self._of_last(now, added, product)
            # Before the first step is nothing, of which zeros are added.
            places = tf.maximum(now - tf.range(of_last.shape[0]), 0)
            self._sums.scatter_add(tf.IndexedSlices(of_last, places))
        if self._marks is not None:
            self._marks.scatter_update(
                tf.IndexedSlices(added.mark[None], now[None])
            )
        self._decays.scatter_update(tf.IndexedSlices(product[None], step[None]))
        self._now.assign(step)
        is_full = step >= self.capacity - 1
        is_full |= ~(tf.abs(product) > _SMALLEST)
        if self._average is not None:
            is_full |= self._average.extend(step, added)
        return is_full

    def _total(self, now, added, product):
        """The sum of all steps, if they last."""
        return tf.gather(self._sums, now) + added.size / product

    def _of_last(self, now, added, product):
        """A step's additions to the sums of the last ones, the latest first."""
        # Of a fixed length, as XLA asks: before the first step is nothing.
        places = now - tf.range(self._kernel.shape[0])
        weights = tf.where(places >= 0, added.size / product, 0)[:, None]
        kernel = self._kernel
        if self._marks is not None:
            marks = tf.gather(self._marks, tf.maximum(places[1:], 0))
            marks = tf.concat([added.mark[None], marks], axis=0)
            kernel = self._form.kernel_of(kernel, added.mark, marks)
        return kernel * weights

    def gap(self, steps, now, dtype, coming=None):
        """The sums between earlier steps and now.

        Args:
            steps: int32 tensor `(num_rows,)`, at most `now`.
            now: `self.now`.
            dtype: of the result.
            coming: `Step` that `extend` is to add, as if it had, to the bit;
                None: none.

        Returns:
            `Gap`.
        """
        sums, decay = tf.gather(self._sums, steps), None
        product = tf.gather(self._decays, now)
        if coming is not None:
            product = coming.decay * product
        if self._form.lasts and coming is None:
            sums = tf.gather(self._sums, now) - sums
        elif self._form.lasts:
            sums = self._total(now, coming, product) - sums
        elif coming is not None:
            of_last = self._of_last(now, coming, product)
            place, last = now - steps, of_last.shape[0] - 1
            of_rows = tf.gather(of_last, tf.minimum(place, last))
            sums += tf.where(place[:, None] <= last, of_rows, 0)
        if self._form.weight_decay:
            sums = sums * product
            decay = product / tf.gather(self._decays, steps)
            decay = tf.cast(decay, dtype)[:, None]
        columns = tf.split(sums, sums.shape[1], axis=1)
        if self._marks is not None:
            columns += self._marks_of(steps, now, coming)
        if coming is not None:
            now += 1
        return Gap(
            [tf.cast(column, dtype) for column in columns],
            decay,
            {
                kind: tf.cast(tf.gather(powers, now - steps), dtype)[:, None]
                for kind, powers in self._powers.items()
            },
        )

    def average_gap(self, steps, now, dtype):
        """The part of the averages that is of the steps until now.

        Args:
            steps, now, dtype: as for `gap`.

        Returns:
            `Gap`, of which `ClosedForm.moved` makes that part.
        """
        sums, decay, factor = self._average.gap(steps, now)
        return Gap(
            [tf.cast(column, dtype) for column in sums],
            tf.cast(decay, dtype),
            {keras_optimizers.AVERAGES: tf.cast(factor, dtype)},
        )

    def _marks_of(self, steps, now, coming):
        """Columns: the marks of the first step behind, and of the last."""
        first = tf.gather(self._marks, steps)
        if coming is not None:
            first = tf.where(steps < now, first, coming.mark)
            last = tf.fill(tf.shape(steps), coming.mark)
            return [first[:, None], last[:, None]]
        last = tf.gather(self._marks, tf.maximum(now - 1, 0))
        last = tf.where(steps < now, last, NO_MARK)
        return [first[:, None], last[:, None]]

    def reset(self):
        """Begins anew: all rows are up to date."""
        self._now.assign(0)
        self._sums.assign(tf.zeros(self._sums.shape, tf.float64))
        self._decays.assign(tf.ones(self._decays.shape, tf.float64))
        if self._average is not None:
            self._average.reset()


@functools.lru_cache(maxsize=64)
def _powers(factor, count):
    """Powers 0 to `count - 1`: by a table, the same on any processor."""
    with tf.init_scope():
        return tf.constant(factor ** np.arange(count, dtype=np.float64))
