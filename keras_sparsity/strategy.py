"""The `tf.distribute.Strategy`: one replica in each process."""

import contextlib

import tensorflow as tf

from keras_sparsity import (
    adoption,
    architectures,
    checks,
    collectives,
    empty_parts,
    losses,
    metrics,
)
from keras_sparsity.data import distribution
from keras_sparsity.optimizer_arguments import checked_options
from keras_sparsity.tables import control_flow

_WIRE_DTYPES = ("float32", "bfloat16", "float16")
_REDUCE = {
    tf.distribute.ReduceOp.SUM: "sum",
    tf.distribute.ReduceOp.MEAN: "mean",
}


class HybridStrategy(tf.distribute.Strategy):
    """Data-parallel training that treats dense and sparse variables apart.

    Every process runs the same script and trains on its part of each global
    batch. Gradients of dense variables are all-reduced; rows of sharded
    tables are pulled from, pushed to and updated at the process that owns
    them.

    The processes are those that `keras-sparsity run`, `horovodrun` or
    `TF_CONFIG` have started; without any of them there is one, and the same
    script trains on it. Make the strategy first of all in the script, before
    TensorFlow runs its first operation (`keras-sparsity run` does it before
    the script starts).

    Args:
        engine: `"native"` (TensorFlow's own collectives), `"horovod"`,
            `"local"` (one process), or None to choose by how the process was
            started.
        sparse_updates, dense_aggregation, sparse_aggregation,
            transform_gradients: how `compile` wraps the optimizer, see
            `ks.HybridOptimizer`. One that is wrapped already keeps its own
            options; it is given `transform_gradients` if it has none. A
            custom loop gives them to `ks.HybridOptimizer` itself.
        architecture: how the variables of models that are compiled inside of
            the scope travel. A table that says it itself keeps that, see
            `ks.ShardedTable`.
            `"auto"`: dense gradients are all-reduced, and of each sharded
            table and each ordinary `Embedding` the way is found that takes
            the least time, in the first steps of `fit` and when its alpha
            drifts. Until then, and in a custom loop, it is `"hybrid"`.
            `"hybrid"`: dense gradients are all-reduced, sharded tables are on
            parameter servers, the rows of an ordinary `Embedding` are
            gathered from all ranks. Nothing is timed, so a run repeats
            another to the bit.
            And what these are compared with: `"allreduce"`, all gradients
            made dense and all-reduced; `"allgather"`, each rank has the
            whole tables, and gets the rows of all others; `"ps"`, dense
            gradients too go by way of servers, in one message;
            `"naive_ps"`, the same with nothing merged: a message for each
            variable, which one server has, and each id of the batch for
            itself.
        wire_dtype: `"bfloat16"` or `"float16"`: rows, their gradients and dense
            gradients are sent in it, in half of the bytes; sums are those of
            float32, at their owners. None: in their own dtype, and rows in
            that of a layer that computes in a narrower one. `"float16"` is
            finer, but what is above 65,504 becomes infinite.
        local_aggregation: whether the processes of a machine pull rows of
            sharded tables together, each row once, and add up its gradients
            before they push, where all of several machines have as many
            processes; and the same of dense gradients that travel in 16 bits
            or by servers. False to compare.
        bucket_bytes: dense gradients are all-reduced in messages of about so
            many bytes each, the last layers' first, so that they travel while
            those of the layers before are still computed. None: in one.
        prefetch: whether `fit` pulls rows of the next batch while it computes
            on this one. Those that this step may change come when the next
            one begins, the others behind this step's own, each once;
            the result is the same to the bit, whatever changes rows in
            between. It pays where computing leaves the network idle for long;
            where steps wait for the processors, or rows for the links, they
            take longer. It is done for tables whose ids are a functional or
            sequential model's inputs or made of them by operations, if the
            optimizer updates touched rows only (see `sparse_updates`).
            Otherwise, and in custom loops, on single batches, with input that
            Python makes (generators), with "naive_ps" and where machines pull
            together (see `local_aggregation`), rows are pulled when they are
            needed.
        timeout: seconds for which a rank may keep the others waiting (because
            it is stopped, hangs, or computes alone) before all of them are
            ended with a message on what each was doing; at least 5, and the
            same on all ranks. By default the environment's
            `KERAS_SPARSITY_TIMEOUT`, which `keras-sparsity run
            --rank-timeout` sets, else 600. A rank that dies, raises or calls
            something else than the others ends them within seconds.

    Attributes:
        collectives: `ks.collectives.Collectives` of all processes.
        rank, size: this process among them.

    Example:

    >>> import keras, keras_sparsity as ks
    >>> strategy = ks.HybridStrategy()
    >>> model = keras.Sequential([ks.layers.ShardedEmbedding(100, 8)])
    >>> with strategy.scope():
    ...     model.compile(optimizer="adagrad", loss="mse")
    >>> strategy.num_replicas_in_sync
    1

    References:
        EuroSys 3.1 (hybrid architecture), 4.3 (placement), Table 4 (the
        architectures that it is compared with).
    """

    def __init__(
        self,
        engine=None,
        sparse_updates="exact",
        dense_aggregation="mean",
        sparse_aggregation="mean",
        transform_gradients=None,
        architecture="auto",
        wire_dtype=None,
        local_aggregation=True,
        bucket_bytes=8 * 2**20,
        prefetch=False,
        timeout=None,
    ):
        architectures.check("architecture", architecture)
        self.architecture = architecture
        checks.check(
            wire_dtype is None
            or (isinstance(wire_dtype, str) and wire_dtype in _WIRE_DTYPES),
            "wire_dtype",
            wire_dtype,
            f"None or one of {', '.join(map(repr, _WIRE_DTYPES))}",
        )
        self.wire_dtype = wire_dtype
        checks.boolean("local_aggregation", local_aggregation)
        self.local_aggregation = bool(local_aggregation)
        if bucket_bytes is not None:
            checks.positive_integer(
                "bucket_bytes", bucket_bytes, ", or None for one message"
            )
        self.bucket_bytes = bucket_bytes
        checks.boolean("prefetch", prefetch)
        self.prefetch = bool(prefetch)
        self.optimizer_options = checked_options(
            sparse_updates=sparse_updates,
            dense_aggregation=dense_aggregation,
            sparse_aggregation=sparse_aggregation,
            transform_gradients=transform_gradients,
        )
        self.collectives = collectives.start(engine, timeout)
        super().__init__(_HybridExtended(self, self.collectives))

    @property
    def rank(self):
        return self.collectives.rank

    @property
    def size(self):
        return self.collectives.size

    @property
    def cluster_resolver(self):
        """Which worker this process is: `task_id` is its rank.

        For scripts that ask their strategy so who the chief is. The addresses
        are names only.
        """
        workers = [f"rank-{rank}" for rank in range(self.size)]
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": workers}),
            task_type="worker",
            task_id=self.rank,
        )

    @contextlib.contextmanager
    def scope(self):
        """Context in which `model.compile` makes a model distributed.

        Models compiled inside it (also by `keras.models.load_model`) train on
        all processes, wherever they were built. The results of metrics made
        inside it are those of all processes, wherever a custom loop asks for
        them outside of `run`; every process must ask. Here and in `run`, the
        value of a Keras loss object that reduces is that of the global batch.
        """
        with (
            super().scope(),
            adoption.compile_adopts(self),
            metrics.new_ones_are_global(self.collectives),
            losses.of_global_batch(self.collectives),
        ):
            yield self

    def shard(self, dataset):
        """This rank's part of a dataset of global batches, efficiently.

        See `ks.data.shard`. What it returns is given to `fit` as it is.
        """
        return distribution.shard(dataset, self.collectives)


