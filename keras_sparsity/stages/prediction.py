"""Weights some steps ahead, as the smoothed gradient says.

SpecTrain computes with the weights that a stage will have s updates later: it
goes on as its updates went on average. Rules with a first moment have this
average in their slots; of other rules the changes of weights are averaged.
"""

import abc
import contextlib

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity._tf.current_variable import keeper_of
from keras_sparsity._tf.filled_variable import filling
from keras_sparsity.stages.decaying import DecayingRows
from keras_sparsity.update.closed_form import closed_form_of
from keras_sparsity.update.closed_form.momentum import Resting


class Predictor(abc.ABC):
    r"""Predicts the weights of one optimizer's variables.

    .. math:: \hat W_{t+s} = W_t + s \, \bar\Delta_t

    Attributes:
        num_averages: the number of values that it holds for each weight.
    """

    num_averages = 0

    @abc.abstractmethod
    def step(self, variable, ids=None):
        """A smoothed change, a tensor of the weights' shape.

        Args:
            ids: int tensor `(n,)`: of these rows alone; None: of all.
        """

    @abc.abstractmethod
    def following(self, variables, gradients):
        """Context of an update of variables, whose changes it learns from.

        Args:
            variables: list.
            gradients: list of their gradients: tensors, `tf.IndexedSlices`
                without duplicate rows, or None.
        """

    @abc.abstractmethod
    def by_rows(self, variables):
        """Those of some variables whose rows it can predict alone.

        In steps that cost as much as the rows that their gradients have. The
        variables are those whose rows the optimizer updates alone.
        """

    def ahead(self, variable, num_updates, ids=None):
        """The weights after more updates.

        Args:
            variable: a variable of the optimizer's.
            num_updates: s, a number or a scalar tensor: the number of calls
                of `apply`, of which with `gradient_accumulation_steps` not
                each updates.
            ids: as for `step`.
        """
        value = _read(variable, ids)
        if isinstance(num_updates, int) and not num_updates:
            return value  # as it is, no copy
        step = self.step(variable, ids)
        number = self.num_steps(num_updates)
        return value + tf.cast(number, value.dtype) * step

    @abc.abstractmethod
    def num_steps(self, num_updates):
        """How many times `step` happens in so many calls of `apply`."""


def predictor_of(rule, decay=0.9):
    """The `Predictor` of a Keras optimizer.

    Args:
        rule: a `keras.optimizers.Optimizer`.
        decay: gamma, the share of the former average in that of a rule
            without a first moment, from 0 to below 1.

    Returns:
        `Predictor`. Weight decay, which is no part of the gradient, is not
        predicted by first moments.

    Example:

    >>> weights = keras.Variable([1.0])
    >>> rule = keras.optimizers.SGD(0.5, momentum=0.9)
    >>> rule.apply([tf.constant([1.0])], [weights])  # 1.0 - 0.5
    >>> predictor_of(rule).ahead(weights, 3).numpy()
    array([-1.], dtype=float32)

    References:
        SpecTrain (arXiv:1809.02839), equations 1 to 4.
    """
    make = _STEPS.get(type(rule))
    step = make(rule) if make else None
    if step is None:
        return OfChanges(rule, decay)
    return OfMoments(rule, step)


class OfMoments(Predictor):
    """Of a rule whose slots have the smoothed gradient.

    Args:
        rule: the optimizer, built.
        step: function of a function from a kind of slot to the slot's value,
            and of the variable. It gives the smoothed change.
    """

    def __init__(self, rule, step):
        self._rule, self._step = rule, step

    def step(self, variable, ids=None):
        index = keras_optimizers.variable_index(self._rule, variable)

        def slot(kind):
            return _read(getattr(self._rule, kind)[index], ids)

        return self._step(slot, variable)

    def num_steps(self, num_updates):
        every = self._rule.gradient_accumulation_steps
        if not every:
            return num_updates
        # The last of each `every` calls updates, by the mean of them.
        calls = tf.convert_to_tensor(keras_optimizers.iterations(self._rule))
        later = calls + tf.cast(num_updates, calls.dtype)
        return later // every - calls // every

    def following(self, variables, gradients):
        del variables, gradients  # The slots have it.
        return contextlib.nullcontext()

    def by_rows(self, variables):
        return [v for v in variables if keeper_of(v.value) is not None]


