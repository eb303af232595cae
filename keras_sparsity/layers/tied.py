"""Checks of a layer whose table is another layer's kernel, too."""

from keras_sparsity._tf import checks
from keras_sparsity.layers.sharded_embedding import ShardedEmbedding


def check_table(layer, num_classes):
    """Raises ValueError unless a layer's table can be that of all classes."""
    if not isinstance(layer, ShardedEmbedding):
        raise ValueError(
            "`table` must be a `ks.layers.ShardedEmbedding` (of a "
            "`ShardedEmbeddingCollection`, one of its `embeddings`), whose "
            f"rows are to be the classes' weights. Received: "
            f"table={checks.spell(layer)} (of type {type(layer).__name__}). "
            "Use a `ShardedEmbedding` in place of a `keras.layers.Embedding`: "
            "it takes the same arguments."
        )
    if layer.input_dim != num_classes:
        raise ValueError(
            "`table` must have a row for each class. Received: "
            f"num_classes={num_classes}, and the layer '{layer.name}' with "
            f"input_dim={layer.input_dim}. Give both the same number."
        )


def check_is_all(**are_given):
    """Raises ValueError if the kernel is described beside its table."""
    given = [name for name, is_given in are_given.items() if is_given]
    if given:
        raise ValueError(
            f"With `table` the kernel is that layer's table, so "
            f"{', '.join(f'`{name}`' for name in given)} cannot be given. "
            "Received: both. Give them to the `ShardedEmbedding`."
        )


def check_dim(layer, dim, name):
    """Raises ValueError unless the rows of a layer are as long as inputs."""
    if layer.output_dim != dim:
        raise ValueError(
            f"The inputs of '{name}' must be as long as the rows of its "
            f"`table`. Received: inputs `(batch, ..., {dim})`, and the layer "
            f"'{layer.name}' with output_dim={layer.output_dim}. Project the "
            f"inputs: `keras.layers.Dense({layer.output_dim})`."
        )
