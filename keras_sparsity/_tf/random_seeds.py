"""Random seeds. Checked on TensorFlow 2.16 to 2.21, Keras 3.5 to 3.15."""

import contextlib

import tensorflow as tf

from keras_sparsity._tf import patches


def global_seed():
    """TensorFlow's global random seed; None if it was not set.

    `DEFAULT_GRAPH_SEED` stands for a seed that was not set.
    """
    from tensorflow.python.framework import random_seed

    seed = tf.compat.v1.get_seed(0)[0]
    return None if seed == random_seed.DEFAULT_GRAPH_SEED else seed


def is_global(generator):
    """Whether a `SeedGenerator` is that of operations without a seed."""
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute(_global_name()) is generator


def _global_name():
    from keras.src.random import seed_generator

    # Keras 3.5 has no such constant.
    return getattr(
        seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator"
    )


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

    name = _global_name()
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


def array_orders_change(seed):
    """Keras shuffles arrays anew in each epoch, though the seed is fixed.

    TensorFlow restarts a seeded operation in a dataset's function with every
    iteration, so `fit(x, y)` repeats one order as soon as a seed is set.
    While entered, the datasets that Keras makes of arrays draw from `seed`, the
    same on all ranks, and a count of their iterations; None changes nothing.
    """
    if seed is None:
        return contextlib.nullcontext()

    def make(stock):
        def get_tf_dataset(self):
            with tf.device("CPU:0"):
                count = tf.Variable(0, dtype=tf.int64, trainable=False)

            def shuffle(values):
                number = count.assign_add(1)
                return tf.random.experimental.stateless_shuffle(
                    values, seed=[tf.constant(seed, tf.int64), number]
                )

            with patches.SHUFFLE.by(lambda stock: shuffle):
                dataset = stock(self)
            dataset._keras_sparsity_count = count  # keeps it alive
            return dataset

        return get_tf_dataset

    return patches.ARRAY_DATASET.by(make)
