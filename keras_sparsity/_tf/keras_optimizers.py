"""Private state of Keras's optimizers. Checked on Keras 3.5 to 3.15."""

import copy
import types

import keras
import tensorflow as tf

from keras_sparsity._tf.keras_variables import is_variable

# Attributes that an optimizer's own methods need, also in a wrapper.
STATE = (
    *("name", "built", "_lock", "_tracker", "_variables"),
    *("_trainable_variables", "_trainable_variables_indices"),
)

# Kinds of slots of Keras's rules: the attributes that hold them.
ACCUMULATORS = "_accumulators"
ACCUMULATED_GRADIENTS = "_accumulated_grads"
ACCUMULATED_CHANGES = "_accumulated_delta_vars"
AVERAGE_GRADIENTS = "_average_gradients"
MOMENTUMS = "_momentums"
VELOCITIES = "_velocities"
LARGEST_VELOCITIES = "_velocity_hats"
ADAMAX_MOMENTS = "_m"
ADAMAX_NORMS = "_u"
LINEARS = "_linears"
# Of any rule with `gradient_accumulation_steps`.
GRADIENT_SUMS = "_accumulated_gradients"
# Of any rule with `use_ema`.
AVERAGES = "_model_variables_moving_average"

# Of `exclude_from_weight_decay`, which no configuration holds.
_EXCLUDED = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")

# Arguments of any rule's constructor, but for the learning rate.
_OPTIONS = (
    *("name", "weight_decay", "clipnorm", "clipvalue", "global_clipnorm"),
    *("use_ema", "ema_momentum", "ema_overwrite_frequency"),
    *("loss_scale_factor", "gradient_accumulation_steps"),
)


def unbuilt(optimizer):
    """An optimizer of the same rule, without state.

    By its configuration; where that makes none, as without a `get_config` of a
    learning rate's schedule, with the optimizer's own attributes.
    """
    known, inner = {}, optimizer
    while inner is not None:  # classes of the user's, registered or not
        classes = [type(v) for v in (inner, *vars(inner).values())]
        known.update((c.__name__, c) for c in classes)
        inner = getattr(inner, "inner_optimizer", None)
    try:
        with keras.saving.custom_object_scope(known):
            made = type(optimizer).from_config(optimizer.get_config())
    except Exception:  # a user's class may raise any
        return _with_attributes_of(optimizer)
    _exclude_alike(made, optimizer)
    return made


def _exclude_alike(made, optimizer):
    """Excludes from weight decay as another optimizer does."""
    while optimizer is not None:
        attributes = vars(optimizer)
        made.__dict__.update(
            (name, copy.copy(attributes[name]))
            for name in _EXCLUDED
            if name in attributes
        )
        optimizer = getattr(optimizer, "inner_optimizer", None)
        made = getattr(made, "inner_optimizer", None)


def _with_attributes_of(optimizer):
    """As `unbuilt`, without a configuration; `_learning_rate`.

    Variables of a user's constructor stay behind.
    """
    kind, stock = type(optimizer), keras.optimizers.Optimizer
    options = {name: getattr(optimizer, name) for name in _OPTIONS}
    rate = optimizer._learning_rate  # or a schedule, or a function
    if is_variable(rate):
        rate = float(rate.numpy())
    made = object.__new__(kind)
    stock.__init__(made, rate, **options)
    for name, value in vars(optimizer).items():
        is_state = _has_variables(value)
        # Methods are bound to the optimizer.
        is_method = callable(getattr(kind, name, None))
        if name == "inner_optimizer":
            setattr(made, name, unbuilt(value))
        elif name not in vars(made) and not is_state and not is_method:
            made.__dict__[name] = value
    return made


def _has_variables(value):
    """Whether a value is a variable, or a container of any."""
    if isinstance(value, dict):  # by keys that may have no order
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(_has_variables, value))
    return is_variable(value)


def built_variables(optimizer):
    """The variables an optimizer was built with (`_trainable_variables`)."""
    return optimizer._trainable_variables


def set_built_variables(optimizer, variables):
    """Sets the same, which Keras averages with `use_ema`."""
    optimizer.__dict__["_trainable_variables"] = variables


def update_averages(optimizer):
    """Takes a step's weights into the averages of `use_ema`, if there are any.

    As in `_backend_apply_gradients`: `_update_model_variables_moving_average`,
    `_overwrite_model_variables_with_average_value`.
    """
    variables = built_variables(optimizer)
    if not optimizer.use_ema or not variables:
        return
    optimizer._update_model_variables_moving_average(variables)
    frequency = optimizer.ema_overwrite_frequency
    if frequency:
        keras.ops.cond(
            (optimizer.iterations + 1) % frequency == 0,
            lambda: optimizer._overwrite_model_variables_with_average_value(
                variables
            ),
            lambda: None,
        )


def start_from_weights(optimizer):
    """Before a first update, slots that begin as weights: as these are now.

    `ScheduleFreeAdamW.build` copies them to `_momentums`.
    """
    kinds = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
    if not optimizer.built or not isinstance(optimizer, kinds):
        return
    pairs = [
        (slot, variable)
        for slot, variable in zip(
            optimizer._momentums, built_variables(optimizer), strict=True
        )
        if slot is not None
    ]

    def start():
        for slot, variable in pairs:
            slot.assign(variable)

    keras.ops.cond(optimizer.iterations == 0, start, lambda: None)


def variable_index(optimizer, variable):
    """A variable's place among them (`_get_variable_index`)."""
    return optimizer._get_variable_index(variable)


