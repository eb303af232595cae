"""Chooses the closed form of a Keras optimizer."""

import dataclasses

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.tables.row_wise import is_non_negative
from keras_sparsity.update.closed_form.adam import Adam, Adamax, AMSGrad
from keras_sparsity.update.closed_form.base import as_float32
from keras_sparsity.update.closed_form.ftrl import Ftrl
from keras_sparsity.update.closed_form.lion import Lion
from keras_sparsity.update.closed_form.momentum import Momentum, Resting
from keras_sparsity.update.closed_form.nadam import Nadam

# More steps than these would have to be summed up in each step.
_MOST_STEPS = 1 << 13
# Relative error of a movement, by dtype: half of float32's rounding; in
# float64, less than the rounding of a thousand steps.
_TOLERANCES = {tf.float32: 3e-8, tf.float64: 1e-13}


def closed_form_of(rule, variable):
    """The `ClosedForm` of a rule for one variable, or None if there is none.

    Args:
        rule: a built Keras optimizer.
        variable: a variable that it updates.
    """
    make = _FORMS.get(type(rule))
    dtype = tf.as_dtype(variable.dtype)
    constraint = variable.constraint
    is_covered = (
        make is not None
        and (constraint is None or is_non_negative(constraint))
        # Steps that only accumulate change weights, too.
        and not (rule.gradient_accumulation_steps and constraint)
        # Narrower ones lose a step's movement to rounding.
        and dtype in _TOLERANCES
    )
    if not is_covered:
        return None
    decay = 0.0
    if rule.weight_decay is not None and (
        keras_optimizers.uses_weight_decay(rule, variable)
    ):
        decay = rule.weight_decay
        decay = as_float32(decay) if _is_number(decay) else decay
    form = make(rule, decay, dtype) if _is_number(decay) else None
    if form is None or not all(
        _is_number(f) and 0 <= f <= 1 for f in form.factors.values()
    ):
        return None
    num_steps, num_sums = form.kernel.shape
    if not num_sums or num_steps > _MOST_STEPS:
        return None
    form = dataclasses.replace(form, is_non_negative=constraint is not None)
    return _with_averages(form, rule, variable) if rule.use_ema else form


def _with_averages(form, rule, variable):
    """The `ClosedForm` with the averages of `use_ema`, or None.

    Keras averages weights before it constrains them, also in steps that only
    accumulate, and `ema_overwrite_frequency` changes all weights.
    """
    momentum = rule.ema_momentum
    if (
        not (form.is_linear and _is_number(momentum))
        or variable.constraint is not None
        or rule.gradient_accumulation_steps
        or rule.ema_overwrite_frequency
    ):
        return None
    if tf.as_dtype(variable.dtype) == tf.float32:
        momentum = as_float32(momentum)
    if not 0 <= momentum < 1:
        return None
    return dataclasses.replace(form, average=float(momentum))


def _adam(rule, decay, dtype):
    if not _are_moments(rule):
        return None
    kind = AMSGrad if rule.amsgrad else Adam
    return kind(decay, *_numbers(rule), _TOLERANCES[dtype])


def _adamax(rule, decay, dtype):
    if not _are_moments(rule):
        return None
    return Adamax(decay, *_numbers(rule), _TOLERANCES[dtype])


def _nadam(rule, decay, dtype):
    if not _are_moments(rule):
        return None
    beta_1, beta_2, epsilon = _numbers(rule)
    return Nadam(
        decay,
        as_float32(beta_1),
        as_float32(beta_2),
        epsilon,
        _TOLERANCES[dtype],
        beta_1,
    )


def _lion(rule, decay, dtype):
    if not _is_factor(rule.beta_2) or not rule.beta_1:
        return None
    return Lion(decay, as_float32(rule.beta_2))


def _ftrl(rule, decay, dtype):
    numbers = (
        rule.learning_rate_power,
        rule.l1_regularization_strength,
        rule.l2_regularization_strength,
        rule.beta,
    )
    # With shrinkage, the slots of each element decay at a pace of their own.
    shrinks = rule.l2_shrinkage_regularization_strength
    if shrinks or not all(map(_is_number, numbers)):
        return None
    return Ftrl(0.0, *numbers)  # decayed weights do not count either


def _numbers(rule):
    return rule.beta_1, rule.beta_2, rule.epsilon


def _are_moments(rule):
    return (
        all(map(_is_number, _numbers(rule)))
        and 0 <= rule.beta_1 < 1
        and 0 < rule.beta_2 < 1
        # 0 / 0 else, in rows that were never touched.
        and rule.epsilon > 0
    )


def _sgd(rule, decay, dtype):
    if not rule.momentum:
        return Resting(decay, ())
    if not _is_factor(rule.momentum):
        return None
    momentum = as_float32(rule.momentum)
    return Momentum(
        decay, momentum, "momentums", is_nesterov=bool(rule.nesterov)
    )


def _rmsprop(rule, decay, dtype):
    others = [(keras_optimizers.VELOCITIES, rule.rho)]
    if rule.centered:
        others.append((keras_optimizers.AVERAGE_GRADIENTS, rule.rho))
    if not rule.momentum:
        return Resting(decay, tuple(others))
    if not _is_factor(rule.momentum):
        return None
    return Momentum(
        decay, rule.momentum, keras_optimizers.MOMENTUMS, -1, tuple(others)
    )


def _adadelta(rule, decay, dtype):
    kinds = (
        keras_optimizers.ACCUMULATED_GRADIENTS,
        keras_optimizers.ACCUMULATED_CHANGES,
    )
    return Resting(decay, tuple((kind, rule.rho) for kind in kinds))


def _adagrad(rule, decay, dtype):
    return Resting(decay, ((keras_optimizers.ACCUMULATORS, 1.0),))


def _is_number(value):
    return isinstance(value, (int, float))


def _is_factor(value):
    return _is_number(value) and 0 < value < 1


_FORMS = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.RMSprop: _rmsprop,
    keras.optimizers.Adagrad: _adagrad,
    keras.optimizers.Adadelta: _adadelta,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Adamax: _adamax,
    keras.optimizers.Nadam: _nadam,
    keras.optimizers.Lion: _lion,
    keras.optimizers.Ftrl: _ftrl,
}
