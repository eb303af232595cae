"""Random seeds. Checked on TensorFlow 2.16 to 2.21, Keras 3.5 to 3.15."""

import contextlib

import tensorflow as tf


def global_seed():
    """TensorFlow's global random seed; None if it was not set.

    `DEFAULT_GRAPH_SEED` stands for a seed that was not set.
    """
    from tensorflow.python.framework import random_seed

    seed = tf.compat.v1.get_seed(0)[0]
    return None if seed == random_seed.DEFAULT_GRAPH_SEED else seed


@contextlib.contextmanager
def random_operations_seeded(change):
    """While entered, random operations without a seed get a changed seed.

    This holds for `tf.random.normal(shape)`, in the graph being traced or
    eagerly, and `keras.random.normal(shape)`. Later draws stay as they are.

    `context()._seed`; `GLOBAL_SEED_GENERATOR`, `global_seed_generator`.

    Args:
        change: function of a seed, an integer or an integer tensor.
    """
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator
    from tensorflow.python.eager import context

    # Keras 3.5 has no such constant.
    name = getattr(
        seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator"
    )
    own = global_state.get_global_attribute(name)

    class Changed:
        def next(self, ordered=True):
            nonlocal own
            global_state.set_global_attribute(name, own)
            own = seed_generator.global_seed_generator()
            global_state.set_global_attribute(name, self)
            return change(own.next(ordered))

    owner, attribute = context.context(), "_seed"
    if not tf.executing_eagerly():
        owner, attribute = tf.compat.v1.get_default_graph(), "seed"
    seed = getattr(owner, attribute)
    if seed is not None:  # else it is drawn
        setattr(owner, attribute, change(seed))
    global_state.set_global_attribute(name, Changed())
    try:
        yield
    finally:
        global_state.set_global_attribute(name, own)
        setattr(owner, attribute, seed)