def exclude_from_weight_decay_too(optimizer, variable, others):
    """Excludes others where a variable is (`_exclude_from_weight_decay`)."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None)
    if excluded and optimizer._var_key(variable) in excluded:
        exclude_from_weight_decay(optimizer, others)


def exclude_from_weight_decay(optimizer, variables):
    """Excludes more variables (`_exclude_from_weight_decay`, `_var_key`)."""
    if variables:
        optimizer._exclude_from_weight_decay.update(
            optimizer._var_key(variable) for variable in variables
        )


def excluded_from_weight_decay(optimizer):
    """Places of the excluded ones among the variables it was built with."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", ())
    places = optimizer._trainable_variables_indices
    return [place for key, place in places.items() if key in excluded]


def uses_weight_decay(optimizer, variable):
    """Whether weight decay applies to a variable (`_use_weight_decay`)."""
    named = types.SimpleNamespace(
        _unique_id=variable.value._unique_id, name=tensorflow_name(variable)
    )
    return optimizer._use_weight_decay(named)


def tensorflow_name(variable):
    """The name in which Keras looks for names that weight decay leaves out.

    That of a `tf.Variable`, made where layers make theirs: with the layer's.
    """
    return f"{variable.path}:0"


def iterations(optimizer):
    """The variable that counts `apply`'s calls (`_iterations`).

    `iterations` counts updates, if gradients accumulate.
    """
    return optimizer._iterations


def set_iterations(optimizer, value):
    """Sets the same of a copy, to a tensor (`_iterations`)."""
    optimizer.__dict__["_iterations"] = value


def momentum_product(optimizer):
    """The variable of Nadam's product of momentums (`_u_product`)."""
    return optimizer._u_product


def advance_without_variables(optimizer):
    """What a step changes but variables and their slots, of a rank of none.

    Nadam's product of momentums, as in `Nadam._backend_update_step`.
    """
    if isinstance(optimizer, keras.optimizers.Nadam):
        product, ops = momentum_product(optimizer), keras.ops
        power = ops.power(0.96, ops.cast(optimizer.iterations + 1, "float32"))
        following = product * optimizer.beta_1 * (1.0 - 0.5 * power)
        steps = optimizer.gradient_accumulation_steps or 1
        is_update = (iterations(optimizer).value + 1) % steps == 0
        product.assign(ops.where(is_update, following, product))
    iterations(optimizer).assign_add(1)


class _Iterations:
    """In place of an optimizer's count of steps: of its updates."""

    def __init__(self, variable, value):
        self._variable, self._value = variable, value

    def __add__(self, number):
        return self._value + number

    def __tf_tensor__(self, dtype=None, name=None):
        return self._value

    def assign_add(self, number):
        self._variable.assign_add(number)


def without_accumulation(optimizer):
    """A copy that applies each gradient, and counts as the optimizer does.

    `gradient_accumulation_steps`, `_iterations` and `_learning_rate`, which
    depends on the number of steps.
    """
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.update(
        gradient_accumulation_steps=None,
        _iterations=_Iterations(
            optimizer._iterations, tf.convert_to_tensor(optimizer.iterations)
        ),
        _learning_rate=tf.convert_to_tensor(optimizer.learning_rate),
    )
    return copy


def set_optimizer_strategy(optimizer, strategy):
    """The strategy an optimizer updates under (`_distribution_strategy`)."""
    optimizer.__dict__["_distribution_strategy"] = strategy


def own_variables(optimizer):
    """The variables of an optimizer (`_variables`), without an inner one's."""
    return optimizer._variables


def rebuild_optimizer(optimizer, variables, own_variables, attributes):
    """Gives a built optimizer other variables to update.

    `_trainable_variables`, `_trainable_variables_indices`, `_var_key`,
    `_variables` and `_tracker`, set as `build` sets them, without tracking.

    Args:
        variables: the variables that it is to update.
        own_variables: the variables that it consists of.
        attributes: dict of its other attributes.
    """
    from keras.src.utils import tracking

    @tracking.no_automatic_dependency_tracking
    def set_all(**values):
        for name, value in values.items():
            setattr(optimizer, name, value)

    set_all(
        _trainable_variables=list(variables),
        _variables=list(own_variables),
        **attributes,
    )
    indices = optimizer._trainable_variables_indices
    indices.clear()
    for index, variable in enumerate(variables):
        indices[optimizer._var_key(variable)] = index
    tracker = optimizer._tracker
    is_variable, _ = tracker.config["variables"]
    tracker.config["variables"] = is_variable, optimizer._variables
    tracker.stored_ids["variables"] = {id(v) for v in own_variables}


def take_aggregated_gradients(optimizer, clip, strategy):
    """Makes an optimizer apply gradients as they are, but for `clip(grads)`.

    Under a strategy. `_all_reduce_sum_gradients`, `_clip_gradients` and
    `loss_scale_factor`, on this object alone, and `_distribution_strategy`.
    """
    set_optimizer_strategy(optimizer, strategy)
    optimizer.__dict__["_all_reduce_sum_gradients"] = list
    optimizer.__dict__["_clip_gradients"] = clip
    # The gradients are divided already.
    optimizer.__dict__["loss_scale_factor"] = None


def check_knows(optimizer, variables):
    """Raises Keras's ValueError where it was built with other variables.

    `_check_variables_are_known`.
    """
    optimizer._check_variables_are_known(variables)


def without_missing_gradients(optimizer, grads, variables):
    """Both lists without None, with Keras's warning or error.

    `_filter_empty_gradients`.
    """
    return optimizer._filter_empty_gradients(grads, variables)
