"""Metrics that make their variables in their first update.

Such as `F1Score` in a `train_step` of the user's own, and those given to
`compile` where eager code needs values.
"""

import collections
import functools

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_models
from keras_sparsity.checkpoint import restoring, state, storage
from keras_sparsity.data import empty_parts
from keras_sparsity.global_batch import step_metrics


def restore(model, path, contents, communicator, may_wait):
    """Restores a model's metrics; those without variables when they have some.

    Args:
        model, path, contents, communicator: as of `storage.restore`.
        may_wait: whether they are updated before they are reset.
    """
    holders = keras_models.holders_of_metrics(model)
    made = collections.Counter(
        entry.holder for entry in state.entries_of_metrics(model)
    )
    saved = collections.Counter(
        record["holder"]
        for record in contents["variables"]
        if "holder" in record
    )
    waiting = {
        number: holders[number][0]
        for number, count in saved.items()
        if number < len(holders) and made[number] < count
    }
    checkpoint = path, contents, communicator
    storage.restore(model, *checkpoint, ("metrics",), waiting)
    if waiting and may_wait:
        _Waiting(model, checkpoint, waiting)


class _Waiting:
    """Restores metrics in their first updates, until they are reset.

    Args:
        model: the model that has them.
        checkpoint: its path, its index and the `Collectives`.
        holders: by their number, metrics, or the compiled loss, which makes
            the metrics of outputs' losses when it is built.
    """

    def __init__(self, model, checkpoint, holders):
        self._model, self._checkpoint = model, checkpoint
        self._left = set(holders)
        self._replaced = []
        for number, holder in holders.items():
            if isinstance(holder, keras.losses.Loss):
                self._replace(holder, "build", self._building(number, holder))
                continue
            update = self._updating(number, holder)
            self._replace(holder, "update_state", update)
        self._replace(model, "reset_metrics", self._resetting())

    def _replace(self, holder, name, function):
        # Not through Keras's attribute tracking: these are not state.
        own = vars(holder).get(name)
        object.__setattr__(holder, name, function)
        self._replaced.append((holder, name, own, function))

    def _building(self, number, holder):
        stock = holder.build

        def build(*args, **kwargs):
            with tf.init_scope():
                stock(*args, **kwargs)
            self._restore_once(number)

        return build

    def _updating(self, number, holder):
        stock = holder.update_state

        def update(*args, **kwargs):
            if number in self._left and _counts():
                _make(stock, args, kwargs)
                self._restore_once(number)
            return stock(*args, **kwargs)

        restore = functools.partial(self._restore_once, number)
        setattr(update, step_metrics.AFTER_MAKING, restore)
        return update

    def _restore_once(self, number):
        if number in self._left:
            self._left.remove(number)
            with tf.init_scope():
                self._read(number)

    def _resetting(self):
        stock = self._model.reset_metrics

        def reset_metrics():
            self._left.clear()
            for holder, name, own, function in self._replaced:
                if vars(holder).get(name) is not function:
                    continue
                object.__delattr__(holder, name)
                if own is not None:
                    object.__setattr__(holder, name, own)
            stock()

        return reset_metrics

    def _read(self, number):
        path, contents, communicator = self._checkpoint
        numbered = [
            (place, record)
            for place, record in enumerate(contents["variables"])
            if record.get("holder") == number
        ]
        entries = [
            entry
            for entry in state.entries_of_metrics(self._model)
            if entry.holder == number
        ]
        records = [record for _, record in numbered]
        restoring.check_same_variables(entries, records, path, contents)
        # Not together: other ranks may have no examples in this step.
        restoring.read(entries, numbered, path, contents, communicator)


def _counts():
    """False if an eager update makes variables, of a rank without examples."""
    return not tf.executing_eagerly() or bool(empty_parts.has_examples())


def _make(update, args, kwargs):
    """Has an update make its variables; the values are to be overwritten."""
    if tf.executing_eagerly():
        update(*args, **kwargs)
        return

    def spec(leaf):
        return tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf

    args, kwargs = tf.nest.map_structure(spec, (args, kwargs))
    with tf.init_scope():
        function = tf.function(update, autograph=False)
        function.get_concrete_function(*args, **kwargs)
