"""Keras's scopes without values. Checked on Keras 3.5 to 3.15."""


def is_tracing_shapes():
    """Whether Keras calls a layer only for its output's shape.

    `in_stateless_scope`, which TensorFlow's `compute_output_spec` enters.
    """
    from keras.src.backend.common import stateless_scope

    return stateless_scope.in_stateless_scope()


def in_symbolic_scope():
    """Whether Keras computes shapes only: no traced operation will run.

    `keras.src.backend.common.symbolic_scope`.
    """
    from keras.src.backend.common import symbolic_scope

    return symbolic_scope.in_symbolic_scope()
