"""The workloads of ordinary `Embedding`s, synchronous or not.

An asynchronous `fit` has no steps of all processes: epochs are measured, each
from its beginning to the end of the last batch of any.
"""

import time

import _common
import keras
import tensorflow as tf
from peers import _stock

from keras_sparsity.layers.sampled_softmax_loss import losses_of_sample


class SampledSoftmax(_stock.SampledSoftmax):
    """As that of `_stock`, of rows of `Embedding`s."""

    def build(self, input_shape):
        # A class's row of the kernel, then its bias: one lookup of both.
        rows, dim = self.num_classes, input_shape[-1]
        self.classes = keras.layers.Embedding(rows, dim + 1, _initial_rows)
        self.classes.build()

    def call(self, hidden, training=None):
        if training:
            return hidden
        rows = tf.convert_to_tensor(self.classes.embeddings.value)
        kernel, bias = rows[:, :-1], rows[:, -1]
        return tf.einsum("...d,vd->...v", hidden, kernel) + bias

    def compute_output_spec(self, hidden, training=None):
        shape = hidden.shape
        if not training:
            shape = (*shape[:-1], self.num_classes)
        return keras.KerasTensor(shape, hidden.dtype)

    def _losses_of(self, labels, outputs):
        labels = tf.cast(labels, tf.int64)
        if outputs.shape[-1] == self.num_classes:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, outputs
            )
        own = tf.reshape(labels, [-1])
        hidden = tf.reshape(outputs, [-1, outputs.shape[-1]])
        sampled, own_count, counts = tf.random.log_uniform_candidate_sampler(
            own[:, tf.newaxis], 1, self.num_sampled, True, self.num_classes
        )
        rows = self.classes(tf.concat([own, sampled], 0))
        # Less to compute than by operations that take all logits together.
        losses = losses_of_sample(
            own,
            sampled,
            hidden,
            rows[:, :-1],
            rows[:, -1] - tf.math.log(tf.concat([own_count[:, 0], counts], 0)),
        )
        return tf.reshape(losses, tf.shape(labels))


def _initial_rows(shape, dtype=None):
    kernel = keras.initializers.GlorotUniform()((shape[0], shape[1] - 1), dtype)
    return keras.ops.pad(kernel, [(0, 0), (0, 1)])


KIT = _stock.KIT._replace(softmax=SampledSoftmax)


def fit(workload, held_out, args, window, collectives):
    """As `_common.fit`, of a model whose workers pull and push.

    `--steps` and `--every` are those of each worker, on average.
    """
    fitted = _fit_timed if held_out is None else _fit_to_target
    return fitted(workload, held_out, args, window, collectives)


def _fit_timed(workload, _, args, window, collectives):
    # All in one epoch, at whose end each process takes all weights. Behind the
    # last step there are batches for rank 0, which may not have the last one.
    size = collectives.size
    timed = _Timed(window, args, size)
    history = workload.model.fit(
        _batches(workload, args, (_common.num_steps(args) + 2) * size),
        callbacks=[timed] if collectives.rank == 0 else [],
        shuffle=False,
        verbose=0,
    ).history
    return {"loss": history["loss"][-1]}


class _Timed(keras.callbacks.Callback):
    """Measures by the numbers of the batches that rank 0 takes."""

    def __init__(self, window, args, size):
        super().__init__()
        self._window, self._size = window, size
        self._left = _common.measured(window, args, lambda name: None)
        self._next = next(self._left)

    def on_train_batch_end(self, batch, logs=None):
        if self._next is None or batch + 1 < self._next * self._size:
            return
        steps = next(self._left, None)
        self._next = None if steps is None else self._next + steps
        if self._next is None:
            self._window.limit(0)


def _fit_to_target(workload, held_out, args, window, collectives):
    callback = _Target(
        window,
        args.every,
        collectives,
        _common.Curve(args, workload, held_out),
    )
    window.limit(window.rates[0])
    workload.model.fit(
        _batches(workload, args, args.every * collectives.size),
        epochs=args.most_steps // args.every,
        validation_data=_common.dataset(
            *held_out,
            _common.HELD_OUT_BATCH,
            args.held_out // _common.HELD_OUT_BATCH,
        ),
        callbacks=[callback],
        shuffle=False,
        verbose=0,
    )
    window.idle()
    collectives.barrier("timed/idle")
    return callback.curve.figures()


def _batches(workload, args, number):
    """`tf.data` of batches, in each epoch others of the examples."""
    in_all = len(workload.y) // args.batch
    arrays = tf.nest.map_structure(tf.constant, (workload.x, workload.y))

    def take(index):
        index = index * args.batch + tf.range(args.batch, dtype="int64")
        return tf.nest.map_structure(lambda a: tf.gather(a, index), arrays)

    order = tf.data.Dataset.range(in_all).shuffle(in_all, seed=1)
    # Of measured steps there may be more than different examples.
    return order.repeat(-(-number // in_all)).take(number).map(take).prefetch(2)


class _Target(keras.callbacks.Callback):
    """Measures each epoch, and ends a `fit` at a target.

    From the beginning of an epoch, of the first one from the end of its first
    batch, to the end of the last batch of any worker.

    Args:
        window: `_network.Window`.
        num_steps: of an epoch, of each worker.
        collectives: `Collectives` of all ranks.
        curve: `_common.Curve`.
    """

    def __init__(self, window, num_steps, collectives, curve):
        super().__init__()
        self.window, self.collectives = window, collectives
        self._num_steps, self.curve = num_steps, curve

    def on_epoch_begin(self, epoch, logs=None):
        self._ended = 0
        self._is_first = epoch == 0  # which traces the model
        self.collectives.barrier("timed/begin")
        self.window.begin()

    def on_train_batch_end(self, batch, logs=None):
        if self._is_first and not self._ended:
            self.window.begin()
        self.window.end(self._num_steps - self._is_first)
        self._ended = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        gather = self.collectives.gather_objects
        if not self._ended:  # Others have taken all batches.
            self.window.end(self._num_steps - self._is_first)
        # One clock: all machines are this one.
        self.window.extend(max(gather(self._ended, "timed/end")))
        # The same on all, to the last bit.
        loss = gather(logs["val_loss"], "timed/loss")[0]
        num_timed = self._num_steps - self._is_first
        if self.curve.add(self.window.seconds, num_timed, loss):
            self.model.stop_training = True
