"""One step of an adopted model, on this rank's part of the batch."""

import contextlib
import functools

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import (
    contexts,
    custom_gradients,
    deferred_weights,
    keras_losses,
    keras_scopes,
    keras_variables,
    xla,
)
from keras_sparsity.data import empty_parts, stand_ins
from keras_sparsity.data.batches import unpacked
from keras_sparsity.data.following import Followed
from keras_sparsity.exchange import row_wire
from keras_sparsity.global_batch import (
    loss_scale,
    metrics,
    mixing,
    random_states,
    step_metrics,
)
from keras_sparsity.training import foresight, jit
from keras_sparsity.training.binding import Binding


class Steps(Binding):
    """Steps whose logs and predictions are of the whole batch."""

    def __init__(self, model, joint_pull):
        self._is_in_step = False
        self._joint_pull = joint_pull
        self._mixing = mixing.of_processes(
            model, model.distribute_strategy.collectives
        )
        super().__init__(model, ["get_metrics_result"])
        if self._collectives.size > 1:
            self._bind("call", self.call)
        for name in ("train_step", "test_step", "predict_step"):
            step = functools.partial(self._stock_step, name)
            if self._collectives.size > 1:
                step = getattr(self, name)
            self._bind(name, step)

    def _stock_step(self, name, batch):
        """A step in one process."""
        if name == "train_step":
            self._check_optimizer()
        with self._noting_the_step():
            return self._stock[name](batch)

    def call(self, *args, **kwargs):
        if not args:
            return self._stock["call"](*args, **kwargs)
        with loss_scale.of_own_part(), self._joint_pull.in_next_run():
            return self._stock["call"](*args, **kwargs)

    def train_step(self, batch):
        self._check_optimizer(of_batch=tf.executing_eagerly())
        following = None
        if isinstance(batch, Followed):
            batch, *following = batch
        with self._on_own_part(batch) as (batch, part, is_outermost):
            _, labels, _ = unpacked(batch)
            with (
                self._mixing.looked_for(batch),
                row_wire.in_step(self._number()),
                self._joint_pull.training(labels, following),
            ):
                logs = self._logs_of("train_step", batch, part, is_outermost)
            empty_parts.combine_statistics(
                self._model, part.number, self._collectives
            )
        return logs

    def _number(self):
        """The step's number, where gradients are drawn by it; else None."""
        optimizer = getattr(self._model, "optimizer", None)
        options = self._model.distribute_strategy.options
        if optimizer is None or not options.draws_gradients:
            return None
        return tf.convert_to_tensor(optimizer.iterations)

    def test_step(self, batch):
        with self._on_own_part(batch) as of_part:
            return self._logs_of("test_step", *of_part)

    def predict_step(self, batch):
        with self._on_own_part(batch) as (batch, *_):
            outputs = self._stock["predict_step"](batch)
            return tf.nest.map_structure(
                lambda part: _whole_batch(_cut(part), self._collectives),
                outputs,
            )

    @contextlib.contextmanager
    def _on_own_part(self, batch):
        """While entered, a step computes on this rank's part of a batch.

        Only the part's examples count, and random operations draw differently
        on each rank. Steps within the step change neither.

        Yields:
            The batch to compute on, its `empty_parts.Part`, and whether this
            is the outermost of the model's steps.
        """
        with contextlib.ExitStack() as stack:
            is_outermost = stack.enter_context(self._noting_the_step())
            part = empty_parts.current()
            if part is None or part.is_of_run:
                batch, counts = stand_ins.counted(batch)
                part = empty_parts.of_rank(counts, self._collectives)
                stack.enter_context(empty_parts.computing_on(part))
            else:
                batch = stand_ins.without_counts(batch)
            if is_outermost:
                stack.enter_context(
                    xla.compiled_between_messages(jit.is_asked_for(self._model))
                )
                rank = self._collectives.rank
                stack.enter_context(random_states.drawn_by_rank(rank))
                if not tf.executing_eagerly():
                    stack.enter_context(deferred_weights.at_once())
            yield batch, part, is_outermost

    @contextlib.contextmanager
    def _noting_the_step(self):
        """While entered, the model is in a step; yields if in no other."""
        is_outermost = not self._is_in_step
        with contexts.attribute(self, "_is_in_step", True):
            yield is_outermost
        if is_outermost:
            custom_gradients.forget_with(self._model)

    def _logs_of(self, name, batch, part, is_outermost):
        step = self._stock[name]
        if not is_outermost:
            return step(batch)
        with step_metrics.results_are_global(
            self._metrics,
            self._collectives,
            functools.partial(keras_losses.loss_metrics, self._model),
        ) as results:
            if name == "train_step":
                is_teller = self._collectives.rank == 0
                logs = foresight.own_step(self._model, step, batch, is_teller)
            else:
                logs = step(batch)
        return self._means(logs, results, part)

    def _means(self, logs, results, part):
        """Logs with the ranks' means of values that no metric computed."""
        of_metrics = {id(result) for result in results}
        leaves = [
            x.value if keras_variables.is_variable(x) else x
            for x in tf.nest.flatten(logs)
        ]
        own = {
            i: tf.convert_to_tensor(x)
            for i, x in enumerate(leaves)
            if id(x) not in of_metrics and _is_number(x)
        }
        if own:
            means = self._means_of(list(own.values()), part)
            for i, mean in zip(own, means, strict=True):
                leaves[i] = mean
        return tf.nest.pack_sequence_as(logs, leaves)

    def _means_of(self, values, part):
        """The ranks' means of values, weighted by their examples."""
        # One dtype, so that they travel together.
        are_narrow = all(
            x.dtype.is_floating and x.dtype.size <= 4 for x in values
        )
        wide = tf.float32 if are_narrow else tf.float64
        number = tf.cast(part.number, wide)
        terms = [tf.cast(x, wide) * number for x in values]
        *sums, total = self._collectives.all_reduce(
            empty_parts.selected([*terms, number]), name="model/logs"
        )
        return [
            tf.cast(
                tf.math.divide_no_nan(value, total),
                x.dtype if x.dtype.is_floating else wide,
            )
            for x, value in zip(values, sums, strict=True)
        ]

    def get_metrics_result(self):
        # In a step, each metric's `result` is the global one already.
        if self._is_in_step or keras_scopes.in_symbolic_scope():
            return self._stock["get_metrics_result"]()
        built = self._metrics()
        stock = self._stock["get_metrics_result"]
        if len(built) < len(self._model.metrics):
            stock = None
        return metrics.global_results(built, self._collectives, stock)

    def _metrics(self):
        """The model's metrics that some step has updated.

        A step of the user's own may do without those given to `compile`.
        """
        return [m for m in self._model.metrics if getattr(m, "built", True)]


