"""The embeddings of several features, whose rows travel together."""

import collections

import keras
import tensorflow as tf

from keras_sparsity._tf import checks
from keras_sparsity.exchange import options
from keras_sparsity.exchange.pull import shaped
from keras_sparsity.exchange.together import gather_together
from keras_sparsity.layers import bags, shared_layers
from keras_sparsity.layers.features import features_of, items
from keras_sparsity.layers.sharded_embedding import ids_of
from keras_sparsity.tables import foreseen


@keras.saving.register_keras_serializable(package="keras_sparsity")
class ShardedEmbeddingCollection(keras.layers.Layer):
    """Embeddings of several features, in one exchange for all tables.

    In any model, subclassed, with a `train_step` of its own, and in a custom
    loop, a call of the collection sends as many messages for many tables as
    for one; rows that several features ask for travel once. A functional model
    needs no collection: `ShardedEmbedding`s share its messages by themselves.

    Tables of several dtypes, and frozen ones, travel in messages of their own.

    Args:
        features: dict or list of the features: of each the
            `ShardedEmbedding` of its table, which several features may share.
            Or objects with the attributes of keras-rs's `FeatureConfig`: its
            `table` has `name`, `vocabulary_size`, `embedding_dim`,
            `initializer` and `combiner`; `input_shape`, `output_shape` and
            `placement` are not needed. A table's own `optimizer` is refused.
        combiners: dict or list of features' combiners, `"sum"`, `"mean"` or
            `"sqrtn"` (see `ShardedEmbeddingBag`). A feature without one, or
            with None, keeps a row for each id; of a `FeatureConfig`, its
            table's is the default.
        **kwargs: `name`, `dtype`, `trainable`, as for every layer. Rows have
            the compute dtype of their `ShardedEmbedding`.

    Call arguments:
        inputs: ids of all features, in the structure of `features`: dense
            tensors, `tf.RaggedTensor`s or `tf.SparseTensor`s, as
            `ShardedEmbedding` and, with a combiner, `ShardedEmbeddingBag`
            take them. With a combiner, ids `(batch,)` are bags of one id.
        weights: dict or list of weights of some features' ids, as
            `ShardedEmbeddingBag` takes them; None for no weights.

    Returns:
        Dict or list of tensors: `(..., dim)` of ids `(...)`; with a combiner,
        of ids `(..., k)`.

    Raises:
        ValueError: if an argument has another type or value, if inputs lack
            features or have others, or if a feature without a combiner has
            weights; else as `ShardedEmbedding`.
        tf.errors.InvalidArgumentError: as `ShardedEmbedding`.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparsity as ks
    >>> items = ks.layers.ShardedEmbedding(100, 4)
    >>> collection = ks.layers.ShardedEmbeddingCollection(
    ...     {
    ...         "user": ks.layers.ShardedEmbedding(10, 8),
    ...         "item": items,
    ...         "seen": items,
    ...     },
    ...     combiners={"seen": "mean"},
    ... )
    >>> rows = collection(
    ...     {
    ...         "user": np.array([1, 2]),
    ...         "item": np.array([7, 7]),
    ...         "seen": np.array([[3, 4, 5], [7, 3, 3]]),
    ...     }
    ... )
    >>> [(name, tuple(rows[name].shape)) for name in rows]
    [('user', (2, 8)), ('item', (2, 4)), ('seen', (2, 4))]

    References:
        EuroSys 3.1 (pull and push), 4.3 (one message for many partitions).
    """

    def __init__(self, features, combiners=None, **kwargs):
        super().__init__(autocast=False, **kwargs)
        found = features_of(features, combiners)
        self._is_dict = isinstance(features, dict)
        # Each table's layer once: Keras tracks them in their order.
        self.embeddings = list({id(f.layer): f.layer for f in found}.values())
        self._features = {
            f.key: (self.embeddings.index(f.layer), f.combiner) for f in found
        }
        self.supports_masking = True
        # Rows of the call that is under way, a list with a tensor for each
        # feature, where they were gathered with other layers'.
        self.ahead = collections.deque()

    @property
    def features(self):
        """List of `(key, ShardedEmbedding, combiner)`."""
        return [
            (key, self.embeddings[index], combiner)
            for key, (index, combiner) in self._features.items()
        ]

    def build(self, inputs_shape=None, weights_shape=None):
        for layer in self.embeddings:
            layer.build()

    def call(self, inputs, weights=None):
        inputs, weights = self.flat(inputs), self._flat_weights(weights)
        if self.ahead:
            rows = self.ahead.popleft()
        else:
            rows = foreseen.completed(
                self._requests_of(inputs),
                lambda others: gather_together(others, options.entered())[0],
            )
        found = map(self._output, self.features, inputs, weights, rows)
        return self.packed(list(found))

    @property
    def _tables(self):
        """List of the tables of which a call gathers rows."""
        return [layer.table for layer in self.embeddings]

    def _requests(self, inputs):
        """List of the `(table, ids, dtype)` that a call gathers."""
        return self._requests_of(self.flat(inputs))

    def _requests_of(self, inputs):
        return [
            (layer.table, _asked(ids, combiner), layer.compute_dtype)
            for (_, layer, combiner), ids in zip(
                self.features, inputs, strict=True
            )
        ]

    def _output(self, feature, ids, weights, rows):
        """A feature's output, of the rows of its ids."""
        _, layer, combiner = feature

        def rows_of(ids):
            return shaped(rows, ids)

        if combiner is None:
            if isinstance(ids, tf.RaggedTensor):
                return tf.ragged.map_flat_values(rows_of, ids)
            return rows_of(ids_of(ids))
        if not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
            ids = ids_of(ids)
            if ids.shape.rank == 1:
                ids = ids[:, tf.newaxis]
        return bags.combined(ids, weights, combiner, layer.mask_zero, rows_of)

    # The structure of the features.

    def flat(self, inputs):
        """Values of all features, in the features' order."""
        keys = list(self._features)
        is_like = isinstance(inputs, dict if self._is_dict else (list, tuple))
        given = items(inputs) if is_like else {}
        if set(given) != set(keys):
            kind = "dict" if self._is_dict else "list"
            raise ValueError(
                f"The inputs of '{self.name}' must be a {kind} of the ids of "
                f"all features. Received: {checks.spell(inputs)} (of type "
                f"{type(inputs).__name__}), with {list(given)}. Expected: "
                f"{keys}."
            )
        return [given[key] for key in keys]

    def _flat_weights(self, weights):
        given = items({} if weights is None else weights, "weights")
        given = {
            key: value for key, value in given.items() if value is not None
        }
        combiners = {key: combiner for key, _, combiner in self.features}
        without = [key for key in given if combiners.get(key) is None]
        if without:
            raise ValueError(
                f"`weights` of '{self.name}' must be those of features with a "
                f"combiner. Received: weights of {without}. Expected: of some "
                f"of {[key for key, c in combiners.items() if c]}."
            )
        return [given.get(key) for key in combiners]

    def packed(self, values):
        """The values of all features, in the structure of their inputs."""
        if self._is_dict:
            return dict(zip(self._features, values, strict=True))
        return values

    # As Keras asks it.

    def compute_mask(self, inputs, mask=None):
        return self.packed(
            [
                keras.ops.not_equal(ids, 0)
                if layer.mask_zero and combiner is None and _is_dense(ids)
                else None
                for (_, layer, combiner), ids in zip(
                    self.features, self.flat(inputs), strict=True
                )
            ]
        )

    def compute_output_shape(self, inputs_shape, weights_shape=None):
        return self.packed(
            [
                _output_shape(layer, combiner, shape)
                for (_, layer, combiner), shape in zip(
                    self.features, self.flat(inputs_shape), strict=True
                )
            ]
        )

    def compute_output_spec(self, inputs, weights=None):
        self._flat_weights(weights)
        return self.packed(
            [
                keras.KerasTensor(
                    _output_shape(layer, combiner, ids.shape),
                    dtype=layer.compute_dtype,
                )
                for (_, layer, combiner), ids in zip(
                    self.features, self.flat(inputs), strict=True
                )
            ]
        )

    def get_config(self):
        return {
            **super().get_config(),
            "features": [
                [key, index, combiner]
                for key, (index, combiner) in self._features.items()
            ],
            "embeddings": [
                keras.saving.serialize_keras_object(layer)
                for layer in self.embeddings
            ],
            "is_dict": self._is_dict,
        }

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        with shared_layers.made_for(config["name"]):
            layers = [
                keras.saving.deserialize_keras_object(layer)
                for layer in config.pop("embeddings")
            ]
        found, is_dict = config.pop("features"), config.pop("is_dict")
        features = {key: layers[index] for key, index, _ in found}
        combiners = {key: combiner for key, _, combiner in found}
        if not is_dict:
            features = list(features.values())
        return cls(features, combiners, **config)


def _asked(ids, combiner):
    """The tensor of ids whose rows a feature gathers."""
    if combiner is not None and isinstance(ids, tf.SparseTensor):
        return ids_of(ids.values)
    return ids_of(ids)


def _is_dense(ids):
    is_other = isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
    return not (is_other or getattr(ids, "sparse", False))


def _output_shape(layer, combiner, shape):
    if combiner is not None and len(shape) > 1:
        shape = shape[:-1]
    return (*shape, layer.output_dim)
