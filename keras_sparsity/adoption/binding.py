"""Methods of one model, replaced on that model alone."""

import contextlib
import functools
import inspect

import keras

from keras_sparsity import agreement
from keras_sparsity.optimizer import HybridOptimizer

_EVERY_RANK = (
    "Every rank must make the same calls; `ks.export(model)` gives a model "
    "that one rank can use by itself."
)


class Binding:
    """Binds some of a model's methods to its own of the same names.

    Args:
        model: the model.
        names: the methods' names; `_stock` has what they were.
        private: dict from names that Keras keeps to itself (`compat`) to this
            object's own names of them.
    """

    def __init__(self, model, names, private=None):
        self._model = model
        self._stock = {}
        for name in names:
            self._bind(name, getattr(self, name))
        for name, own_name in (private or {}).items():
            self._bind(name, getattr(self, own_name))

    @property
    def _collectives(self):
        return self._model.distribute_strategy.collectives

    def _bind(self, name, method):
        stock = getattr(self._model, name)
        self._stock[name] = stock

        @functools.wraps(stock)
        def bound(*args, **kwargs):
            return method(*args, **kwargs)

        # Not through Keras's attribute tracking: these are not state.
        object.__setattr__(self._model, name, bound)

    def _check_same_call(self, method, arguments):
        if self._collectives.size == 1:
            return
        facts = agreement.of_call(method, arguments)
        if method == "fit":
            facts.update(agreement.of_model(self._model))
        self._collectives.check_equal(
            facts, "The model and its method that is called", _EVERY_RANK
        )

    def _check_optimizer(self):
        check_is_not_jit_compiled(self._model, self._collectives.size)
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


def check_is_not_jit_compiled(model, size):
    """Raises where XLA would be given what several processes exchange."""
    if size > 1 and model.jit_compile and not model.run_eagerly:
        raise ValueError(
            f"The model '{model.name}' is compiled with `jit_compile=True`, "
            "but XLA cannot compile the messages between processes. Received: "
            f"jit_compile=True on {size} processes. Compile it with "
            '`jit_compile=False` (or "auto"), or train in one process.'
        )


def bound_arguments(function, args, kwargs):
    """Arguments of a call by name, those given only."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    arguments = dict(bound.arguments)
    arguments.update(arguments.pop("kwargs", {}))
    return arguments


@contextlib.contextmanager
def in_place_of(name, model, method):
    """While entered, Keras's own method of that name is `method` for a model.

    Args:
        name: the method's name.
        model: the model; others keep Keras's method.
        method: what is called in its place, without the model.
    """
    owner = next(c for c in keras.Model.__mro__ if name in vars(c))
    stock = vars(owner)[name]

    @functools.wraps(stock)
    def dispatch(self, *args, **kwargs):
        if self is model:
            return method(*args, **kwargs)
        return stock(self, *args, **kwargs)

    setattr(owner, name, dispatch)
    try:
        yield
    finally:
        setattr(owner, name, stock)
