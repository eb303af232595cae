"""What the tests of the watch run in processes of their own.

Rank 1 does something that the other ranks do not.
"""

import builtins
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity.health import watch


def begin():
    """Notes the time from which the test counts."""
    print(f"BEGIN {time.time()}", file=sys.stderr, flush=True)
    return collectives.current()


def agree(pause_seconds):
    """Nothing is wrong; ranks are a little slower than the watch's rules."""
    ranks = begin()
    _traced(tf.ones([3]))
    if ranks.rank == 0:
        time.sleep(5)
    ranks.all_reduce([tf.ones([3])], name="late")
    if ranks.rank == 1:
        _stop(pause_seconds)
    ranks.all_reduce([tf.ones([3])], name="later")
    begin()
    if ranks.rank == 0:
        time.sleep(1)  # rank 1 waits for it, in no collective
    return "done"


def collect_garbage():
    """Nothing is wrong; each new object collects a `threading.local`.

    Also those that are made while the watch looks at the threads' frames.
    """
    ranks = begin()

    def leave_garbage(phase, info):
        if phase == "stop":
            garbage = [threading.local()]
            garbage.append(garbage)

    thresholds = gc.get_threshold()
    gc.callbacks.append(leave_garbage)
    gc.set_threshold(1)
    time.sleep(3)
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(leave_garbage)
    ranks.barrier("end")


def _stop(seconds):
    """Stops this process, for some seconds or for good."""
    if seconds:
        wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake])
    os.kill(os.getpid(), signal.SIGSTOP)


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
    """Also computes a while after it has begun to wait."""
    ranks = begin()

    @tf.function
    def step(x):
        for name in ("first", "second")[:: 1 if ranks.rank == 1 else -1]:
            x = ranks.all_reduce([x], name=name)[0]
        return x

    threading.Thread(target=_compute, args=(4,), daemon=True).start()
    step(tf.ones([3]))


def _compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


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


def go_on_after_an_error():
    """One rank's step fails before the others begin the call that it is in."""
    ranks, has_failed = begin(), threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: has_failed.set())
    first, *_ = ranks.gather_objects(os.getpid(), name="process")

    def fail_late():
        time.sleep(1)
        raise ValueError("no luck")

    @tf.function
    def step(x):
        if ranks.rank == 1:
            tf.numpy_function(fail_late, [], [])
        return ranks.all_reduce([x], name="late")

    while ranks.rank == 0 and not has_failed.wait(0.05):
        pass
    try:
        step(tf.ones([3]))
    except tf.errors.InvalidArgumentError:
        os.kill(first, signal.SIGUSR1)
        ranks.barrier("next step")


def stop(rank):
    """Also says how long the others wait, in place of the environment."""
    import keras_sparsity as ks

    strategy = ks.HybridStrategy(timeout=7)
    ranks = begin()
    if strategy.rank == rank:
        _stop(None)
    ranks.all_reduce([tf.ones([3])], name="late")


def suspend():
    """All are stopped together, for longer than one may be silent."""
    import keras_sparsity as ks

    ks.HybridStrategy(timeout=5)
    ranks = begin()
    ranks.barrier("all begun")
    _stop(9)
    time.sleep(1)
    ranks.barrier("all resumed")
    begin()


