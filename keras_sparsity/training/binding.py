"""Methods of one model, replaced on that model alone."""

import functools
import inspect
import types

import keras

from keras_sparsity._tf import patches
from keras_sparsity.conversion import saving
from keras_sparsity.health import agreement
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.training import jit

# Set on an adopted model; holds its bindings.
ADOPTION = "_keras_sparsity_adoption"

_EVERY_RANK = (
    "Every rank must make the same calls, and the same models before them: "
    "Keras numbers their names. `ks.export(model)`, called by every rank, "
    "gives a model that one rank can use by itself."
)


class Binding:
    """Binds some of a model's methods to its own of the same names.

    `_stock` keeps the model's methods, by name.

    Args:
        model: an adopted model.
        names: the methods' names.
        private: dict from Keras's private names (`_tf`) to this object's own
            names of them.
    """

    def __init__(self, model, names, private=None):
        self._model = model
        self._collectives = model.distribute_strategy.collectives
        self._stock, self._has_looked = {}, False
        if "save" in names and self._collectives.size > 1:
            saving.have_models_save()
        for name in names:
            self._bind(name, getattr(self, name))
        for name, own_name in (private or {}).items():
            self._bind(name, getattr(self, own_name))

    def _bind(self, name, method):
        stock = getattr(self._model, name)
        self._stock[name] = stock

        @functools.wraps(stock)
        def bound(*args, **kwargs):
            return method(*args, **kwargs)

        # Not through Keras's attribute tracking: these are not state.
        object.__setattr__(self._model, name, bound)

    # For subclasses that bind them, and have a `_save` or an `_on_batch`.

    def save(self, *args, **kwargs):
        self._save("save", args, kwargs)

    def save_weights(self, *args, **kwargs):
        self._save("save_weights", args, kwargs)

    def test_on_batch(self, *args, **kwargs):
        return self._on_batch("test_on_batch", args, kwargs)

    def predict_on_batch(self, *args, **kwargs):
        return self._on_batch("predict_on_batch", args, kwargs)

    def unbind(self):
        """Gives the model its methods back; the last binding goes first."""
        for name, stock in self._stock.items():
            object.__setattr__(self._model, name, stock)

    def _check_same_call(self, method, arguments):
        if self._collectives.size == 1:
            return
        facts = agreement.of_call(method, arguments)
        if method == "fit":
            facts.update(agreement.of_model(self._model))
        self._collectives.check_equal(
            facts, "The model and its method that is called", _EVERY_RANK
        )

    def _check_optimizer(self, of_batch=False):
        """Raises for optimizers that look at a rank's gradients alone.

        Args:
            of_batch: whether it is asked for each batch: the optimizers beside
                the model's own are then looked at once.
        """
        jit.settle(self._model, self._collectives)
        optimizer = getattr(self._model, "optimizer", None)
        if optimizer is not None and not isinstance(optimizer, HybridOptimizer):
            raise ValueError(
                f"The model '{self._model.name}' trains over "
                f"{self._collectives.size} processes, but its optimizer is "
                f"not wrapped, so its gradients would not be aggregated. "
                f"Received: {optimizer}. Write "
                "`with strategy.scope(): model.compile(...)`, or "
                "`model.optimizer = ks.HybridOptimizer(optimizer)`."
            )
        if self._collectives.size > 1 and not (of_batch and self._has_looked):
            self._has_looked = True
            for name, further in saving.named_optimizers(self._model):
                if name != "optimizer":
                    _check_further(name, further)


def _check_further(name, optimizer):
    """Raises where a second optimizer would look at a rank's part alone."""
    options = [
        f"{option}={getattr(optimizer, option)}"
        for option in ("clipnorm", "clipvalue", "global_clipnorm")
        if getattr(optimizer, option, None)
    ]
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not isinstance(optimizer, HybridOptimizer) and (options or is_scaling):
        raise ValueError(
            "A model's further optimizer that is not wrapped would clip, or "
            "scale the loss, by this process's part of the gradients alone. "
            f"Received: '{name}', of "
            f"{type(optimizer).__name__}({', '.join(options)}). Wrap it: "
            f"`model.{name} = ks.HybridOptimizer(...)`."
        )


class RunBinding(Binding):
    """Binds Keras's runs, also where methods of the user's call them.

    A `fit(self, inputs)` of the user's class stays as it is; the
    `super().fit(...)` in it is that of all ranks.
    """

    def _bind(self, name, method):
        own = getattr(self._model, name)
        of_keras = getattr(keras.Model, name)
        is_of_keras = getattr(own, "__func__", None) is of_keras
        if name not in patches.RUNS or is_of_keras:
            super()._bind(name, method)
            return
        self._stock[name] = types.MethodType(of_keras, self._model)

        @functools.wraps(own)
        def bound(*args, **kwargs):
            with patches.method_for(name, self._model, method):
                return own(*args, **kwargs)

        object.__setattr__(self._model, name, bound)


def raise_of_another_strategy(model, strategy):
    """Raises ValueError of a model that another strategy trains."""
    raise ValueError(
        f"The model '{model.name}' is trained by another strategy already. "
        f"Received: a model of a {type(strategy).__name__}. Make the model "
        "anew, or load it inside of this strategy's scope."
    )


def raise_of_compiled_outside(model):
    """Raises ValueError of a model that has an optimizer of no strategy."""
    raise ValueError(
        f"The model '{model.name}' was compiled outside of its strategy's "
        "scope, and its strategy knows only what `compile` is given inside. "
        f"Received: a {type(model.optimizer).__name__}. Write "
        "`with strategy.scope(): model.compile(...)` each time."
    )


def bound_arguments(function, args, kwargs):
    """The given arguments of a call, by name."""
    signature = inspect.signature(function)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments
