"""One exchange for all tables of a functional model."""

import contextlib

import keras
import tensorflow as tf

from keras_sparsity import architectures, compat, empty_parts, losses
from keras_sparsity.layers.sampled_softmax import (
    SampledSoftmax,
    SampledSoftmaxLoss,
)
from keras_sparsity.layers.sharded_embedding import ShardedEmbedding
from keras_sparsity.layers.sharded_embedding_bag import ShardedEmbeddingBag
from keras_sparsity.tables import exchange
from keras_sparsity.tables.addresses import Addresses
from keras_sparsity.tables.ahead import Ahead
from keras_sparsity.tables.together import (
    gather_together,
    travel_side_by_side,
)
from keras_sparsity.tables.ways import Direct

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
    where they come from the model's inputs by operations without a state. And
    if it ends in a `SampledSoftmax`, what its loss needs is known from the
    labels: it is asked for at the same time, and comes behind these rows.

    Args:
        model: a model of any kind; only of a functional or sequential one
            anything is pulled beforehand.
    """

    def __init__(self, model):
        self._model = model
        self._calls = None  # of layers, once the model is seen to be built
        self._ids = None
        self._softmax = None
        self._following = self._labels = None
        # `Ahead`s, by the tables that travel together and their layouts. They
        # stay when a rank traces the step anew, which another need not do.
        self._aheads = {}

    @contextlib.contextmanager
    def training(self, labels, following):
        """While entered, a step that trains is traced.

        Args:
            labels: what the loss is to be given, of any structure.
            following: inputs of the next step; None if they are not known.
        """
        self._labels, self._following = labels, following
        try:
            yield
        finally:
            self._labels = self._following = None
            if self._softmax is not None:
                self._softmax.ahead.clear()

    @property
    def can_look_ahead(self):
        """Whether rows of a built model could be pulled ahead of a step."""
        strategy = self._model.distribute_strategy
        if not (
            strategy.prefetch
            and architectures.of(strategy).merges
            and exchange.way_of(strategy.collectives, strategy) is Direct
        ):
            return False
        if self._calls is None:
            self._look()
        return any(
            layer.table.is_sharded and self._may_come_early(layer.table)
            for layer in self._calls
        )

    @contextlib.contextmanager
    def entered(self, inputs):
        """While entered, the layers have the rows of these inputs."""
        if self._calls is None:
            self._look()
        is_spread = any(layer.table.is_sharded for layer in self._calls)
        softmax = self._softmax_of_step()
        # For one table, a pull of its own is as good.
        is_of_use = (
            len(self._calls) > 1
            or softmax is not None
            or self._following is not None
        )
        if not is_spread or not is_of_use or compat.in_symbolic_scope():
            yield
            return
        tables = [layer.table for layer in self._calls]
        dtypes = [layer.compute_dtype for layer in self._calls]
        asked = self._asked(inputs)
        ahead = following = None
        if self._following is not None:
            ahead = self._ahead_of
            following = self._asked_next(self._following)
        then = None
        if softmax is not None:
            labels = tf.cast(tf.reshape(self._labels, [-1]), tf.int64)
            sample = softmax._sample(labels)
            then = softmax.tables, sample.ids, softmax.output_dtype
        self._following = self._labels = None  # a step's first call alone
        rows, last = gather_together(
            list(zip(tables, asked, dtypes, strict=True)),
            ahead,
            following,
            then,
        )
        if softmax is not None:
            softmax.ahead.append((sample, last))
        for layer in self._calls:
            layer.ahead.clear()
        for layer, of_call in zip(self._calls, rows, strict=True):
            layer.ahead.append(of_call)
        try:
            yield
        finally:
            for layer in self._calls:
                layer.ahead.clear()

    def _asked(self, inputs):
        # Keras gives a list of one output as that output.
        ids = keras.tree.flatten(self._ids(inputs))
        return [
            layer._asked(of_call)
            for layer, of_call in zip(self._calls, ids, strict=True)
        ]

    def _asked_next(self, inputs):
        """The same of the next step; nothing behind the last one."""
        number = empty_parts.number(inputs)
        return [
            tf.reshape(ids, [-1])[: tf.where(number > 0, tf.size(ids), 0)]
            for ids in self._asked(empty_parts.filled(inputs))
        ]

    def _softmax_of_step(self):
        """The layer whose rows this step's loss needs, if it is known."""
        model, layer = self._model, self._softmax
        is_known = (
            layer is not None
            and tf.is_tensor(self._labels)
            and type(model).train_step is keras.Model.train_step
            and type(model).compute_loss is keras.Model.compute_loss
            and type(losses.unwrap(model.loss)) is SampledSoftmaxLoss
            and architectures.of(model.distribute_strategy).merges
            and travel_side_by_side(layer.tables)
        )
        return layer if is_known else None

    def _may_come_early(self, table):
        """Whether a step leaves most rows as they are, but those it touches."""
        if not table.variable.trainable:
            return True
        optimizer = self._model.optimizer
        return optimizer is not None and all(
            optimizer.updates_rows_of(piece) for piece in table.partitions
        )

    def _ahead_of(self, tables):
        if not all(self._may_come_early(table) for table in tables):
            return None
        place = tables[0].variable.dtype, *(id(table) for table in tables)
        layouts = [table.layout for table in tables]
        known = self._aheads.get(place)
        if known is None or known[0] != layouts:  # they were moved
            addresses = Addresses(list(dict.fromkeys(tables)))
            known = (
                layouts,
                Ahead(
                    tables[0].collectives,
                    tables[0].dim,
                    tables[0].variable.dtype,
                    addresses,
                ),
            )
            self._aheads[place] = known
        return known[1]

    def _look(self):
        self._calls = []
        made = compat.functional_calls(self._model)
        if made is None:
            return
        known = {id(tensor) for tensor in self._model.inputs}
        calls, ids = [], []
        others = set()
        last = [id(tensor) for tensor in self._model.outputs]
        for operation, _, outputs in made:
            is_last = [id(tensor) for tensor in outputs] == last
            if is_last and type(operation) is SampledSoftmax:
                self._softmax = operation
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
        if found:
            self._calls = [layer for layer, _ in found]
            inputs = self._model.inputs
            if not isinstance(self._model, keras.Sequential):
                inputs = self._model.input  # in their structure
            self._ids = keras.Model(inputs, [t for _, t in found])