def _cut(part):
    """The rows of outputs that are of examples."""
    if not isinstance(part, tf.RaggedTensor | tf.SparseTensor):
        part = tf.convert_to_tensor(part)
        if part.shape.rank == 0:
            part = part[tf.newaxis]
    return empty_parts.cut(part)


def _is_number(value):
    if isinstance(value, tf.Tensor | tf.Variable):
        dtype = value.dtype
        return dtype.is_floating or dtype.is_integer or dtype.is_bool
    return np.asarray(value).dtype.kind in "biuf"


def _whole_sparse(part, communicator):
    shapes = communicator.all_gather(
        part.dense_shape[None], name="model/predict/shapes"
    )
    first = tf.reduce_sum(shapes[: communicator.rank, 0])
    rows, others = part.indices[:, :1] + first, part.indices[:, 1:]
    num_rows, inner = shapes[:, 0], shapes[:, 1:]
    return tf.SparseTensor(
        _whole_batch(tf.concat([rows, others], 1), communicator),
        _whole_batch(part.values, communicator),
        tf.concat([tf.reduce_sum(num_rows)[None], tf.reduce_max(inner, 0)], 0),
    )


def _whole_batch(part, communicator):
    """All ranks' parts of a batch of predictions, in order."""
    if isinstance(part, tf.RaggedTensor):
        return tf.RaggedTensor.from_row_lengths(
            _whole_batch(part.values, communicator),
            _whole_batch(part.row_lengths(), communicator),
        )
    if isinstance(part, tf.SparseTensor):
        return _whole_sparse(part, communicator)
    if part.dtype == tf.string:  # no message has text
        sizes = _whole_batch(tf.strings.length(part), communicator)
        sent = tf.io.decode_raw(tf.strings.reduce_join(part), tf.uint8)
        codes = tf.cast(_whole_batch(sent, communicator), tf.int32)
        characters = tf.RaggedTensor.from_row_lengths(
            tf.gather([bytes([code]) for code in range(256)], codes),
            tf.reshape(sizes, [-1]),
        )
        joined = tf.strings.reduce_join(characters, -1)
        return tf.reshape(joined, tf.shape(sizes))
    return communicator.all_gather(part, name="model/predict")
