"""Wide layers of a tail: each of its ranks computes some of the columns."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._tf import contexts, keras_functional, keras_optimizers
from keras_sparsity.data.batches import bounds
from keras_sparsity.stages.column_split import (
    chosen_calls,
    column_sizes,
    why_not,
)
from keras_sparsity.update import optimizer_arguments
from keras_sparsity.update.rows import slots_of


class Columns:
    """Divides the kernels of some layers by columns among a stage's ranks.

    All ranks compute the whole batch. Of these layers each computes its own
    columns; the results are gathered, and gradients of the layers' inputs are
    summed. Gradients of the kernels travel nowhere: a rank updates its own
    columns, and the others are out of date until `settle`.

    Args:
        layers: list of built `keras.layers.Dense`.
        optimizer: that which updates them, or None.
        peers: `Collectives` of the stage's ranks.
    """

    def __init__(self, layers, optimizer, peers):
        self._layers, self._optimizer, self._peers = layers, optimizer, peers
        self._ids = {id(layer.kernel) for layer in layers}
        with tf.init_scope():
            self._is_behind = tf.Variable(False, trainable=False)

    def has(self, variable):
        """Whether a rank updates some columns of a variable alone."""
        return id(variable) in self._ids

    @contextlib.contextmanager
    def in_calls(self):
        """Context in which the layers compute their own columns."""
        with contextlib.ExitStack() as stack:
            for place, layer in enumerate(self._layers):
                role = f"tail/columns/{place}"
                call = _divided_call(layer, self._peers, role)
                stack.enter_context(contexts.own_attributes(layer, call=call))
            yield

    def note_step(self):
        """Says that a step has updated the columns; in that step."""
        self._is_behind.assign(True)

    def settle(self):
        """Brings the columns of all ranks up to date; eagerly, on all ranks.

        Also those of the optimizer's slots.
        """
        if not self._is_behind.numpy():
            return
        for layer in self._layers:
            width = layer.kernel.shape[-1]
            own = _own(width, self._peers)
            for variable in self._with_slots(layer.kernel):
                columns = tf.convert_to_tensor(variable)[:, own]
                role = "tail/columns/settled"
                variable.assign(_gathered(columns, width, self._peers, role))
        self._is_behind.assign(False)

    def _with_slots(self, kernel):
        """A kernel and its slots."""
        found = [kernel]
        rule = optimizer_arguments.rule_of(self._optimizer)
        built = keras_optimizers.built_variables(rule)
        if any(variable is kernel for variable in built):
            found += [slot for (slot,) in slots_of(rule, [kernel]).values()]
        return [each for each in found if each.shape == kernel.shape]


def _divided_call(layer, peers, role):
    """The call of a `Dense` layer of which this rank computes some columns."""
    width = layer.kernel.shape[-1]
    own = _own(width, peers)

    @tf.custom_gradient
    def shared(values):
        def gradient(upstream):
            (total,) = peers.all_reduce([upstream], name=f"{role}/inputs")
            return total

        return tf.identity(values), gradient

    @tf.custom_gradient
    def whole(columns):
        gathered = _gathered(columns, width, peers, f"{role}/outputs")
        return gathered, lambda upstream: upstream[..., own]

    def call(inputs, training=None):
        del training
        kernel = tf.convert_to_tensor(layer.kernel)[:, own]
        x = whole(keras.ops.matmul(shared(inputs), kernel))
        if layer.bias is not None:
            x = keras.ops.add(x, layer.bias)
        return x if layer.activation is None else layer.activation(x)

    return call


def _own(width, peers):
    """The slice of a rank's columns."""
    return slice(*bounds(width, peers.rank, peers.size))


def _gathered(columns, width, peers, name):
    """All ranks' columns, in their order, of a tensor `(..., columns)`."""
    ends = [bounds(width, rank, peers.size)[1] for rank in range(peers.size)]
    counts = np.diff(ends, prepend=0).astype(np.int32)
    rows = tf.transpose(tf.reshape(columns, [-1, counts[peers.rank]]))
    whole = tf.transpose(peers.all_gather(rows, name=name, counts=counts))
    shape = tf.concat([tf.shape(columns)[:-1], tf.shape(whole)[1:]], 0)
    return tf.reshape(whole, shape)


def to_divide(model, optimizer, num_examples, is_asked):
    """The `Dense` layers of a stage whose columns its ranks divide: a list.

    Of a whole batch of `num_examples`. Empty if it is not possible; then an
    error, if the user has asked for it.
    """
    calls = keras_functional.functional_calls(model)
    places = sorted(chosen_calls(column_sizes(calls), num_examples))
    reason = why_not(optimizer, is_asked)
    if not places:
        reason = "its tail has no `Dense` layer to divide"
    if reason and is_asked:
        raise ValueError(
            f"The tail's columns cannot be divided: {reason}. Received: "
            'tail_split="columns". Use tail_split="batch".'
        )
    return [] if reason else [calls[place].operation for place in places]
