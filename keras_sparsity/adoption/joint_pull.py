"""One exchange for all tables of a functional model."""

import contextlib

import keras

from keras_sparsity import compat
from keras_sparsity.layers.sharded_embedding import ShardedEmbedding
from keras_sparsity.layers.sharded_embedding_bag import ShardedEmbeddingBag
from keras_sparsity.tables.sharded_table import gather_together

_LAYERS = (ShardedEmbedding, ShardedEmbeddingBag)
# Layers that give the same output for the same input, as operations do.
_PLAIN = (
    keras.layers.Concatenate,
    keras.layers.Flatten,
    keras.layers.Identity,
    keras.layers.Permute,
    keras.layers.Reshape,
)


class JointPull:
    """Pulls the rows of a model's tables together, before it is called.

    Layer by layer, each table would wait for messages of its own. A functional
    model tells beforehand which ids each `ShardedEmbedding` is to be given,
    where they come from the model's inputs by operations without a state.

    Args:
        model: a model of any kind; only of a functional one anything is
            pulled beforehand.
    """

    def __init__(self, model):
        self._model = model
        self._calls = None  # of layers, once the model is seen to be built
        self._ids = None

    @contextlib.contextmanager
    def entered(self, inputs):
        """While entered, the layers have the rows of these inputs."""
        if self._calls is None:
            self._look()
        is_spread = any(layer.table.is_sharded for layer in self._calls)
        if not is_spread or compat.in_symbolic_scope():
            yield
            return
        ids = [
            layer._asked(tensor)
            for layer, tensor in zip(
                self._calls, self._ids(inputs), strict=True
            )
        ]
        tables = [layer.table for layer in self._calls]
        rows = gather_together(list(zip(tables, ids, strict=True)))
        for layer in self._calls:
            layer.ahead.clear()
        for layer, of_call in zip(self._calls, rows, strict=True):
            layer.ahead.append(of_call)
        try:
            yield
        finally:
            for layer in self._calls:
                layer.ahead.clear()

    def _look(self):
        self._calls = []
        made = compat.functional_calls(self._model)
        if made is None:
            return
        known = {id(tensor) for tensor in self._model.inputs}
        calls, ids = [], []
        others = set()
        for operation, inputs, outputs in made:
            is_known = all(id(tensor) in known for tensor in inputs)
            if type(operation) in _LAYERS:
                if id(inputs[0]) in known:
                    calls.append(operation)
                    ids.append(inputs[0])
                else:
                    others.add(operation)
            elif isinstance(operation, keras.Layer) and not isinstance(
                operation, _PLAIN
            ):  # which may call a table's layer itself
                others.update(compat.all_layers(operation))
            elif is_known:
                known.update(id(tensor) for tensor in outputs)
        # One that is also called with other ids would be given these rows.
        found = [
            (layer, tensor)
            for layer, tensor in zip(calls, ids, strict=True)
            if layer not in others
        ]
        if len(found) > 1:
            self._calls = [layer for layer, _ in found]
            self._ids = keras.Model(self._model.input, [t for _, t in found])
