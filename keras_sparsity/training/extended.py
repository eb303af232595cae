"""The interface of a `tf.distribute.Strategy`, for one replica per process."""

import contextlib

import tensorflow as tf

from keras_sparsity._tf import patches, tf_graphs, xla
from keras_sparsity._tf.current_variable import make_current
from keras_sparsity.data import distribution, empty_parts
from keras_sparsity.global_batch import losses, random_states
from keras_sparsity.tables import control_flow, vectorized
from keras_sparsity.training import foresight, prefetching, unadopted

_REDUCE = {
    tf.distribute.ReduceOp.SUM: "sum",
    tf.distribute.ReduceOp.MEAN: "mean",
}


class ProcessStrategy(tf.distribute.Strategy):
    """A strategy of several processes, by its `collectives`.

    Attributes:
        rank: this process's number.
        size: the number of processes that compute. Dedicated servers do not:
            their ranks begin at `size`.
    """

    @property
    def rank(self):
        return self.collectives.rank

    @property
    def size(self):
        return self.collectives.num_workers

    def scope(self):
        unadopted.have_whole_input(ProcessStrategy)
        return super().scope()


_SAID_OF_ANOTHER = (
    "Mixing different tf.distribute.Strategy",
    "Must not nest tf.distribute.Strategy scopes",
)
_OF_ANOTHER = (
    "A function that `strategy.run` ran used an object of another strategy, or "
    "of none, for example a Keras optimizer made outside of "
    "`strategy.scope()`. Wrap it: "
    "`ks.HybridOptimizer(optimizer)`."
)


