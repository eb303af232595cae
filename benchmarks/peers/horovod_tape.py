"""A workload, trained as Horovod's documentation recommends.

A custom loop with `hvd.DistributedGradientTape`, after Horovod's example
tensorflow2_mnist.py: dense gradients by allreduce, those of embeddings
(`tf.IndexedSlices`) by allgather, or, with `--dense`, made dense for allreduce
(`sparse_as_dense`, which the documentation recommends where that is faster);
variables of rank 0 for all after the first step. `--fp16` is Horovod's own
compression; Horovod 0.28.1 compresses sums, not gathered rows, so that without
`--dense` rows still travel in 32 bits.

The model is that of `workloads/`, of stock Keras 3 layers and TensorFlow's
sampled softmax, with the same data, batch and optimizer; the step does not use
keras_sparsity. Unlike in the example, the learning rate is not multiplied by
the number of processes, as ours is not. Keras's optimizers apply duplicate rows
of `IndexedSlices` one by one: Adagrad's accumulator gets the sum of their
squares, not the square of their sum. Variables are TensorFlow's own (`.value`),
as Horovod's tape takes no Keras 3 variables. After four steps from the same
weights its weights are those of `HybridStrategy`, to rounding: under SGD
always, under Adagrad where gradients are dense
(`tests/benchmarks/test_peers.py`). Horovod 0.28.1, TensorFlow 2.18.1, Keras
3.15.1.

    python benchmarks/cluster.py --machines 4 --engine horovod \\
        benchmarks/peers/horovod_tape.py lm --steps 40

No script here may be called `horovod.py`: a rank imports Horovod with the
script's folder first on its path.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import _network
import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from peers import _stock
from workloads import _common


class Trainer:
    """Trains a workload's model on this process's part of each batch.

    Args:
        workload: Of stock layers.
        batch: Examples of this process.
        dense: Whether embeddings' gradients are made dense.
        fp16: Whether sums are compressed.
    """

    def __init__(self, workload, batch, dense=False, fp16=False):
        self._workload, self._batch = workload, batch
        self._losses = []
        model, optimizer = workload.model, workload.optimizer
        self._loss_of = keras.losses.get(workload.loss)
        compression = hvd.Compression.fp16 if fp16 else hvd.Compression.none

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = self._loss(x, y, training=True)
            tape = hvd.DistributedGradientTape(
                tape, compression=compression, sparse_as_dense=dense
            )
            variables = model.trainable_variables
            gradients = tape.gradient(loss, [v.value for v in variables])
            optimizer.apply(gradients, variables)
            return loss

        self._step = step
        self._test = tf.function(self._loss)

    def train(self, num_steps):
        for _ in range(num_steps):
            start = len(self._losses) * hvd.size() + hvd.rank()
            x, y = _common.examples(
                self._workload.x,
                self._workload.y,
                start * self._batch,
                self._batch,
            )
            self._losses.append(self._step(x, y))
            if len(self._losses) == 1:
                variables = [
                    *self._workload.model.variables,
                    *self._workload.optimizer.variables,
                ]
                hvd.broadcast_variables(
                    [v.value for v in variables], root_rank=0
                )

    def held_out_loss(self, x, y):
        """That of all examples, of which each process takes a part."""
        own = slice(hvd.rank(), None, hvd.size())
        x, y = tf.nest.map_structure(lambda array: array[own], (x, y))
        number = max(1, _common.HELD_OUT_BATCH // hvd.size())
        total = 0.0
        for start in range(0, len(y), number):
            count = min(number, len(y) - start)
            total += count * float(
                self._test(*_common.examples(x, y, start, count))
            )
        sums = tf.constant([total, float(len(y))])
        total, count = hvd.allreduce(sums, name="held_out")
        return float(total / count)

    def mean_loss(self):
        """That of all steps and processes."""
        mean = tf.reduce_mean(self._losses)
        return float(hvd.allreduce(mean, name="mean_loss"))

    def _loss(self, x, y, training=False):
        outputs = self._workload.model(x, training=training)
        return tf.reduce_mean(self._loss_of(y, outputs))


def meet(name="meet"):
    """Returns when all processes call it."""
    hvd.allreduce(tf.zeros([]), name=name)


def _train_to_target(trainer, workload, held_out, args, window):
    curve = _common.Curve(args, workload, held_out)
    trainer.train(1)
    window.limit(window.rates[0])
    num_timed = args.every - 1
    for _ in range(args.most_steps // args.every):
        meet()
        window.begin()
        trainer.train(num_timed)
        meet()
        window.end(num_timed)
        loss = trainer.held_out_loss(*held_out)
        if curve.add(window.seconds, num_timed, loss):
            break
        num_timed = args.every
    return curve


def _options(add):
    add("--dense", action="store_true", help="allreduce for embeddings, too")
    add("--fp16", action="store_true", help="Horovod's compression")


def main():
    module, args = _stock.parse(__doc__, _options)
    hvd.init()
    window = _network.Window(is_first=hvd.rank() == 0)
    window.open()
    workload, held_out = _common.made(module, _stock.KIT, args, hvd.size())
    trainer = Trainer(workload, args.batch, args.dense, args.fp16)
    if held_out is None:
        for num_steps in _common.measured(window, args, meet):
            trainer.train(num_steps)
        figures = {"loss": trainer.mean_loss()}
    else:
        curve = _train_to_target(trainer, workload, held_out, args, window)
        figures = curve.figures()
        window.idle()
    meet()
    window.report(
        workload.words * args.batch * hvd.size(),
        engine="horovod's own way",
        workload=vars(args),
        num_parameters=workload.num_parameters(),
        **figures,
    )


if __name__ == "__main__":
    main()
