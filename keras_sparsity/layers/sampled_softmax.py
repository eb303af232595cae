"""Softmax over a large number of classes, of which training samples a few."""

import collections

import keras
import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity._tf import checks
from keras_sparsity.exchange import options
from keras_sparsity.exchange.together import (
    gather_side_by_side,
    gather_together,
    travel_side_by_side,
)
from keras_sparsity.layers import shared_layers, tied
from keras_sparsity.layers.candidate_sampler import (
    LogUniformSampler,
    Sample,
    checked_numbers,
    checked_seed,
)
from keras_sparsity.layers.full_logits import full_logits
from keras_sparsity.layers.sampled_softmax_loss import (
    ORIGIN,
    SampledSoftmaxLoss,
    losses_of_sample,
)
from keras_sparsity.tables import foreseen, initial_values
from keras_sparsity.tables.arguments import check_spreading
from keras_sparsity.tables.inside import check_inside
from keras_sparsity.tables.sharded_table import ShardedTable

# Under this name the sampler's state is saved, beside the weights.
_SAMPLER = "sampler"


@keras.saving.register_keras_serializable(package="keras_sparsity")
class SampledSoftmax(keras.layers.Layer):
    """The output layer of a model with very many classes, and its loss.

    In training, the softmax runs over each example's own class and over
    `num_sampled` random ones, the same for the whole batch, so that a step
    touches a few rows of the weights. Those are sharded tables (see
    `ks.ShardedTable`). With the hidden state h of an example of class c, the
    sample S and Q(k) the expected count of class k in S, the loss is

        -log(exp(z(c)) / sum over k in {c} and S \\ {c} of exp(z(k))),
        z(k) = h . kernel[k] + bias[k] - log Q(k)

    Taking off log Q makes its gradient that of the full softmax, but for the
    sampling. Low ids are sampled more often: number the classes from frequent
    to rare.

    In training (`training=True`, as in `fit`) the layer passes the hidden
    states on and `loss()` does the rest. Otherwise it returns the logits of
    all classes, and the loss is their crossentropy. It must be the last layer
    before the loss. Metrics of the logits (such as accuracy) mean nothing in
    training, where there are none.

    Args:
        num_classes: number of classes; labels are 0 to `num_classes` - 1.
        num_sampled: number of classes in a sample.
        use_bias: whether the classes have a bias.
        kernel_initializer: initializer of the kernel, of shape
            `(num_classes, dim)`. The bias starts at zero.
        seed: int, seed of the samples; by default a random one.
        num_partitions: of both tables; by default the number of processes.
        partition_group: of both tables, see `ShardedEmbedding`.
        architecture: `"ps"`, `"allgather"`, `"allreduce"` or `"auto"`, see
            `ks.ShardedTable`; by default the strategy's.
        table: a `ShardedEmbedding` with `num_classes` rows of length `dim`:
            its table is the kernel, too (tied weights), a single variable.
            Where a step knows the labels before it calls the model (`fit`,
            with the `train_step` of Keras), a row that both layers need
            travels once, and the sum of its gradients. The bias is spread as
            the table is: the initializer, partitions and architecture are
            those of `table`.
        **kwargs: `name`, `dtype`, `trainable`, as for every layer.

    Input shape:
        `(batch, ..., dim)`.

    Output shape:
        `(batch, ..., num_classes)`; in training, that of the input. Its dtype
        is float32 also under mixed precision.

    Raises:
        ValueError: if an argument has another type or value, if `num_sampled`
            is more than `num_classes`, if `num_classes` is more than 2**24
            (Keras hands labels to losses as float32), if `table` is no
            `ShardedEmbedding` of `num_classes` rows, or if the last dimension
            of the input is unknown, or not that of `table`.
        tf.errors.InvalidArgumentError: in a step, on every rank, if a label
            of any rank is no class.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from keras_sparsity.layers import ShardedEmbedding
    >>> softmax = SampledSoftmax(num_classes=1000, num_sampled=20)
    >>> hidden, labels = np.ones((2, 5, 8)), np.zeros((2, 5))
    >>> softmax(hidden).shape
    TensorShape([2, 5, 1000])
    >>> loss = softmax.loss()
    >>> loss(labels, softmax(hidden, training=True)).shape
    TensorShape([])

    A language model whose output layer has the weights of its embedding:

    >>> words = ShardedEmbedding(1000, 8)
    >>> model = keras.Sequential([
    ...     keras.Input((5,), dtype="int32"),
    ...     words,
    ...     keras.layers.LSTM(8, return_sequences=True),
    ...     SampledSoftmax(1000, num_sampled=20, table=words),
    ... ])
    >>> [tuple(v.shape) for v in model.trainable_variables]
    [(1000, 8), (8, 32), (8, 32), (32,), (1000, 1)]

    References:
        Press and Wolf, Using the Output Embedding to Improve Language Models,
        EACL 2017 (tied weights). Jean et al., On Using Very Large Target
        Vocabulary for Neural Machine Translation, ACL 2015, section 3.
        EuroSys 6.1 (the language model).
    """

    def __init__(
        self,
        num_classes,
        num_sampled,
        use_bias=True,
        kernel_initializer="glorot_uniform",
        seed=None,
        num_partitions=None,
        partition_group=None,
        architecture=None,
        table=None,
        **kwargs,
    ):
        # Hidden states of 32 bits stay so under mixed precision.
        super().__init__(autocast=False, **kwargs)
        num_classes, num_sampled = checked_numbers(num_classes, num_sampled)
        checks.boolean("use_bias", use_bias)
        num_partitions = check_spreading(
            num_partitions, partition_group, architecture
        )
        if table is not None:
            tied.check_table(table, num_classes)
            tied.check_is_all(
                kernel_initializer=kernel_initializer != "glorot_uniform",
                num_partitions=num_partitions is not None,
                partition_group=partition_group is not None,
                architecture=architecture is not None,
            )
            table.share()
        self.num_classes = num_classes
        self.num_sampled = num_sampled
        self.use_bias = use_bias
        self.kernel_initializer = initial_values.standardize(
            kernel_initializer, "kernel_initializer"
        )
        self.seed = checked_seed(seed)
        self.num_partitions = num_partitions
        self.partition_group = partition_group
        self.architecture = architecture
        self.supports_masking = True
        self.sampler = LogUniformSampler(num_classes, num_sampled, self.seed)
        # The `ShardedEmbedding`; the tables' names end in `_table`.
        self.table = table
        self.kernel_table = self.bias_table = None
        # Of the call that is under way: a `Sample` and its rows, where these
        # were gathered with others.
        self.ahead = collections.deque()

    def build(self, input_shape):
        dim = input_shape[-1]
        if len(input_shape) < 2 or dim is None:
            raise ValueError(
                f"The layer '{self.name}' needs inputs `(batch, ..., dim)` "
                f"with a known last dimension. Received: {input_shape}."
            )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: dim})
        if self.table is None:
            self.kernel_table = self._own_table(
                "kernel", dim, self.kernel_initializer, self, tf.transpose
            )
            self._kernel = self.kernel_table.variable
        else:
            tied.check_dim(self.table, dim, self.name)
            self.table.build()
            self.kernel_table = self.table.table
        if self.use_bias:
            self.bias_table = self._own_table(
                "bias",
                1,
                "zeros",
                self if self.table is None else self.table,
                lambda bias: bias[:, 0],
            )
            self.bias = self.bias_table.variable
        for table in self._own_tables:  # as in `ShardedEmbedding.build`
            table.variable.trainable = self.trainable
        self._agree_on_samples()

    def _own_table(self, name, dim, initializer, spread_as, to_stock):
        return ShardedTable(
            self.num_classes,
            dim,
            num_partitions=spread_as.num_partitions,
            architecture=spread_as.architecture,
            initializer=initializer,
            dtype=self.variable_dtype,
            name=name,
            owner_name=self.name if name == "kernel" else f"{self.name}/{name}",
            to_stock=to_stock,
            partition_group=spread_as.partition_group,
        )

    def _agree_on_samples(self):
        communicator = collectives.current()
        if communicator.size == 1:
            return
        with tf.init_scope():
            state = self.sampler.state
            (agreed,) = communicator.broadcast(
                [tf.cast(state.value, tf.int64)], name=f"{self.name}/sampler"
            )
            state.assign(tf.cast(agreed, state.dtype))

    @property
    def kernel(self):
        """The `keras.Variable` of shape `(num_classes, dim)`."""
        return self.kernel_table.variable

    @property
    def tables(self):
        """The tables of the weights, in their order."""
        return [t for t in (self.kernel_table, self.bias_table) if t]

    @property
    def _own_tables(self):
        """Those that no other layer has."""
        return self.tables if self.table is None else self.tables[1:]

    @property
    def output_dtype(self):
        """Of hidden states and logits: losses need more than 16 bits."""
        is_double = self.compute_dtype == "float64"
        return "float64" if is_double else "float32"

    def call(self, inputs, training=None):
        hidden = tf.cast(inputs, self.output_dtype)
        if training:
            # A tensor of its own, which alone is marked.
            outputs = tf.identity(hidden)
        else:
            shape = tf.concat([tf.shape(hidden)[:-1], [self.num_classes]], 0)
            dim = hidden.shape[-1]
            logits = full_logits(tf.reshape(hidden, [-1, dim]), *self.tables)
            outputs = tf.reshape(logits, shape)
            outputs.set_shape([*hidden.shape[:-1], self.num_classes])
        ahead = [self.ahead.popleft()] if training and self.ahead else []
        setattr(outputs, ORIGIN, (self, bool(training), ahead))
        return outputs

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.num_classes)

    def compute_output_spec(self, inputs, training=None):
        shape = inputs.shape
        if not training:
            shape = self.compute_output_shape(shape)
        return keras.KerasTensor(shape, dtype=self.output_dtype)

    def loss(self, reduction="sum_over_batch_size"):
        """The loss to compile a model with that ends in this layer.

        Args:
            reduction: as for every `keras.losses.Loss`.
        """
        return SampledSoftmaxLoss(reduction=reduction, dtype=self.output_dtype)

    def sampled_losses(self, labels, hidden, ahead=None):
        """Losses over the next sample.

        Args:
            labels: int64 `(n,)`.
            hidden: `(n, dim)`.
            ahead: list of a `Sample` and its rows, where these were gathered
                before; they are taken from it.

        Returns:
            `(n,)` losses.
        """
        if ahead:
            sample, (rows, *biases) = ahead.pop()
        else:
            sample = self.sample(labels)
            rows, *biases = self._gather(sample.ids)
        counts = self.sampler.expected_count(sample.ids, sample.num_tries)
        offsets = tf.cast(-tf.math.log(counts), hidden.dtype)
        for bias in biases:
            offsets += bias[:, 0]
        return losses_of_sample(labels, sample.classes, hidden, rows, offsets)

    def sample(self, labels):
        """The next `Sample`, for labels int64 `(n,)`."""
        return Sample.of(labels, *self.sampler.sample())

    def following(self, labels):
        """The `Sample` after that, of the next step's labels."""
        return Sample.of(labels, *self.sampler.following())

    def may_come_with_others(self):
        """Whether its rows may come when those of other layers do."""
        return self.table is not None or travel_side_by_side(self.tables)

    def asked(self, ids):
        """How the rows of `ids` come with those of other layers.

        Returns:
            List of requests, and `then`, as `gather_together` takes them.
        """
        if self.table is None:
            return [], (self.tables, ids, self.output_dtype)
        # With rows of the same table that others ask for.
        dtype = self.output_dtype
        return [(table, ids, dtype) for table in self.tables], None

    def _gather(self, ids):
        """Rows of all tables, in as few messages as one table's."""
        requests, then = self.asked(ids)
        of_strategy = options.entered()
        if then:
            return gather_side_by_side(*then, of_strategy)
        return foreseen.completed(
            requests, lambda others: gather_together(others, of_strategy)[0]
        )

    def full_losses(self, labels, logits):
        """Crossentropy `(n,)` of labels `(n,)`, logits `(n, num_classes)`."""
        with tf.control_dependencies([logits]):  # which have come by then
            checked = check_inside(self.kernel_table, labels)
        with tf.control_dependencies(checked):
            return tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=labels, logits=logits
            )

    def save_own_variables(self, store):
        for index, table in enumerate(self._own_tables):
            store[str(index)] = table.read()
        # Keras does not save its seed generators' states.
        store[_SAMPLER] = self.sampler.state.numpy()

    def load_own_variables(self, store):
        num_saved = len(set(store.keys()) - {_SAMPLER})
        if num_saved != len(self._own_tables):
            raise ValueError(
                f"The layer '{self.name}' cannot take the saved weights. "
                f"Received: {num_saved} arrays. Expected: "
                f"{len(self._own_tables)}. Build the layer, with the "
                "`use_bias` and `table` that it was saved with, before loading."
            )
        for index, table in enumerate(self._own_tables):
            table.assign(store[str(index)][...])
        if _SAMPLER in store.keys():
            self.sampler.state.assign(store[_SAMPLER][...])

    def get_config(self):
        config = {
            **super().get_config(),
            "num_classes": self.num_classes,
            "num_sampled": self.num_sampled,
            "use_bias": self.use_bias,
            "seed": self.seed,
        }
        if self.table is not None:
            table = keras.saving.serialize_keras_object(self.table)
            return {**config, "table": table}
        return {
            **config,
            "kernel_initializer": keras.initializers.serialize(
                self.kernel_initializer
            ),
            "num_partitions": self.num_partitions,
            "partition_group": self.partition_group,
            "architecture": self.architecture,
        }

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        if "table" in config:
            with shared_layers.made_for(config["name"]):
                config["table"] = keras.saving.deserialize_keras_object(
                    config["table"]
                )
        return super().from_config(config)