class HybridExtended(tf.distribute.StrategyExtended):
    """The interface that TensorFlow and Keras call, for one local replica.

    Args:
        container_strategy: the `ks.HybridStrategy`.
        communicator: `Collectives` of all processes.
        has_updates: whether optimizers update variables here, and not servers.
    """

    def __init__(self, container_strategy, communicator, has_updates=True):
        super().__init__(container_strategy)
        self._has_updates = has_updates
        self._strategy, self._collectives = container_strategy, communicator
        gpus = tf.config.list_logical_devices("GPU")
        self._device = gpus[0].name if gpus else "/device:CPU:0"

    # Variables: ordinary ones, on this process's device.

    def _create_variable(self, next_creator, **kwargs):
        kwargs.pop("colocate_with", None)  # there is one device only
        with tf.device(self._device):
            variable = next_creator(**kwargs)
        # It may become an `Embedding`'s, of which an optimizer keeps rows.
        is_matrix = variable.trainable and variable.shape.rank == 2
        return make_current(variable) if is_matrix else variable

    def _validate_colocate_with_variable(self, colocate_with_variable):
        del colocate_with_variable

    def read_var(self, replica_local_var):
        return tf.identity(replica_local_var)

    def _replica_ctx_update(self, var, fn, args=(), kwargs=None, group=True):
        # TensorFlow's would leave the step's context, and enter the strategy's
        # scope, for each variable.
        if tf.distribute.get_strategy() is not self._strategy:
            raise ValueError(_OF_ANOTHER)
        fn = tf_graphs.converted_by_autograph(fn)
        return self._update(var, fn, args, kwargs or {}, group)

    def _update(self, var, fn, args, kwargs, group):
        if not self._has_updates:
            raise ValueError(
                "Servers update the variables of models that `fit` trains. "
                "Received: an optimizer that was applied in this process, as "
                "in a custom loop, under a HybridStrategy with "
                'synchronous=False and delay="bounded": each process would '
                "train alone. Compile the model inside of `strategy.scope()` "
                "and call `fit`; a `train_step` may apply `model.optimizer` "
                "alone, and no second one. Or use a synchronous strategy."
            )
        # The rows that stand in for a table change in number.
        is_whole = isinstance(var, tf.Variable)
        with xla.compiled() if is_whole else contextlib.nullcontext():
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
            with tf.distribute.Strategy.scope(self._strategy):
                return self._call_for_each_replica(fn, args, kwargs or {})
        except RuntimeError as error:
            if not any(said in str(error) for said in _SAID_OF_ANOTHER):
                raise
            raise ValueError(_OF_ANOTHER) from error

    def _call_for_each_replica(self, fn, args, kwargs):
        context = tf.distribute.ReplicaContext(
            self._strategy,
            replica_id_in_sync_group=self._collectives.rank,
        )
        control_flow.begin_step(context)
        prefetching.tell_of_loop(self._strategy)
        with (
            tf.device(self._device),
            context,
            losses.of_global_batch(self._collectives),
            self._own_draws(),
            patches.current_rows_are_taken(),
            vectorized.maps_pull_before(self._collectives),
            self._without_examples_on_servers(),
            foresight.calls_pull_together(
                self._collectives, self._strategy.options
            ),
        ):
            return fn(*args, **kwargs)

    def _own_draws(self):
        """Context of a step, in which each rank computes another part."""
        if self._collectives.size == 1:
            return contextlib.nullcontext()
        return random_states.run_by_rank(self._collectives.rank)

    def _without_examples_on_servers(self):
        """Context of a step; nothing that a server computes counts."""
        if not self._collectives.is_server or empty_parts.current():
            return contextlib.nullcontext()
        counts = tf.zeros([1], tf.int32)
        part = empty_parts.Part(counts, self._collectives, is_of_run=True)
        return empty_parts.computing_on(part)

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
            value = empty_parts.of_examples(value)
        return self._reduce_all(reduce_op, value, "strategy/all_reduce")

    def _reduce_all(self, reduce_op, value, name):
        flat = tf.nest.flatten(value)
        if self._collectives.size > 1:
            flat = [self._counting(each) for each in flat]
            flat = self._reduce_flat(flat, _REDUCE[reduce_op], name)
        return tf.nest.pack_sequence_as(value, flat)

    def _counting(self, value):
        """A value to be reduced; a server adds nothing."""
        if not self._collectives.is_server:
            return value
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(
                value.values[:0], value.indices[:0], value.dense_shape
            )
        return tf.zeros_like(value)

    def _reduce_flat(self, flat, op, name):
        reduced = [None] * len(flat)
        dense = []
        for i, value in enumerate(flat):
            if isinstance(value, tf.IndexedSlices):
                reduced[i] = self._reduce_slices(value, op, f"{name}/rows")
            else:
                dense.append(i)
        tensors = [tf.convert_to_tensor(flat[i]) for i in dense]
        workers = self._collectives.num_workers
        is_of_all = op == "sum" or workers == self._collectives.size
        sums = self._collectives.all_reduce(
            tensors, op=op if is_of_all else "sum", name=name
        )
        for i, value in zip(dense, sums, strict=True):
            reduced[i] = value if is_of_all else value / workers
        return reduced

    def _reduce_slices(self, slices, op, name):
        values = slices.values
        if op == "mean":
            values = values / self._collectives.num_workers
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
        if self._collectives.is_server:
            shape = [*value.shape]
            shape[axis] = 0
            value = tf.zeros(shape, value.dtype)
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
        workers = self._collectives.num_workers
        context = tf.distribute.InputContext(
            num_input_pipelines=workers,
            # A server's dataset tells shapes alone.
            input_pipeline_id=self._collectives.rank % workers,
            num_replicas_in_sync=workers,
        )
        return distribution.own_parts(dataset_fn(context), self._collectives)

    def _experimental_distribute_values_from_function(self, value_fn):
        context = tf.distribute.experimental.ValueContext(
            replica_id_in_sync_group=self._collectives.rank,
            num_replicas_in_sync=self._collectives.num_workers,
        )
        return value_fn(context)

    # Facts.

    @property
    def _num_replicas_in_sync(self):
        return self._collectives.num_workers

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
