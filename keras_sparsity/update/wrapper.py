"""A Keras optimizer that stands for another one."""

import warnings

import keras

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.update import state
from keras_sparsity.update.optimizer_arguments import rule_of

# Set on the wrapper itself after construction; all else is the inner's.
_OWN = ("built", "name", "_trainable_variables", "_aggregation")
# Not to be found by Keras's saving, which walks `dir()`.
_HIDDEN = ("inner_optimizer", "_inner", "_rule")


class OptimizerWrapper(keras.optimizers.Optimizer):
    """Reads and sets the attributes of the optimizer that it wraps.

    Args:
        inner_optimizer: a Keras optimizer.
        name: name of the wrapper.

    Attributes:
        _inner: the inner optimizer.
        _rule: the one whose rule updates variables: without loss scaling.
    """

    def __init__(self, inner_optimizer, name=None):
        self._wrap(inner_optimizer)
        super().__init__(learning_rate=0.0, name=name)

    def _wrap(self, inner_optimizer):
        # Out of Keras's tracking.
        self.__dict__["_inner"] = inner_optimizer
        self.__dict__["_rule"] = rule_of(inner_optimizer)

    def _forward_attributes(self):
        """Begins to forward: called at the end of a constructor."""
        # Attributes that the base class has made are the inner optimizer's.
        for attribute in set(self.__dict__) & set(self._rule.__dict__):
            if attribute not in (*keras_optimizers.STATE, *_HIDDEN):
                del self.__dict__[attribute]
        self.__dict__["_is_wrapping"] = True

    @property
    def inner_optimizer(self):
        return self._inner

    def __dir__(self):
        return [name for name in super().__dir__() if name not in _HIDDEN]

    def __getattr__(self, name):
        # Only called for names that the wrapper does not have.
        if name.startswith("__") or "_is_wrapping" not in self.__dict__:
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute '{name}'"
            )
        return getattr(self._rule, name)

    def __setattr__(self, name, value):
        forwards = (
            "_is_wrapping" in self.__dict__
            and name not in self.__dict__
            and name not in _OWN
            and not hasattr(type(self), name)
        )
        if forwards and hasattr(self._rule, name):
            setattr(self._rule, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def learning_rate(self):
        return self._rule.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate):
        self._rule.learning_rate = learning_rate

    @property
    def iterations(self):
        return self._rule.iterations

    @property
    def variables(self):
        return self.inner_optimizer.variables

    def scale_loss(self, loss):
        return self.inner_optimizer.scale_loss(loss)

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        self._rule.exclude_from_weight_decay(var_list, var_names)

    # State, in files as that of a stock optimizer.

    def finalize_variable_values(self, var_list):
        del var_list  # the inner optimizer has partitions in its place
        if self.built:
            self._rule.finalize_variable_values(
                keras_optimizers.built_variables(self._rule)
            )

    def save_own_variables(self, store):
        # One after the other: whole tables, of which one may fill the memory.
        for i, place in enumerate(self.places()):
            (store[str(i)],) = state.read([place])

    def load_own_variables(self, store):
        if not self.built:  # Keras's own warning, of another number
            super().load_own_variables(store)
            return
        values = [store[str(i)] for i in range(len(store.keys()))]
        places = self.places()
        if len(values) == len(places):
            state.assign(places, values)
            return
        # None: a loss scaling that Keras put around has loaded all of them.
        # As many as before its first step: they are in its configuration.
        inner = self.inner_optimizer
        before_built = keras_optimizers.unbuilt(inner).variables
        if values and len(values) != len(before_built):
            warnings.warn(  # as Keras does, of weights of a model to reuse
                f"Skipping variable loading for optimizer '{self.name}', "
                f"because it has {len(places)} variables whereas the saved "
                f"optimizer has {len(values)} variables.",
                stacklevel=2,
            )

    def set_weights(self, weights):
        if not self.built:
            super().set_weights(weights)  # raises
        state.assign(self.places(), weights)

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        config["inner_optimizer"] = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        return cls(**config)
