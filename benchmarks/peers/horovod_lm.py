"""The language model of `workloads/lm.py`, as Horovod's documentation has it.

A custom loop with `hvd.DistributedGradientTape`: dense gradients by allreduce,
those of embeddings (`tf.IndexedSlices`) by allgather, or, with `--dense`, made
dense for allreduce. `--fp16` is Horovod's own compression. Horovod 0.28.1,
TensorFlow's own sampled softmax; nothing of keras_sparsity is in the step.

    python benchmarks/cluster.py --machines 4 --engine horovod \\
        benchmarks/peers/horovod_lm.py
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.append(os.path.join(sys.path[-1], "workloads"))

import _network
import _training
import horovod.tensorflow as hvd
import keras
import lm
import numpy as np
import tensorflow as tf


class Model(keras.Model):
    def __init__(self, args):
        super().__init__()
        shape = (args.vocabulary, args.dim)
        self.embedding = keras.layers.Embedding(*shape)
        self.lstm = keras.layers.LSTM(args.units, return_sequences=True)
        self.projection = keras.layers.Dense(args.dim)
        self.kernel = self.add_weight(shape=shape, name="kernel")
        self.bias = self.add_weight(
            shape=shape[:1], initializer="zeros", name="bias"
        )
        self.sampled = args.sampled

    def call(self, words):
        return self.projection(self.lstm(self.embedding(words)))

    def loss_of(self, words, labels):
        hidden = self(words)
        return tf.reduce_mean(
            tf.nn.sampled_softmax_loss(
                self.kernel.value,
                self.bias.value,
                tf.reshape(labels, [-1, 1]),
                tf.reshape(hidden, [-1, hidden.shape[-1]]),
                self.sampled,
                self.kernel.shape[0],
            )
        )


def meet():
    hvd.allreduce(tf.zeros([]), name="meet")


def main():
    parser = lm.options()
    add = parser.add_argument
    add("--batch", type=int, default=64, help="examples of each process")
    add("--steps", type=int, default=40, help="that count")
    add("--warm-up", type=int, default=10, help="steps before them")
    add("--dense", action="store_true", help="allreduce for embeddings, too")
    add("--fp16", action="store_true", help="Horovod's compression")
    args = parser.parse_args()

    hvd.init()
    model = Model(args)
    optimizer = keras.optimizers.Adagrad(0.05)
    compression = hvd.Compression.fp16 if args.fp16 else hvd.Compression.none

    @tf.function
    def step(words, labels):
        with tf.GradientTape() as tape:
            loss = model.loss_of(words, labels)
        tape = hvd.DistributedGradientTape(
            tape, compression=compression, sparse_as_dense=args.dense
        )
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply(gradients, variables)
        return loss

    count = args.batch * (args.warm_up + args.steps)
    text = _training.zipf(
        (count, args.time + 1),
        args.vocabulary,
        np.random.default_rng(hvd.rank()),
    )
    batches = np.split(text, args.warm_up + args.steps)
    window = _network.Window()
    for number, batch in enumerate(batches):
        loss = step(batch[:, :-1], batch[:, 1:])
        if number == 0:
            variables = model.trainable_variables + optimizer.variables
            hvd.broadcast_variables([v.value for v in variables], root_rank=0)
        if number + 1 == args.warm_up:
            meet()
            window.begin()
    meet()
    window.end()
    window.idle()
    meet()
    if hvd.rank() == 0:
        window.report(
            args.steps,
            args.time * args.batch * hvd.size(),
            engine="horovod's own way",
            workload=vars(args),
            loss=float(loss),
        )


if __name__ == "__main__":
    main()
