"""A workload with tables, under TensorFlow's own `ParameterServerStrategy`.

A custom loop, as in TensorFlow's tutorial "Parameter server training with
ParameterServerStrategy": a coordinator schedules steps on workers; variables
are on servers, large ones cut by `MinSizePartitioner`. Each machine has its
workers and one server, the first machine the coordinator, too.

It is asynchronous: a worker reads the variables' current values, and no worker
waits for another. A reported step is one of each worker, on average. The other
peers are synchronous: compare words/s and bytes, not losses after a number of
steps. With `--target` the coordinator evaluates between steps.

Keras 3 does not support this strategy (keras#18624): a Keras variable cannot be
one of the strategy's. So the variables are TensorFlow's; embeddings and the
sampled softmax look them up on the servers (`tf.nn.embedding_lookup`,
`tf.nn.sampled_softmax_loss`), and the rest of the model is that of
`workloads/`, called with the values of the others (`stateless_call`). Adagrad
is TensorFlow's operation of that name, on the servers; a worker adds up a
row's gradients before it sends them. TensorFlow 2.18.1, Keras 3.15.1.

    python benchmarks/peers/parameter_server.py lm --machines 4 --rate 50

makes the emulated cluster itself, because it runs several programs there. Needs
root.
"""

import functools
import json
import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import _network
import _stock
import cluster
import keras
import tensorflow as tf
from workloads import _common

# One program of each kind per machine; workers count up.
CHIEF_PORT, SERVER_PORT, WORKER_PORT = 2000, 2100, 2200
# Workloads with tables. Others have batch statistics, which `stateless_call`
# leaves to the caller.
WORKLOADS = ("lm", "nmt", "recommender")


class Servers:
    """Makes variables on the parameter servers.

    Args:
        strategy: The strategy.

    Attributes:
        variables: List of the variables made so far, or of their pieces.
    """

    def __init__(self, strategy):
        self._strategy = strategy
        self.variables = []

    def make(self, value):
        with self._strategy.scope():
            variable = tf.Variable(value)
        self.variables += pieces(variable)
        return variable

    def make_table(self, initializer, shape):
        return self.make(keras.initializers.get(initializer)(shape))

    def kit(self):
        embedding = functools.partial(Embedding, self)
        return _common.Kit(
            embedding,
            _stock.Bag.of(embedding),
            functools.partial(SampledSoftmax, self),
        )


def pieces(variable):
    """The pieces that the strategy has cut a variable into."""
    return list(getattr(variable, "variables", [variable]))


class Embedding(keras.layers.Layer):
    """Looks rows up on the servers.

    Args:
        servers: `Servers`.
        num_rows, dim: Of the table.
        name: Of the layer.
    """

    def __init__(self, servers, num_rows, dim, name):
        super().__init__(name=name)
        self._dim = dim
        self._table = servers.make_table("uniform", (num_rows, dim))

    def call(self, ids):
        return tf.nn.embedding_lookup(self._table, ids)

    def compute_output_spec(self, ids):
        return keras.KerasTensor((*ids.shape, self._dim))


class SampledSoftmax(_stock.SampledSoftmax):
    """The same with rows on the servers.

    Args:
        servers: `Servers`.
        num_classes, num_sampled: Of all and of a sample.
    """

    def __init__(self, servers, num_classes, num_sampled):
        super().__init__(num_classes, num_sampled)
        self._servers = servers

    def build(self, input_shape):
        classes, dim = self.num_classes, input_shape[-1]
        make = self._servers.make_table
        self._kernel = make("glorot_uniform", (classes, dim))
        self._bias = make("zeros", (classes,))

    def compute_output_spec(self, hidden, training=None):
        return keras.KerasTensor(hidden.shape, hidden.dtype)

    def call(self, hidden, training=None):
        if training:
            return hidden
        kernel, bias = (tf.concat(p, 0) for p in self.weights_and_biases())
        return tf.einsum("...d,vd->...v", hidden, kernel) + bias

    def weights_and_biases(self):
        return pieces(self._kernel), pieces(self._bias)


