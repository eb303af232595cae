"""What the tests of the watch run in processes of their own.

Rank 1 does something that the other ranks do not.
"""

import os
import signal
import sys
import time

import numpy as np
import tensorflow as tf

from keras_sparsity import collectives


def begin():
    """Notes the time from which the test counts."""
    print(f"BEGIN {time.time()}", file=sys.stderr, flush=True)
    return collectives.current()


def agree():
    """Nothing is wrong; rank 0 is a little slower than the watch's rules."""
    ranks = begin()
    _traced(tf.ones([3]))
    if ranks.rank == 0:
        time.sleep(5)
    ranks.all_reduce([tf.ones([3])], name="late")
    if ranks.rank == 0:
        time.sleep(1)  # rank 1 waits for it, in no collective
    return "done"


def call_another_operation():
    ranks = begin()
    if ranks.rank == 1:
        ranks.all_gather(tf.ones([3]), name="statistics")
    else:
        ranks.all_reduce([tf.ones([3])], name="statistics")


def call_another_operation_traced():
    ranks = begin()

    @tf.function
    def step(x):
        if ranks.rank == 1:
            return ranks.all_gather(x, name="statistics")
        return ranks.all_reduce([x], name="statistics")[0]

    step(tf.ones([3]))


def call_in_another_order_traced():
    ranks = begin()

    @tf.function
    def step(x):
        for name in ("first", "second")[:: 1 if ranks.rank == 1 else -1]:
            x = ranks.all_reduce([x], name=name)[0]
        return x

    step(tf.ones([3]))


def send_another_shape():
    ranks = begin()
    ranks.all_reduce([tf.ones([3 + ranks.rank])], name="statistics")


def send_another_shape_traced():
    """The shapes are known at run time only."""
    _traced(tf.ones([3]))
    begin()
    _traced(tf.ones([3 + collectives.current().rank]))


def send_another_dtype():
    ranks = begin()
    dtype = tf.float64 if ranks.rank == 1 else tf.float32
    ranks.all_reduce([tf.ones([3], dtype)], name="statistics")


def call_alone():
    ranks = begin()
    if ranks.rank == 1:
        ranks.all_reduce([tf.ones([3])], name="alone")
    ranks.barrier("end of epoch")


def end_early():
    ranks = begin()
    if ranks.rank != 1:
        ranks.all_reduce([tf.ones([3])], name="late")


def end_early_by_exit():
    ranks = begin()
    if ranks.rank == 1:
        sys.exit(0)
    ranks.all_reduce([tf.ones([3])], name="late")


def raise_error():
    ranks = begin()
    if ranks.rank == 1:
        raise ValueError("no such file: corpus.txt")
    ranks.all_reduce([tf.ones([3])], name="late")


def raise_while_others_compute():
    ranks = begin()
    ranks.barrier("all begun")
    time.sleep(1)
    if ranks.rank == 1:
        raise ValueError("no such file: corpus.txt")
    time.sleep(100)


def swallow_error():
    """A program that goes on after an error still ends with it."""
    ranks = begin()
    if ranks.rank == 1:
        sys.exit(7)
    try:
        ranks.all_reduce([tf.ones([3])], name="late")
    except collectives.CollectiveError:
        pass


def stop():
    ranks = begin()
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    ranks.all_reduce([tf.ones([3])], name="late")


def kill_in_fit(rank):
    """Trains until one rank kills itself in the middle of an epoch."""
    import keras

    import keras_sparsity as ks

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 20:
                begin()
            if batch == 20 and strategy.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)

    strategy = ks.HybridStrategy()
    model = keras.Sequential(
        [
            ks.layers.ShardedEmbedding(100, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    with strategy.scope():
        model.compile("adam", "mse")
    ids = np.arange(4000).reshape(-1, 4) % 100
    model.fit(ids, ids[:, :1] / 100, 10, 1000, 0, [Kill()])


@tf.function(input_signature=[tf.TensorSpec([None])])
def _traced(x):
    return collectives.current().all_reduce([x], name="statistics")[0]
