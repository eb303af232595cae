"""The checkpoint from which a training goes on."""

import copy
import logging

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_callbacks, keras_variables, random_seeds
from keras_sparsity.checkpoint import input_facts, late_metrics, storage
from keras_sparsity.data import dataset_graph

_LOG = logging.getLogger(__name__)


class FoundCheckpoint:
    """What `fit` takes from a checkpoint, before and after it begins.

    Args:
        path, contents: result of `storage.latest`.
        epochs: the number at which `fit` ends.

    Attributes:
        position: dict of the values that were saved with the model.
        has_ended: whether the training had ended.
    """

    def __init__(self, path, contents, epochs):
        self._path, self._contents = path, contents
        self.position = position = contents["position"]
        self.has_ended = position["has_stopped"] or position["epoch"] >= epochs
        self._rate = None  # the variable, and its value at the checkpoint
        keras_callbacks.check_learnt(position["callbacks"], path)

    def tell(self, is_first, data=None):
        """Prints where the training goes on, on the first rank.

        Warns on every rank whose orders will differ.

        Args:
            data: `fit`'s `x`.
        """
        position = self.position
        if is_first:
            then = (
                "the training had ended"
                if self.has_ended
                else f"going on in epoch {position['epoch'] + 1} after "
                f"{position['step']} of its steps"
            )
            print(f"Resuming from {self._path}: {then}.", flush=True)
        seed = random_seeds.global_seed()
        is_within = position["step"] and not self.has_ended
        if is_within and seed is None and _is_unseeded(data):
            _LOG.warning(
                "A shuffle of the dataset has no seed: it gives another order "
                "than before the interruption, so that examples of this epoch "
                "are seen twice or not at all. Before the dataset is made, "
                "call `keras.utils.set_random_seed`."
            )
        elif is_within and position["seed"] != seed:
            _LOG.warning(
                "The random seed is %s, and was %s before the interruption. "
                "A shuffle without a seed of its own now gives another order, "
                "so that examples of this epoch are seen twice or not at all. "
                "Start the processes with KERAS_SPARSITY_SEED=%s.",
                seed,
                position["seed"],
                position["seed"],
            )

    def tell_of_input(self, facts):
        """Warns on every rank whose batches will differ.

        Args:
            facts: result of `input_facts.of_run`.
        """
        if self.position["step"] and not self.has_ended:
            input_facts.tell_of_changes(self.position["input"], facts)

    def host_states(self, collectives):
        """This rank's `random_states.host_states`."""
        return storage.read_host_states(self._path, self._contents, collectives)

    def restore(self, model, collectives, sections):
        """Restores some sections of a model's state, see `storage.restore`."""
        storage.restore(
            model, self._path, self._contents, collectives, sections
        )
        if "optimizer" in sections:
            rate = getattr(model.optimizer, "learning_rate", None)
            if keras_variables.is_variable(rate):
                self._rate = rate, keras.ops.convert_to_numpy(rate)

    def restore_progress(self, model, collectives, callbacks):
        """Restores state that Keras and its callbacks reset at the start."""
        if self.position["step"]:
            checkpoint = self._path, self._contents, collectives
            late_metrics.restore(model, *checkpoint, not self.has_ended)
        if self._rate and self.position["has_begun"]:
            # Saved when callbacks had changed it for this epoch, as a
            # `LearningRateScheduler` has done once more.
            rate, value = self._rate
            rate.assign(value)
        history = model.history
        history.epoch, values = map(copy.copy, self.position["history"])
        history.history.clear()
        history.history.update(values)
        keras_callbacks.set_all_learnt(callbacks, self.position["callbacks"])


def _is_unseeded(data):
    return isinstance(
        data, tf.data.Dataset
    ) and dataset_graph.has_unseeded_shuffle(data)
