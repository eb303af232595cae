"""`keras.layers.Embedding` over a sharded table."""

import collections

import keras
import tensorflow as tf

from keras_sparsity._tf import checks
from keras_sparsity.exchange.pull import shaped
from keras_sparsity.layers import shared_layers
from keras_sparsity.tables import initial_values
from keras_sparsity.tables.arguments import check_spreading
from keras_sparsity.tables.sharded_table import ShardedTable

_NOT_QUANTIZED = (
    "Quantization is not supported by ShardedEmbedding. `ks.export(model)` "
    "gives a model of stock layers that can be quantized."
)


@keras.saving.register_keras_serializable(package="keras_sparsity")
class ShardedEmbedding(keras.layers.Embedding):
    """`keras.layers.Embedding` whose rows are spread over the processes.

    Takes the place of `keras.layers.Embedding`: the same arguments, the same
    weights, the same results. With several processes each one stores and
    updates only its part of the table (see `ks.ShardedTable`). In one process
    it is an ordinary layer.

    An id outside `[0, input_dim)` is an error, on every rank. (Stock Keras
    reads the last row for -1.)

    Args:
        input_dim: number of rows.
        output_dim: length of a row.
        embeddings_initializer, embeddings_regularizer, embeddings_constraint,
        mask_zero, weights: as in `keras.layers.Embedding`. Over several
            processes, regularizers must add up over rows (L1, L2, L1L2) and
            constraints act on each row by itself (`axis=1`).
        num_partitions: number of partitions of the table; by default the
            number of processes. The result of training depends on it by
            rounding only.
        partition_group: tables with the same one get the same number of
            partitions from `ks.callbacks.PartitionSearch`.
        architecture: `"ps"`, `"allgather"`, `"allreduce"` or `"auto"`, see
            `ks.ShardedTable`; by default the strategy's.
        **kwargs: `name`, `dtype`, `trainable`, as for every layer.

    Input shape:
        Integer tensor `(batch, ...)`.

    Output shape:
        `(batch, ..., output_dim)`.

    Raises:
        ValueError: if an argument has another type or value (`lora_rank`,
            `lora_alpha` and `quantization_config` must be None), if ids are
            not integers, or, over several processes, if a regularizer or a
            constraint needs the whole table.
        tf.errors.InvalidArgumentError: in a step, on every rank, if an id of
            any rank is outside `[0, input_dim)`.

    Example:

    >>> import numpy as np
    >>> layer = ShardedEmbedding(1000, 8)
    >>> layer(np.array([[4, 20]])).shape
    TensorShape([1, 2, 8])

    References:
        EuroSys 3.2 and 4.3.
    """

    def __init__(
        self,
        input_dim,
        output_dim,
        embeddings_initializer="uniform",
        embeddings_regularizer=None,
        embeddings_constraint=None,
        mask_zero=False,
        weights=None,
        num_partitions=None,
        partition_group=None,
        architecture=None,
        **kwargs,
    ):
        for name in ("lora_rank", "lora_alpha", "quantization_config"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(
                    f"`{name}` is not supported by ShardedEmbedding. Use "
                    "`keras.layers.Embedding` for this layer."
                )
        input_dim = checks.dimension("input_dim", input_dim)
        output_dim = checks.dimension("output_dim", output_dim)
        checks.boolean("mask_zero", mask_zero)
        num_partitions = check_spreading(
            num_partitions, partition_group, architecture
        )
        if embeddings_initializer is not None:
            embeddings_initializer = initial_values.standardize(
                embeddings_initializer, "embeddings_initializer"
            )
        super().__init__(
            input_dim,
            output_dim,
            embeddings_initializer=embeddings_initializer,
            embeddings_regularizer=checks.keras_object(
                "embeddings_regularizer",
                embeddings_regularizer,
                keras.regularizers.get,
                "None, a Keras regularizer or its name ('l2')",
            ),
            embeddings_constraint=checks.keras_object(
                "embeddings_constraint",
                embeddings_constraint,
                keras.constraints.get,
                "None, a Keras constraint or its name ('non_neg')",
            ),
            mask_zero=mask_zero,
            **kwargs,
        )
        if self.dtype_policy.quantization_mode is not None:
            raise ValueError(_NOT_QUANTIZED)
        self.num_partitions = num_partitions
        self.partition_group = partition_group
        self.architecture = architecture
        self.table = None
        # Rows of the call that is under way, a list of one tensor, where they
        # were gathered with other tables'.
        self.ahead = collections.deque()
        # In configurations; None if no other layer uses the table.
        self._shared_as = None
        if weights is not None:
            self._take(weights)

    def _take(self, weights):
        """Begins with an array, or with that in a list of one, as Keras's."""
        self.build()
        if isinstance(weights, list) and len(weights) == 1:
            (weights,) = weights
        shape = (self.input_dim, self.output_dim)
        if getattr(weights, "shape", None) != shape:
            raise ValueError(
                f"`weights` must be an array of shape {shape}, or a list "
                f"of one. Received: {checks.spell(weights)}."
            )
        self.set_weights([weights])

    def build(self, input_shape=None):
        if self.built:
            return
        self.table = ShardedTable(
            self.input_dim,
            self.output_dim,
            num_partitions=self.num_partitions,
            architecture=self.architecture,
            initializer=self.embeddings_initializer,
            regularizer=self.embeddings_regularizer,
            constraint=self.embeddings_constraint,
            dtype=self.variable_dtype,
            name="embeddings",
            owner_name=self.name,
            partition_group=self.partition_group,
        )
        # Keras keeps a frozen layer's weight among those that may train.
        self._embeddings = self.table.variable
        self._embeddings.trainable = self.trainable
        self.built = True

    def call(self, inputs):
        if isinstance(inputs, tf.RaggedTensor):
            return tf.ragged.map_flat_values(self._rows, inputs)
        return self._rows(inputs)

    @property
    def _tables(self):
        """List of the tables of which a call gathers rows."""
        return [self.table]

    def _requests(self, inputs):
        """List of the `(table, ids, dtype)` that a call gathers."""
        return [(self.table, ids_of(inputs), self.compute_dtype)]

    def share(self):
        """Has the copies of this layer and of its users share a table too."""
        self._shared_as = self._shared_as or shared_layers.name_for(self)

    def _rows(self, ids):
        ids = ids_of(ids)
        if self.ahead:
            (rows,) = self.ahead.popleft()
            return shaped(rows, ids)
        return self.table.gather(ids, dtype=self.compute_dtype)

    def enable_lora(self, *args, **kwargs):
        raise ValueError(
            "LoRA is not supported by ShardedEmbedding. Use "
            "`keras.layers.Embedding` for this layer."
        )

    def quantize(self, *args, **kwargs):
        raise ValueError(_NOT_QUANTIZED)

    def save_own_variables(self, store):
        if self.built:
            store["0"] = self.table.read()

    def load_own_variables(self, store):
        if "0" in store.keys():
            self.build()
            self.table.assign(store["0"][...])
        elif self.built:
            raise ValueError(
                f"The layer '{self.name}' needs a table. Received: a file "
                "without one for this layer, as Keras finds layers by their "
                "classes. Load the weights of `keras.layers.Embedding`s into "
                "the model with these, and train the copy that "
                "`ks.shard_embeddings(model)` makes."
            )

    def get_config(self):
        config = super().get_config()
        for name in ("lora_rank", "lora_alpha", "quantization_config"):
            config.pop(name, None)
        config["num_partitions"] = self.num_partitions
        config["partition_group"] = self.partition_group
        config["architecture"] = self.architecture
        if self._shared_as is not None:
            config[shared_layers.KEY] = self._shared_as
        return config

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        name = config.pop(shared_layers.KEY, None)
        if name is None:
            return super().from_config(config)
        make = super().from_config
        layer = shared_layers.made(name, lambda: make(config))
        layer._shared_as = name
        return layer


def ids_of(inputs):
    """The flat or dense ids of a layer's inputs, as integers."""
    if isinstance(inputs, tf.RaggedTensor):
        inputs = inputs.flat_values
    elif isinstance(inputs, tf.SparseTensor):
        inputs = tf.sparse.to_dense(inputs)
    ids = checks.tensor("inputs", inputs, "a tensor or array of ids")
    if ids.dtype.is_floating or ids.dtype.is_bool:  # as stock Keras does
        ids = tf.cast(ids, tf.int32)
    return ids