class Adagrad:
    """Keras's, by TensorFlow's operations on the servers.

    Args:
        strategy: The strategy.
        variables: List.
        optimizer: `keras.optimizers.Adagrad`, of which it takes the numbers.
    """

    def __init__(self, strategy, variables, optimizer):
        self._numbers = {
            "lr": float(optimizer.learning_rate),
            "epsilon": optimizer.epsilon,
        }
        self._accumulators = []
        for variable in variables:
            start = tf.fill(variable.shape, optimizer.initial_accumulator_value)
            # Beside its variable.
            with strategy.extended.colocate_vars_with(variable):
                self._accumulators.append(tf.Variable(start))

    def apply(self, gradients, variables):
        for gradient, variable, accumulator in zip(
            gradients, variables, self._accumulators, strict=True
        ):
            arguments = {
                "var": variable.handle,
                "accum": accumulator.handle,
                **self._numbers,
            }
            if isinstance(gradient, tf.IndexedSlices):
                # Here, on the worker.
                rows, index = tf.unique(gradient.indices)
                gradient = tf.math.unsorted_segment_sum(
                    gradient.values, index, tf.size(rows)
                )
                with tf.device(variable.device):
                    tf.raw_ops.ResourceSparseApplyAdagradV2(
                        **arguments, grad=gradient, indices=rows
                    )
            else:
                with tf.device(variable.device):
                    tf.raw_ops.ResourceApplyAdagradV2(
                        **arguments, grad=gradient
                    )


