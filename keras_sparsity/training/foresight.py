"""One exchange for the tables of any model that is called in a step.

Layer by layer, each table would wait for messages of its own. So a model's
call is traced once before, and thrown away: it shows which ids it asks for. Of
those that depend on neither rows nor state, the rows are pulled together when
the call begins. In the call itself a lookup has them if its ids are the same
computation of the same tensors; any other pulls its rows by itself. So the
result is right whatever the first trace has shown.

A step of the user's own may call several models, or look up rows in its loss.
It is traced once before as far as its first tape records, and the rows are
pulled when that begins, for its tape to record the pull.
"""

import contextlib
import functools

import tensorflow as tf

from keras_sparsity._tf import (
    contexts,
    keras_functional,
    keras_models,
    keras_scopes,
    patches,
)
from keras_sparsity.conversion.saving import tables_of
from keras_sparsity.global_batch import losses
from keras_sparsity.layers.sampled_softmax_loss import SampledSoftmaxLoss
from keras_sparsity.tables import control_flow, foreseen
from keras_sparsity.training import scouting
from keras_sparsity.training.binding import ADOPTION

# Of the training steps that are being traced: `(model, labels)`.
_steps = []


def in_step(model, labels):
    """While entered, a step trains a model on labels of any structure."""
    return contexts.on_top(_steps, (model, labels))


def is_of_loss(model, labels):
    """Whether labels tell which rows a sampled loss of a model needs."""
    return (
        tf.is_tensor(labels)
        and not _has_own_step(model)
        and type(losses.unwrap(model.loss)) is SampledSoftmaxLoss
        and model.distribute_strategy.options.merges
    )


def calls_pull_together(communicator, options):
    """While entered, a model that a step calls pulls its rows together.

    Args:
        communicator: `Collectives` of all ranks.
        options: `Options` of the strategy.
    """
    if communicator.size == 1:
        return contextlib.nullcontext()
    under_way, tells = [], communicator.rank == 0

    def make(stock):
        def call(model, /, *args, **kwargs):
            if under_way or foreseen.sources or not _may_foresee(model):
                return stock(model, *args, **kwargs)
            with contexts.on_top(under_way, model):
                return _called(stock, model, args, kwargs, options, tells)

        return call

    return patches.MODEL_CALL.by(make)


def own_step(model, step, batch, tells):
    """A training step, whose rows are pulled when its first tape records.

    Args:
        model: an adopted model.
        step: function of a batch: the user's step, or Keras's.
        batch: structure of tensors.
        tells: whether this rank says where that is impossible.
    """
    if not (_has_own_step(model) and _may_foresee(model)):
        return step(batch)

    scouted = scouting.scouted_step(model, step, batch, tells)
    if scouted is None:
        return step(batch)
    graph, pulled = tf.compat.v1.get_default_graph(), None
    with contextlib.ExitStack() as under_the_tape:

        def begin():
            nonlocal pulled
            if tf.compat.v1.get_default_graph() is graph:
                pulled = scouted.pulled(model.distribute_strategy.options)
            if pulled is not None:
                under_the_tape.enter_context(foreseen.by(pulled))

        with patches.first_tape_is_told(begin, under_the_tape.close):
            logs = step(batch)
    if pulled is not None:
        pulled.tell_of_unused(model, tells)
    return logs


def _has_own_step(model):
    """Whether a step may look up rows outside of the model's call."""
    return keras_models.overrides(model, "train_step", "compute_loss")


def _may_foresee(model):
    """Whether the tables of a model that is called might pull together."""
    if (
        not model.built
        or tf.executing_eagerly()
        or keras_scopes.is_tracing_shapes()
        or keras_scopes.in_symbolic_scope()
        or control_flow.surroundings()
    ):
        return False
    is_adopted = hasattr(model, ADOPTION)
    if is_adopted and keras_functional.functional_of(model) is not None:
        return False  # its calls tell, see `JointPull`
    return any(table.sends_messages for table in tables_of(model))


def _called(stock, model, args, kwargs, options, tells):
    """The call of a model, of which the rows are pulled when it begins.

    Args:
        stock: `keras.Model.__call__`.
        model, args, kwargs: its arguments.
        options: `Options` of the strategy.
        tells: whether this rank says where that is impossible.
    """
    scouted, pulled = scouting.Scouted(_labels_of(model)), None
    forward = functools.partial(stock, model)
    if scouted.traces(forward, args, kwargs, "call", model, tells):
        pulled = scouted.pulled(options)
    if pulled is None:
        return stock(model, *args, **kwargs)
    with foreseen.by(pulled):
        outputs = stock(model, *args, **kwargs)
    pulled.hand_over(outputs)
    pulled.tell_of_unused(model, tells)
    return outputs


def _labels_of(model):
    """Labels that tell the rows of the loss of a call of a model, or None."""
    for stepping, labels in reversed(_steps):
        if stepping is model and is_of_loss(model, labels):
            return labels
    return None