def fail_in_fit(how, rank):
    """Trains until one rank fails, in the middle of an epoch."""
    import keras

    import keras_sparsity as ks

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 19:
                # Before the step that all ranks make together: the others may
                # hear of the failure before theirs has ended.
                begin()
            if batch == 20 and strategy.rank == rank:
                fail()

    class Growing(keras.layers.Layer):
        """Needs as much memory as `num_needed` says."""

        def call(self, x):
            return x + tf.reduce_sum(tf.zeros([num_needed]))

    def fail():
        if how == "callback":
            raise ValueError("no such file: corpus.txt")
        if hasattr(signal, how):
            os.kill(os.getpid(), getattr(signal, how))
        if how in ("array", "tensor"):
            _limit_memory()
        if how == "array":
            np.ones([1 << 29])
        if how == "tensor":
            num_needed.assign(1 << 29)

    def read(position):
        if how in ("generator", "map") and strategy.rank == rank:
            if position == 60:
                raise ValueError("no such file: corpus.txt")
        return np.arange(40).reshape(10, 4), np.ones([10, 1], "float32")

    def load(position):
        read(position)
        return position

    def dataset():
        if how == "generator":
            return (read(position) for position in range(200))
        x, y = read(0)
        positions = tf.data.Dataset.range(200)
        if how == "map":
            positions = positions.map(
                lambda i: tf.ensure_shape(
                    tf.numpy_function(load, [i], tf.int64), []
                )
            )
        return positions.map(lambda i: (x + i % 50, y))

    strategy = ks.HybridStrategy()
    num_needed = tf.Variable(1, trainable=False)
    model = keras.Sequential(
        [
            ks.layers.ShardedEmbedding(100, 8),
            Growing(),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    with strategy.scope():
        model.compile("adam", "mse")
    model.fit(dataset(), epochs=10, verbose=0, callbacks=[Fail()])


def stand_still_in_fit(*workers):
    """Workers, or rank 1, are alive, but their callbacks wait for good."""
    import keras

    import keras_sparsity as ks

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            begin()  # a server, too

        def on_train_batch_end(self, batch, logs=None):
            begin()
            if strategy.rank in (workers or [1]):
                # Not before: a trace may take that long on a busy machine.
                watch.set_timeout(8)
                time.sleep(100)

    strategy = ks.HybridStrategy(synchronous=False, max_staleness=1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with strategy.scope():
        model.compile("sgd", "mse")
    x = np.ones((80, 4), "float32")
    model.fit(x, x[:, :1], 8, verbose=0, callbacks=[Stop()])


def catch_error_of_fit(kind="ValueError"):
    """An asynchronous worker's program goes on after an error of its own."""

    def fail(epoch, batch):
        if epoch == 0 and collectives.current().rank == 1:
            raise getattr(builtins, kind)(7)

    try:
        _fit_with(fail)
    except ValueError:
        pass


def catch_errors_of_all():
    """All leave `fit` by an error, and go on together."""

    def fail(epoch, batch):
        if epoch == 1:
            raise ValueError("enough")

    for _ in range(2):
        try:
            _fit_with(fail)
        except ValueError:
            pass


def _fit_with(begun):
    """Trains asynchronously; calls a function of the epoch and the batch.

    At the beginning of an epoch, on a server too, the batch is None.
    """
    import keras

    import keras_sparsity as ks

    class Begun(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            begin()
            self._epoch = epoch
            begun(epoch, None)

        def on_train_batch_end(self, batch, logs=None):
            begin()
            begun(self._epoch, batch)

    strategy = ks.HybridStrategy(synchronous=False, max_staleness=1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with strategy.scope():
        model.compile("sgd", "mse")
    x = np.ones((80, 4), "float32")
    model.fit(x, x[:, :1], 8, 2, verbose=0, callbacks=[Begun()])


def fail_in_pipeline(how, rank, schedule, messages_ahead=False):
    """Trains stages until one rank fails, in the middle of an epoch.

    Under a schedule, as many stages as ranks; or with heads on all workers if
    it is None.
    """
    import keras

    import keras_sparsity as ks

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            # Of a rank that stops, the last message may not arrive.
            if batch in (19, 20):
                begin()
            if batch == 20 and strategy.rank == rank:
                if how == "callback":
                    raise ValueError("no such file: corpus.txt")
                os.kill(os.getpid(), getattr(signal, how))

    # A rank that is stopped is waited for as long as the timeout says; on a
    # busy machine a trace may take that long, too.
    timeout = 7 if how == "SIGSTOP" else None
    if schedule:
        size = collectives.current().size
        strategy = ks.PipelineStrategy(
            *(schedule, ["first", "second"][: size - 1]),
            messages_ahead=messages_ahead,
            timeout=timeout,
        )
    else:
        strategy = ks.LayerPlacementStrategy(["first"], timeout=timeout)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, name="first"),
            keras.layers.Dense(8, name="second"),
            keras.layers.Dense(1),
        ]
    )
    with strategy.scope():
        model.compile("adam", "mse")
    x = np.ones((1600, 4), "float32")
    model.fit(x, x[:, :1], 8, epochs=10, verbose=0, callbacks=[Fail()])


def _limit_memory():
    """Leaves this process little more memory than it has."""
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    limit_bytes = used_bytes + (500 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


@tf.function(input_signature=[tf.TensorSpec([None])])
def _traced(x):
    return collectives.current().all_reduce([x], name="statistics")[0]
