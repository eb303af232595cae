"""Keras's scopes without values. Checked on Keras 3.5 to 3.15."""

import contextlib

import keras


def is_tracing_shapes():
    """Whether Keras calls a layer only for its output's shape.

    `in_stateless_scope`, which TensorFlow's `compute_output_spec` enters.
    """
    from keras.src.backend.common import stateless_scope

    return stateless_scope.in_stateless_scope()


def is_given(variable):
    """Whether a `keras.StatelessScope` gives another value of a variable."""
    from keras.src.backend.common import stateless_scope

    scope = stateless_scope.get_stateless_scope()
    return scope is not None and scope.get_current_value(variable) is not None


def called_model():
    """The `keras.Model` of which a call is under way, or None.

    The outermost one: `CallContext.entry_layer`.
    """
    from keras.src.backend.common import global_state

    context = global_state.get_global_attribute("current_call_ctx")
    layer = getattr(context, "entry_layer", None)
    return layer if isinstance(layer, keras.Model) else None


def without_autocast():
    """Context in which variables are read in their own dtypes.

    `AutocastScope`, which layers enter with the dtype that they compute in.
    """
    from keras.src.backend.common import variables

    return variables.AutocastScope(None)


@contextlib.contextmanager
def tracing_shapes(on_update=lambda: None):
    """While entered, layers are called without effects on their state.

    As Keras calls them for the shapes of their outputs.

    Args:
        on_update: function that is called in place of each assignment.
    """
    from keras.src.backend.common import stateless_scope, symbolic_scope

    class Scope(stateless_scope.StatelessScope):
        def add_update(self, update):
            on_update()
            super().add_update(update)

    with Scope(), symbolic_scope.SymbolicScope():
        yield


def in_symbolic_scope():
    """Whether Keras computes shapes only: no traced operation will run.

    `keras.src.backend.common.symbolic_scope`.
    """
    from keras.src.backend.common import symbolic_scope

    return symbolic_scope.in_symbolic_scope()
