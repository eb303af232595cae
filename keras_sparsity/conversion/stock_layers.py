"""Stock Keras layers in place of this package's."""

import keras

from keras_sparsity._tf import keras_models, tracking
from keras_sparsity.conversion.replacing import embedding_options


def embedding(layer):
    return keras.layers.Embedding(
        layer.input_dim, layer.output_dim, **embedding_options(layer)
    )


def bag(layer):
    """A small model of stock layers, for bags in a dense tensor."""
    name = layer.name
    _check_has_no_weights(layer)
    shape = keras_models.built_with(layer).get("inputs_shape") or (None, None)
    ids = _input_like(shape, f"{name}_ids")
    rows = embedding(layer)(ids)
    vectors = _combined(ids, rows, layer.combiner, layer.mask_zero)
    return keras.Model(ids, vectors, name=name)


def collection(layer, stock_of):
    """A small model of stock layers, for ids in dense tensors.

    Args:
        layer: a built `ShardedEmbeddingCollection`.
        stock_of: function from a `ShardedEmbedding` to its counterpart.
    """
    _check_has_no_weights(layer)
    shapes = keras_models.built_with(layer).get("inputs_shape")
    if shapes is None:
        raise ValueError(
            f"The layer '{layer.name}' has not been called on ids, so the "
            "shapes of its inputs are unknown and the model cannot be "
            "exported. Call the model on a batch first."
        )
    inputs, outputs = [], []
    for (key, sharded, combiner), shape in zip(
        layer.features, layer.flat(shapes), strict=True
    ):
        # Keras asks for the keys as names.
        ids = _input_like(shape, str(key))
        inputs.append(ids)
        rows = stock_of(sharded)(ids)
        if combiner is not None:
            if len(shape) == 1:
                ids, rows = ids[:, None], rows[:, None]
            rows = _combined(ids, rows, combiner, sharded.mask_zero)
        outputs.append(rows)
    return keras.Model(
        layer.packed(inputs), layer.packed(outputs), name=layer.name
    )


def dense(layer):
    return keras.layers.Dense(
        layer.num_classes,
        use_bias=layer.use_bias,
        activity_regularizer=layer.activity_regularizer,
        # Its logits are float32 under mixed precision, too.
        dtype=layer.output_dtype,
        name=layer.name,
        trainable=layer.trainable,
    )


def tied_dense(layer, kernel):
    """A layer as `dense`, with a kernel `(num_classes, dim)` of another one."""
    made = keras.layers.EinsumDense(
        "...d,vd->...v",
        output_shape=layer.num_classes,
        bias_axes="v" if layer.use_bias else None,
        activity_regularizer=layer.activity_regularizer,
        dtype=layer.output_dtype,
        name=layer.name,
        trainable=layer.trainable,
    )
    made.build(**keras_models.built_with(layer))
    tracking.replace_held(made, made.kernel, kernel)
    made.supports_masking = True
    return made


def _input_like(shape, name):
    """An input of ids with as many axes; bags may have another length later."""
    return keras.Input((None,) * (len(shape) - 1), dtype="int32", name=name)


def _combined(ids, rows, combiner, mask_zero):
    """A vector for each bag of ids `(..., k)`, of rows `(..., k, dim)`."""
    weights = keras.ops.cast(
        (ids != 0) if mask_zero else keras.ops.ones_like(ids), rows.dtype
    )
    vectors = keras.ops.sum(rows * weights[..., None], axis=-2)
    counts = keras.ops.sum(weights, axis=-1, keepdims=True)
    if combiner == "sqrtn":
        counts = keras.ops.sqrt(counts)
    if combiner != "sum":
        vectors = keras.ops.divide_no_nan(vectors, counts)
    return vectors


def _check_has_no_weights(layer):
    if keras_models.calls_with_more_arguments(layer, "weights"):
        raise ValueError(
            f"The layer '{layer.name}' is called with weights, and has no "
            "counterpart in stock Keras then, so the model cannot be exported."
        )