class OfChanges(Predictor):
    r"""Averages the changes of the weights themselves.

    .. math:: \bar\Delta_t = \gamma \bar\Delta_{t-1}
              + (1 - \gamma) (W_t - W_{t-1})

    For SGD this is the paper's equation, times the learning rate.

    Args:
        rule: the optimizer.
        decay: gamma.
    """

    num_averages = 1

    def __init__(self, rule, decay):
        self._rule, self._decay = rule, decay
        self._averages = {}

    def step(self, variable, ids=None):
        return _read(self.average(variable), ids)

    def num_steps(self, num_updates):
        return num_updates  # The average counts the calls without an update.

    @contextlib.contextmanager
    def following(self, variables, gradients):
        ids = [
            self._ids(variable, gradient)
            for variable, gradient in zip(variables, gradients, strict=True)
        ]
        before = list(map(_read, variables, ids))
        yield
        for variable, of_variable, value in zip(
            variables, ids, before, strict=True
        ):
            average = self.average(variable)
            change = _read(variable, of_variable) - value
            mean = (
                self._decay * _read(average, of_variable)
                + (1 - self._decay) * change
            )
            if of_variable is None:
                average.assign(mean)
            else:
                keeper_of(average.value).advance(of_variable, mean)

    def by_rows(self, variables):
        found = [v for v in variables if _rests(self._rule, v)]
        for variable in found:
            average = self.average(variable).value
            if keeper_of(average) is None:  # else of an earlier `compile`
                DecayingRows(average, self._decay)
        return found

    def settle(self):
        """Brings all averages up to date, to be saved."""
        for average, _ in self._averages.values():
            keeper = keeper_of(average.value)
            if keeper is not None:
                keeper.settle()

    def average(self, variable):
        """The variable with the average of another one's changes."""
        if id(variable) not in self._averages:
            # No second copy, not even for a moment.
            with tf.init_scope(), filling(0, variable.shape) as nothing:
                average = keras.Variable(
                    nothing,
                    shape=tuple(variable.shape),
                    dtype=variable.dtype,
                    trainable=False,
                    name="average",
                )
            # The variable too, so that no other one takes over its id.
            self._averages[id(variable)] = average, variable
        return self._averages[id(variable)][0]

    def _ids(self, variable, gradient):
        """The rows that an update changes; None: all of them."""
        if keeper_of(self.average(variable).value) is None:
            return None
        if gradient is None:
            return tf.zeros([0], tf.int32)
        return getattr(gradient, "indices", None)


def _read(variable, ids):
    """A variable's rows as they are by now; all of them if `ids` is None."""
    if ids is None:
        return tf.convert_to_tensor(variable)
    return tf.gather(variable.value, ids)


def _rests(rule, variable):
    """Whether no step changes rows of a variable without a gradient."""
    form = closed_form_of(rule, variable)
    return (
        isinstance(form, Resting)
        and not form.weight_decay
        and not form.is_non_negative
        # Else a step changes the rows of several gradients.
        and not rule.gradient_accumulation_steps
    )


def _of_momentum(rule):
    if not rule.momentum:
        return None
    return lambda slot, variable: slot("momentums")


def _of_rmsprop(rule):
    if not rule.momentum:
        return None
    return lambda slot, variable: -slot(keras_optimizers.MOMENTUMS)


def _of_adam(rule):
    kind = keras_optimizers.VELOCITIES
    if getattr(rule, "amsgrad", False):
        kind = keras_optimizers.LARGEST_VELOCITIES

    def step(slot, variable):
        moment = slot(keras_optimizers.MOMENTUMS)
        velocity = slot(kind)
        root = tf.sqrt(velocity / _share(rule, rule.beta_2, velocity.dtype))
        return _scaled(rule, moment, root)

    return step


def _of_lamb(rule):
    of_adam = _of_adam(rule)

    def step(slot, variable):
        change = of_adam(slot, variable)
        # As long as the weights are, times the rate, unless these are 0.
        length = tf.norm(tf.convert_to_tensor(variable))
        length *= _learning_rate(rule, change.dtype)
        scaled = length * tf.math.divide_no_nan(change, tf.norm(change))
        return tf.where(length > 0, scaled, change)

    return step


def _of_adamax(rule):
    return lambda slot, variable: _scaled(
        rule,
        slot(keras_optimizers.ADAMAX_MOMENTS),
        slot(keras_optimizers.ADAMAX_NORMS),
    )


def _of_lion(rule):
    def step(slot, variable):
        moment = slot(keras_optimizers.MOMENTUMS)
        return -_learning_rate(rule, moment.dtype) * tf.sign(moment)

    return step


def _scaled(rule, moment, root):
    """A step by the first moment, without its bias, and a denominator."""
    dtype = moment.dtype
    mean = moment / _share(rule, rule.beta_1, dtype)
    denominator = root + tf.constant(rule.epsilon, dtype)
    return -_learning_rate(rule, dtype) * mean / denominator


def _share(rule, beta, dtype):
    """The share of an average that gradients have made: 1 - beta^t."""
    # Before the first step the averages are 0.
    step = tf.maximum(tf.cast(rule.iterations, dtype), 1)
    # `tf.cast` of a Python number would round it to float32 first.
    return 1 - tf.constant(beta, dtype) ** step


def _learning_rate(rule, dtype):
    return tf.cast(rule.learning_rate, dtype)


_STEPS = {
    keras.optimizers.SGD: _of_momentum,
    keras.optimizers.RMSprop: _of_rmsprop,
    keras.optimizers.Adam: _of_adam,
    keras.optimizers.AdamW: _of_adam,
    keras.optimizers.Nadam: _of_adam,
    keras.optimizers.Adamax: _of_adamax,
    keras.optimizers.Lamb: _of_lamb,
    keras.optimizers.Lion: _of_lion,
}