def _of_examples(value):
    """What a rank adds, which is nothing where it has no examples."""
    if empty_parts.has_examples() is True:
        return value
    flat = tf.nest.flatten(value)
    selected = [
        empty_parts.cut_slices(each)
        if isinstance(each, tf.IndexedSlices)
        else empty_parts.selected([each])[0]
        for each in flat
    ]
    return tf.nest.pack_sequence_as(value, selected)


class _HybridExtended(tf.distribute.StrategyExtended):
    """What TensorFlow and Keras ask of a strategy, for one local replica."""

    def __init__(self, container_strategy, communicator):
        super().__init__(container_strategy)
        self._collectives = communicator
        gpus = tf.config.list_logical_devices("GPU")
        self._device = gpus[0].name if gpus else "/device:CPU:0"

    # Variables: ordinary ones, on this process's device.

    def _create_variable(self, next_creator, **kwargs):
        kwargs.pop("colocate_with", None)  # there is one device only
        with tf.device(self._device):
            return next_creator(**kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable):
        del colocate_with_variable

    def read_var(self, replica_local_var):
        return tf.identity(replica_local_var)

    def _update(self, var, fn, args, kwargs, group):
        return self._update_non_slot(var, fn, (var, *args), kwargs, group)

    def _update_non_slot(self, colocate_with, fn, args, kwargs, group):
        del colocate_with
        with tf.device(self._device):
            result = fn(*args, **kwargs)
            if group:
                return result
            return tf.nest.map_structure(self._local_results, result)

    # Running.

    def call_for_each_replica(self, fn, args=(), kwargs=None):
        try:
            with tf.distribute.Strategy.scope(self._container_strategy()):
                return self._call_for_each_replica(fn, args, kwargs or {})
        except RuntimeError as error:
            if "Mixing different tf.distribute.Strategy" not in str(error):
                raise
            raise ValueError(
                "`strategy.run` ran what another strategy, or none, has made: "
                "for example a Keras optimizer made outside of "
                "`strategy.scope()`. Wrap it: "
                "`ks.HybridOptimizer(optimizer)`."
            ) from error

    def _call_for_each_replica(self, fn, args, kwargs):
        context = tf.distribute.ReplicaContext(
            self._container_strategy(),
            replica_id_in_sync_group=self._collectives.rank,
        )
        control_flow.begin_step(context)
        with (
            tf.device(self._device),
            context,
            losses.of_global_batch(self._collectives),
        ):
            return fn(*args, **kwargs)

    def _use_merge_call(self):
        # Else ReplicaContext.all_reduce would go round the collectives.
        return False

    def _local_results(self, value):
        return (value,)

    def value_container(self, value):
        return value

    # Aggregation.

    def _reduce_to(self, reduce_op, value, destinations, options):
        del destinations, options
        return self._reduce_all(reduce_op, value, "strategy/reduce")

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        values = [value for value, _ in value_destination_pairs]
        del options
        return self._reduce_all(reduce_op, values, "strategy/batch_reduce")

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        del options
        if reduce_op == tf.distribute.ReduceOp.SUM:
            value = _of_examples(value)
        return self._reduce_all(reduce_op, value, "strategy/all_reduce")

    def _reduce_all(self, reduce_op, value, name):
        flat = tf.nest.flatten(value)
        if self._collectives.size > 1:
            flat = self._reduce_flat(flat, _REDUCE[reduce_op], name)
        return tf.nest.pack_sequence_as(value, flat)

    def _reduce_flat(self, flat, op, name):
        reduced = [None] * len(flat)
        dense = []
        for i, value in enumerate(flat):
            if isinstance(value, tf.IndexedSlices):
                reduced[i] = self._reduce_slices(value, op, f"{name}/rows")
            else:
                dense.append(i)
        tensors = [tf.convert_to_tensor(flat[i]) for i in dense]
        for i, value in zip(
            dense,
            self._collectives.all_reduce(tensors, op=op, name=name),
            strict=True,
        ):
            reduced[i] = value
        return reduced

    def _reduce_slices(self, slices, op, name):
        values = slices.values
        if op == "mean":
            values = values / self._collectives.size
        gather = self._collectives.all_gather
        return tf.IndexedSlices(
            gather(values, name=f"{name}/values"),
            gather(slices.indices, name=f"{name}/ids"),
            slices.dense_shape,
        )

    def _gather_to_implementation(self, value, destinations, axis, options):
        del destinations, options
        if self._collectives.size == 1:
            return value
        value = tf.convert_to_tensor(value)
        order = list(range(value.shape.rank))
        order[0], order[axis] = order[axis], order[0]
        gathered = self._collectives.all_gather(
            tf.transpose(value, order), name="strategy/gather"
        )
        return tf.transpose(gathered, order)

    def _broadcast_to(self, tensor, destinations):
        del destinations
        return tensor

    # Input.

    def _experimental_distribute_dataset(self, dataset, options):
        del options
        return distribution.distribute(dataset, self._collectives)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        del options
        context = tf.distribute.InputContext(
            num_input_pipelines=self._collectives.size,
            input_pipeline_id=self._collectives.rank,
            num_replicas_in_sync=self._collectives.size,
        )
        return distribution.mark_as_part(dataset_fn(context))

    def _experimental_distribute_values_from_function(self, value_fn):
        context = tf.distribute.experimental.ValueContext(
            replica_id_in_sync_group=self._collectives.rank,
            num_replicas_in_sync=self._collectives.size,
        )
        return value_fn(context)

    # Facts.

    @property
    def _num_replicas_in_sync(self):
        return self._collectives.size

    def _get_local_replica_id(self, replica_id_in_sync_group):
        del replica_id_in_sync_group
        return 0

    def _in_multi_worker_mode(self):
        # Keras would take this for MultiWorkerMirroredStrategy.
        return False

    @property
    def worker_devices(self):
        return (self._device,)

    @property
    def parameter_devices(self):
        return (self._device,)

    def non_slot_devices(self, var_list):
        del var_list
        return (self._device,)

    @property
    def experimental_between_graph(self):
        return False

    @property
    def experimental_should_init(self):
        return True

    @property
    def should_checkpoint(self):
        return self._collectives.rank == 0

    @property
    def should_save_summary(self):
        return self._collectives.rank == 0

    @property
    def _global_batch_size(self):
        return True

    @property
    def _support_per_replica_values(self):
        return False
