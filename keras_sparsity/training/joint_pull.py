"""One exchange for all tables of a functional model."""

import contextlib
import functools
import itertools

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_functional, keras_scopes
from keras_sparsity.data.stand_ins import counted
from keras_sparsity.exchange.ahead import Ahead
from keras_sparsity.exchange.exchange import exchange_of
from keras_sparsity.exchange.prefetch import PrefetchedPull
from keras_sparsity.exchange.together import gather_together
from keras_sparsity.layers import ordinary
from keras_sparsity.layers.candidate_sampler import class_ids
from keras_sparsity.layers.sampled_softmax import SampledSoftmax
from keras_sparsity.layers.sharded_embedding import ShardedEmbedding
from keras_sparsity.layers.sharded_embedding_bag import ShardedEmbeddingBag
from keras_sparsity.layers.sharded_embedding_collection import (
    ShardedEmbeddingCollection,
)
from keras_sparsity.training import foresight

_LAYERS = (ShardedEmbedding, ShardedEmbeddingBag, ShardedEmbeddingCollection)
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
    model tells beforehand which ids each layer is to be given, where they come
    from the model's inputs by operations without a state. And
    if it ends in a `SampledSoftmax`, the rows of its loss are known from the
    labels: they are pulled at the same time, and come behind these rows.

    Args:
        model: a model of any kind; only of a functional or sequential one
            anything is pulled beforehand.
        options: `Options` of the strategy.
    """

    def __init__(self, model, options):
        self._model, self._options = model, options
        # The model that makes its calls, as last looked at.
        self._functional = self._looked_at = None
        self._layers = {}  # by the numbers of their calls
        # A model of the ids that these calls are given, and their structure.
        self._ids, self._arguments = None, []
        self._softmax = self._softmax_call = None
        self._following = self._labels = None
        # `Ahead`s, by the tables that travel together. They stay when a rank
        # traces the step anew, which another need not do.
        self._aheads = {}

    @contextlib.contextmanager
    def training(self, labels, following):
        """While entered, a step that trains is traced.

        Args:
            labels: the loss's labels, of any structure.
            following: inputs of the next step, how many of their examples
                count, and their labels; None if they are not known.
        """
        self._labels, self._following = labels, following
        try:
            with foresight.in_step(self._model, labels):
                yield
        finally:
            self._labels = self._following = None

    @property
    def can_look_ahead(self):
        """Whether rows of a built model could be pulled ahead of a step."""
        strategy = self._model.distribute_strategy
        options = self._options
        if (
            not strategy.prefetch
            or not options.merges
            or options.goes_through_machines(strategy.collectives)
        ):
            return False
        self._look()
        return any(
            table.is_sharded and self._may_come_early(table)
            for table in self._tables
        )

    @property
    def _tables(self):
        layers = self._layers.values()
        return [table for layer in layers for table in layer._tables]

    def in_next_run(self):
        """While entered, the model's next run pulls its rows together."""
        self._look()
        # For one layer, a pull of its own is as good.
        is_of_use = (
            len(self._layers) > 1
            or self._softmax_of_step() is not None
            or self._following is not None
        )
        is_spread = any(table.is_sharded for table in self._tables)
        if not is_spread or not is_of_use or keras_scopes.in_symbolic_scope():
            return contextlib.nullcontext()
        return keras_functional.next_run_calls(self._functional, self._pull)

    def _pull(self, inputs):
        """Pulls the rows of a run that begins; returns the model of its calls.

        A layer has these rows in that call alone which they were pulled for:
        others, which a closure makes of it, are given other ids.
        """
        softmax, of_loss, then = self._softmax_of_step(), [], None
        if softmax is not None:
            sample = softmax.sample(class_ids(self._labels))
            of_loss, then = softmax.asked(sample.ids)
        prefetched = None
        if self._following is not None:
            following = self._asked_next(*self._following, len(of_loss))
            prefetched = functools.partial(self._prefetched, following)
        self._following = self._labels = None  # a step's first run alone
        asked = self._asked(inputs)
        rows, last = gather_together(
            [*_joined(asked), *of_loss], self._options, prefetched, then
        )
        rows = iter(rows)
        pulled = {
            number: (layer.ahead, list(itertools.islice(rows, len(of_call))))
            for (number, layer), of_call in zip(
                self._layers.items(), asked, strict=True
            )
        }
        if softmax is not None:
            of_sample = sample, list(rows) if then is None else last
            pulled[self._softmax_call] = softmax.ahead, of_sample

        def call(number, operation, *args, **kwargs):
            if number not in pulled:
                return operation(*args, **kwargs)
            waiting, of_call = pulled[number]
            waiting.append(of_call)
            try:
                return operation(*args, **kwargs)
            finally:
                waiting.clear()

        return call

    def _asked(self, inputs):
        """The requests of each layer's call: a list of lists."""
        # Keras gives a list of one output as that output.
        ids = keras.tree.pack_sequence_as(
            self._arguments, keras.tree.flatten(self._ids(inputs))
        )
        return [
            layer._requests(of_call)
            for layer, of_call in zip(self._layers.values(), ids, strict=True)
        ]

    def _asked_next(self, inputs, number, labels, num_of_loss):
        """The ids of all requests of the next step; none without examples.

        Args:
            inputs, number, labels: as `training` takes them.
            num_of_loss: number of the requests of its loss.
        """
        (inputs, labels), _ = counted((inputs, labels))
        asked = [
            tf.reshape(i, [-1]) for _, i, _ in _joined(self._asked(inputs))
        ]
        if num_of_loss:
            ids = self._softmax.following(class_ids(labels)).ids
            asked += [ids] * num_of_loss
        return [ids[: tf.where(number > 0, tf.size(ids), 0)] for ids in asked]

    def _softmax_of_step(self):
        """The layer whose rows this step's loss needs, if it is known."""
        layer = self._softmax
        is_known = (
            layer is not None
            and foresight.is_of_loss(self._model, self._labels)
            and layer.may_come_with_others()
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

    def _prefetched(self, following, asked, indices, cast_to):
        """The `PrefetchedPull` of requests, None where rows come late.

        Args:
            following: of each request, the ids of the next step.
            asked, indices, cast_to: see `gather_together`.
        """
        if not all(self._may_come_early(table) for (table,), _ in asked):
            return None
        exchange = exchange_of(asked, self._options, cast_to=cast_to)
        ahead = self._aheads.get(exchange.groups)
        if ahead is None or ahead.exchange is not exchange:  # tables moved
            ahead = self._aheads[exchange.groups] = Ahead(exchange)
        of_next = [
            (tables, tf.reshape(following[index], [-1]))
            for (tables, _), index in zip(asked, indices, strict=True)
        ]
        return PrefetchedPull(asked, of_next, ahead)

    def _look(self):
        """Finds the calls whose ids a run's inputs tell."""
        functional = keras_functional.functional_of(self._model)
        looked_at = functional, ordinary.num_bound()
        if looked_at == self._looked_at:
            return
        self._looked_at = looked_at
        self._functional, self._layers, self._softmax = functional, {}, None
        if functional is None:
            return
        known = {id(tensor) for tensor in functional.inputs}
        last = [id(tensor) for tensor in functional.outputs]
        self._arguments = arguments = []
        for number, call in enumerate(
            keras_functional.functional_calls(functional)
        ):
            kind = type(call.operation)
            layer = call.operation
            if kind not in _LAYERS:
                layer = ordinary.lookup_of(layer)
            if layer is not None:
                given = call.arguments[0]
                if all(id(ids) in known for ids in keras.tree.flatten(given)):
                    self._layers[number] = layer
                    arguments.append(given)
            elif kind is SampledSoftmax:
                if [id(tensor) for tensor in call.outputs] == last:
                    self._softmax = call.operation
                    self._softmax_call = number
            elif kind in _PLAIN or keras_functional.is_stateless(call):
                if all(id(tensor) in known for tensor in call.inputs):
                    known.update(id(tensor) for tensor in call.outputs)
        if arguments:
            self._ids = keras.Model(functional.input, arguments)


def _joined(asked):
    """The requests of all calls, one after the other."""
    return list(itertools.chain.from_iterable(asked))