class Coordinator:
    """Schedules a workload's steps on the workers.

    Args:
        module: The workload's.
        args: Of the command line.
        num_workers, num_servers: How many.
    """

    def __init__(self, module, args, num_workers, num_servers):
        partitioners = tf.distribute.experimental.partitioners
        strategy = tf.distribute.ParameterServerStrategy(
            tf.distribute.cluster_resolver.TFConfigClusterResolver(),
            partitioners.MinSizePartitioner(max_shards=num_servers),
        )
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(
            strategy
        )
        self._num_workers = num_workers
        servers = Servers(strategy)
        workload, self._held_out = _common.made(
            module, servers.kit(), args, num_workers
        )
        self.workload, model = workload, workload.model
        loss_of = keras.losses.get(workload.loss)
        dense = [servers.make(v.numpy()) for v in model.trainable_variables]
        # Seeds, which nothing draws from.
        others = [v.numpy() for v in model.non_trainable_variables]
        self._variables = servers.variables
        with strategy.scope():
            optimizer = Adagrad(strategy, self._variables, workload.optimizer)

        def on_worker(x, y):
            with tf.GradientTape() as tape:
                values = [tf.convert_to_tensor(v) for v in dense]
                outputs, _ = model.stateless_call(
                    values, others, x, training=True
                )
                loss = tf.reduce_mean(loss_of(y, outputs))
            gradients = tape.gradient(loss, self._variables)
            optimizer.apply(gradients, self._variables)
            return loss

        @tf.function
        def loss_of_held_out(x, y):
            values = [tf.convert_to_tensor(v) for v in dense]
            outputs, _ = model.stateless_call(values, others, x)
            return tf.reduce_mean(loss_of(y, outputs))

        @tf.function
        def step(iterator):
            return strategy.run(on_worker, args=next(iterator))

        def batches():
            # Each worker in an order of its own, as the tutorial has it.
            examples = tf.data.Dataset.from_tensor_slices(
                (workload.x, workload.y)
            )
            examples = examples.shuffle(len(workload.y)).repeat()
            return examples.batch(args.batch).prefetch(2)

        self._step, self._loss_of_held_out = step, loss_of_held_out
        self._batches = iter(
            self._coordinator.create_per_worker_dataset(batches)
        )

    def train(self, num_steps):
        """So many steps of each worker, on average; returns the mean loss."""
        losses = [
            self._coordinator.schedule(self._step, args=(self._batches,))
            for _ in range(num_steps * self._num_workers)
        ]
        self._coordinator.join()
        return float(tf.reduce_mean(self._coordinator.fetch(losses)))

    def loss(self):
        """Of the held-out examples, all classes; computed here."""
        batches = _common.dataset(
            *self._held_out,
            _common.HELD_OUT_BATCH,
            len(self._held_out[1]) // _common.HELD_OUT_BATCH,
        )
        losses = [self._loss_of_held_out(*batch) for batch in batches]
        return float(tf.reduce_mean(losses))

    def until_target(self, args, window):
        """Trains to a target; returns the figures of `_common.fit`."""
        curve = _common.Curve(args, self.workload, self._held_out)
        window.limit(window.rates[0])
        self.train(1)  # which traces the model
        for epoch in range(args.most_steps // args.every):
            num_steps = args.every - (epoch == 0)
            window.begin()
            self.train(num_steps)
            window.end(num_steps)
            if curve.add(window.seconds, num_steps, self.loss()):
                break
        window.idle()
        return curve.figures()

    def num_parameters(self):
        return sum(v.shape.num_elements() for v in self._variables)


def coordinate(module, args, cluster_spec):
    num_workers, num_servers = (
        len(cluster_spec[job]) for job in ("worker", "ps")
    )
    window = _network.Window()
    window.open()
    coordinator = Coordinator(module, args, num_workers, num_servers)
    # `train` ends when all steps are done: no need to wait for each other.
    if args.target is None:
        for num_steps in _common.measured(window, args, lambda name: None):
            figures = {"loss": coordinator.train(num_steps)}
    else:
        figures = coordinator.until_target(args, window)
    window.report(
        coordinator.workload.words * args.batch * num_workers,
        engine="TensorFlow's parameter servers, asynchronous",
        workload=vars(args),
        num_parameters=coordinator.num_parameters(),
        **figures,
    )


def serve(task):
    """A worker or a parameter server, until it is ended."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=task["type"],
        task_index=task["index"],
        protocol="grpc",
    ).join()


def on_cluster(args):
    """Starts all on an emulated cluster; returns the chief's figures."""
    with cluster.Cluster(
        args.machines, args.processes, args.rate, args.delay, args.mtu
    ) as machines:
        addresses = machines.addresses
        jobs = {
            "chief": [(0, f"{addresses[0]}:{CHIEF_PORT}")],
            "ps": [(m, f"{a}:{SERVER_PORT}") for m, a in enumerate(addresses)],
            "worker": [
                (machine, f"{address}:{WORKER_PORT + index}")
                for machine, address in enumerate(addresses)
                for index in range(args.processes)
            ],
        }
        spec = {job: [a for _, a in tasks] for job, tasks in jobs.items()}
        commands = []
        for job, tasks in jobs.items():
            for index, (machine, _) in enumerate(tasks):
                task = {"type": job, "index": index}
                config = json.dumps({"cluster": spec, "task": task})
                command = [sys.executable, *sys.argv]
                commands.append((machine, command, {"TF_CONFIG": config}))
        return machines.run_commands(commands)


def main():
    module, args = _stock.parse(__doc__, cluster.options)
    if module.__name__ not in WORKLOADS:
        sys.exit(f"parameter_server.py trains {', '.join(WORKLOADS)}.")
    if "TF_CONFIG" in os.environ:
        config = json.loads(os.environ["TF_CONFIG"])
        if config["task"]["type"] == "chief":
            coordinate(module, args, config["cluster"])
        else:
            serve(config["task"])
        return
    try:
        figures = on_cluster(args)
    except cluster.ClusterError as error:
        sys.exit(f"parameter_server.py: {error}")
    cluster.finish(figures, "parameter_server.py")


if __name__ == "__main__":
    main()
