"""Copies of models, object by object, with some of the objects replaced.

Keras clones a model from its configuration. That needs registered classes with
`get_config`, and runs a layer's constructor again, which makes the sublayers
to be replaced again. A copy of the objects needs neither.
"""

import collections
import functools
import types

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_models, keras_variables, tracking

# Each instance has a state of its own.
_STATEFUL = (
    keras.Operation,
    keras.Metric,
    keras.Optimizer,
    keras.KerasTensor,
    keras.random.SeedGenerator,
    tf.Variable,
)
# Objects of these packages hold no layers, and are not searched.
_FOREIGN = ("tensorflow", "tensorboard", "numpy", "h5py", "threading", "wrapt")
_CONTAINERS = (list, dict, set, collections.deque)


class Copier:
    """Copies objects, each once, with the references between them.

    Layers, variables and metrics are copied, and all objects that refer to
    them: containers, closures, bound methods, the user's own objects. The
    original and the copy share everything else.

    Attributes:
        functions: list of the functions that were searched for references.

    Args:
        replace: function of this copier and an object with state, which
            returns the object in its place, or None to copy it.
        is_replaced: function of an object without state, for example a loss:
            whether `replace` is called for it too.
    """

    def __init__(self, replace, is_replaced=lambda value: False):
        self._replace, self._is_replaced = replace, is_replaced
        # By id; the originals too, so that no other object takes over an id.
        self._copies = {}
        self._inert = {}
        # Functions still to be called, those of the first queue first.
        self._queues = [collections.deque() for _ in range(3)]
        self._pending, self._tracked, self._last = self._queues
        self.functions = []

    def copy(self, value):
        """The copy of an object and of all that it refers to."""
        copied = self.reference(value)
        while queue := next(filter(None, self._queues), None):
            queue.popleft()()
        return copied

    def remember(self, original, copy):
        """Has references to the original refer to `copy`."""
        self._copies[id(original)] = original, copy
        return copy

    def afterwards(self, original, function):
        """Calls `function` with the copy of an object, once it is complete."""
        self._last.append(lambda: function(self._copies[id(original)][1]))

    def known(self):
        """List of `(original, copy)`."""
        return list(self._copies.values())

    def put_in_place(self, layer, original):
        """Gives a new layer the place of another in a graph of operations."""
        self.remember(original, layer)
        for name in keras_models.LAYER_PLACE:
            if name in vars(original):
                owned = self._owned(vars(original)[name])
                # A plain list: Keras's own knows its tracker once it is
                # complete, and the layer may be called before.
                is_list = isinstance(owned, list)
                vars(layer)[name] = list(owned) if is_list else owned

    def reference(self, value):
        """The copy of an object, complete once `copy` returns."""
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if self._is_stateful(value):
            replaced = self._replace(self, value)
            if replaced is not None:
                return self.remember(value, replaced)
            return self._with_state(value)
        return self._made(value) if self._reaches(value) else value

    def _owned(self, value):
        """The copy of an attribute of an object with state."""
        is_container = isinstance(value, _CONTAINERS)
        return self._made(value) if is_container else self.reference(value)

    def _is_stateful(self, value):
        return (
            isinstance(value, _STATEFUL)
            or keras_variables.is_variable(value)
            or tracking.is_tracker(value)
            or self._is_replaced(value)
        )

    # Whether an object refers to anything that is copied.

    def _reaches(self, value):
        seen, stack = {}, [value]
        while stack:
            current = stack.pop()
            if id(current) in seen or id(current) in self._inert:
                continue
            if self._is_stateful(current):
                return True
            seen[id(current)] = current
            if isinstance(current, types.FunctionType):
                self.functions.append(current)
            stack.extend(_references(current))
        self._inert.update(seen)
        return False

    # Copies by kind.

    def _with_state(self, value):
        if isinstance(value, tf.Variable):
            return self.remember(value, keras_variables.variable_like(value))
        copied = self.remember(value, object.__new__(type(value)))
        if keras_variables.is_variable(value):
            vars(copied).update(keras_variables.variable_state(value))
        else:
            self._pending.append(lambda: self._fill(copied, value))
        return copied

    def _fill(self, copied, value):
        left_out = (
            keras_models.COMPILE_STATE if isinstance(value, keras.Model) else {}
        )
        state = {}
        for name, attribute in vars(value).items():
            if name in left_out or name.startswith("_keras_sparsity"):
                continue
            if tracking.is_tracker(value) and name == "config":
                state[name] = {
                    kind: (test, self._made(store))
                    for kind, (test, store) in attribute.items()
                }
                continue
            is_bound = is_of_this_package(attribute)
            while is_of_this_package(attribute):  # one around another
                attribute = attribute.__wrapped__
            if is_bound and _is_of_class(attribute, value, name):
                continue
            if tracking.is_dependency_of_tensorflow(name):
                state[name] = type(attribute)()
                self._last.append(
                    functools.partial(self._refill, state[name], attribute)
                )
                continue
            state[name] = self._owned(attribute)
            if tracking.tracked_by_tensorflow(attribute) is not None:
                self._tracked.append(
                    functools.partial(self._track, copied, name, attribute)
                )
        vars(copied).update({**state, **left_out})
        self._last.append(
            lambda: tracking.renew_ids(
                copied, lambda known: id(self._copies[known][1])
            )
        )

    def _refill(self, copied, container):
        """Fills a container with the objects that TensorFlow now tracks."""
        if isinstance(container, dict):
            owned = {key: self._owned(item) for key, item in container.items()}
            copied.update(owned)
        else:
            copied.extend(map(self._owned, container))

    def _track(self, copied, name, container):
        """Has TensorFlow track a container's copy as it does the container."""
        vars(copied)[name] = self.remember(
            container, tracking.track_by_tensorflow(vars(copied)[name])
        )

    def _made(self, value):
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        plain = tracking.tracked_by_tensorflow(value)
        if plain is not None:
            return self.remember(value, self._made(plain))
        if isinstance(value, _CONTAINERS):
            return self._container(value)
        if isinstance(value, tuple):
            items = map(self._owned, value)
            return self.remember(value, tuple.__new__(type(value), items))
        if isinstance(value, types.MethodType):
            owner = self.reference(value.__self__)
            function = self.reference(value.__func__)
            return self.remember(value, types.MethodType(function, owner))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            return self.remember(
                value,
                functools.partial(
                    self.reference(value.func),
                    *self._owned(value.args),
                    **self._owned(value.keywords),
                ),
            )
        try:
            copied = object.__new__(type(value))
        except TypeError:  # a subclass of a class in C
            return value
        self._pending.append(lambda: self._fill(copied, value))
        return self.remember(value, copied)

    def _container(self, value):
        copied = self.remember(value, type(value).__new__(type(value)))
        if isinstance(value, dict):
            if isinstance(value, collections.defaultdict):
                copied.default_factory = value.default_factory
            is_ordered = isinstance(value, collections.OrderedDict)
            put = (collections.OrderedDict if is_ordered else dict).__setitem__
            for key, item in value.items():
                put(copied, self._owned(key), self._owned(item))
        elif isinstance(value, list):
            list.extend(copied, map(self._owned, value))
        elif isinstance(value, collections.deque):
            copied.extend(map(self._owned, value))
        else:
            set.update(copied, map(self._owned, value))
        if hasattr(value, "__dict__"):  # Keras's, which know their tracker
            self._pending.append(lambda: self._fill(copied, value))
        return copied

    def _function(self, value):
        closure = value.__closure__ and tuple(
            map(self._cell, value.__closure__)
        )
        copied = types.FunctionType(
            value.__code__,
            value.__globals__,
            value.__name__,
            value.__defaults__,
            closure,
        )
        self.remember(value, copied)
        self.functions.append(value)

        def fill():
            for name in ("__defaults__", "__kwdefaults__"):
                setattr(copied, name, self.reference(getattr(value, name)))
            for name in ("__qualname__", "__doc__", "__module__"):
                setattr(copied, name, getattr(value, name))
            for name, attribute in vars(value).items():
                setattr(copied, name, self.reference(attribute))

        self._pending.append(fill)
        return copied

    def _cell(self, cell):
        if id(cell) in self._copies:
            return self._copies[id(cell)][1]
        copied = self.remember(cell, types.CellType())

        def fill():
            if _is_filled(cell):
                copied.cell_contents = self.reference(cell.cell_contents)

        self._pending.append(fill)
        return copied


def _references(value):
    """The objects that an object without state of its own refers to."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, set, tuple, collections.deque)):
        return value
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        cells = [c for c in value.__closure__ or () if _is_filled(c)]
        return [
            *(cell.cell_contents for cell in cells),
            value.__defaults__,
            value.__kwdefaults__,
            vars(value),
        ]
    is_closed = (
        isinstance(value, (type, types.ModuleType, tf.distribute.Strategy))
        or not hasattr(value, "__dict__")
        or type(value).__module__.partition(".")[0] in _FOREIGN
    )
    return [] if is_closed else [vars(value)]


def _is_filled(cell):
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_of_this_package(value):
    """Whether this package has bound a method, around the stock one."""
    return (
        isinstance(value, types.FunctionType)
        and hasattr(value, "__wrapped__")
        and value.__globals__["__name__"].startswith("keras_sparsity.")
    )


def _is_of_class(method, owner, name):
    """Whether a bound method is that of the object's class."""
    function = getattr(method, "__func__", None)
    return function is not None and function is getattr(type(owner), name, None)
