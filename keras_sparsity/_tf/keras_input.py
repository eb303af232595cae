"""Datasets and Keras's epoch iterators.

Checked on TensorFlow 2.16 to 2.21 and Keras 3.5 to 3.15.
"""

import dataclasses
import math

import keras
import tensorflow as tf

from keras_sparsity._tf.requirements import numbers_of

# Whether an execution ends with the data.
ENDS_EXECUTIONS = numbers_of(keras.__version__) >= (3, 7)


def dataset_inputs(dataset):
    """The datasets that a `tf.data.Dataset` reads from (`_inputs`)."""
    inputs = getattr(dataset, "_inputs", None)
    return list(inputs()) if inputs else []


@dataclasses.dataclass(frozen=True)
class EpochInput:
    """The input of one of Keras's epoch iterators, which is being made.

    Args:
        iterator: the `EpochIterator`.
        trains: whether `fit` trains on it.
    """

    iterator: object
    trains: bool

    @property
    def num_batches(self):
        """The number of an epoch's batches, None if Keras does not know it."""
        return self.iterator.data_adapter.num_batches

    def read(self, dataset, num_epochs):
        """Its dataset, which leaves further batches to a Python generator.

        TensorFlow reads batches ahead. After a run of so many steps they are
        lost, in each process other ones.

        `GeneratorDataAdapter`. Keras makes an iterator for a whole `fit`, and
        for each evaluation (`EpochIterator.reset`, since Keras 3.7).

        Args:
            num_epochs: of a `fit`, at most.
        """
        from keras.src.trainers.data_adapters import generator_data_adapter

        iterator = self.iterator
        is_left = isinstance(
            iterator.data_adapter, generator_data_adapter.GeneratorDataAdapter
        )
        is_of_run = self.trains or hasattr(iterator, "reset")
        if not (is_left and is_of_run and iterator.steps_per_epoch):
            return dataset
        if "Prefetch" in type(dataset).__name__:
            (dataset,) = dataset_inputs(dataset)
        of_execution = iterator.steps_per_execution
        num_executions = math.ceil(iterator.steps_per_epoch / of_execution)
        num_epochs = num_epochs if self.trains else 1
        dataset = dataset.take(num_epochs * num_executions * of_execution)
        return dataset.prefetch(tf.data.AUTOTUNE)


def batch_shapes(iterator):
    """The tensor specs of a batch of Keras's epoch iterator; None for None.

    `TFEpochIterator._distributed_dataset`.
    """

    def shaped(spec):
        # An element None of the user's dataset has a spec without a shape.
        is_none = isinstance(spec, tf.OptionalSpec) or not hasattr(
            spec, "shape"
        )
        return None if is_none else spec

    return tf.nest.map_structure(
        shaped, iterator._distributed_dataset.element_spec
    )


def knows_ranks(iterator):
    """Whether `batch_shapes` know the number of dimensions of all tensors."""
    specs = tf.nest.flatten(batch_shapes(iterator))
    return all(spec is None or spec.shape.rank is not None for spec in specs)


def change_input(iterator, change):
    """Has Keras's epoch iterator, before it begins, read another dataset.

    `TFEpochIterator._distributed_dataset`.

    Args:
        change: function from its dataset to another one, or None to keep it.
    """
    changed = change(iterator._distributed_dataset)
    if changed is not None:
        iterator._distributed_dataset = changed


def on_next_epoch(epoch_iterator, enumerate_epoch):
    """Has Keras's epoch iterator enumerate its next epoch in another way.

    Args:
        enumerate_epoch: generator function of the stock generator function,
            in whose place it stands once.
    """
    name = _enumerating(epoch_iterator)
    stock = getattr(epoch_iterator, name)
    is_replaced = name in vars(epoch_iterator)  # by an earlier call

    def once():
        if is_replaced:
            setattr(epoch_iterator, name, stock)
        else:
            delattr(epoch_iterator, name)
        return enumerate_epoch(stock)

    setattr(epoch_iterator, name, once)


def steps(epoch_iterator):
    """Begins an epoch; iterates over its steps, `(first, last, iterator)`.

    In Keras 3.5 `(first, iterator)`.
    """
    return getattr(epoch_iterator, _enumerating(epoch_iterator))()


def _enumerating(epoch_iterator):
    # In Keras 3.5 `enumerate_epoch`.
    has_new = hasattr(epoch_iterator, "_enumerate_iterator")
    return "_enumerate_iterator" if has_new else "enumerate_epoch"


def iterator_of(batch, epoch_iterator):
    """An iterator of one batch, of the type of an epoch iterator's.

    A function that was traced with one takes the other.
    """
    spec = epoch_iterator._distributed_dataset.element_spec
    variant = tf.data.experimental.to_variant(
        tf.data.Dataset.from_tensors(batch)
    )
    return iter(tf.data.experimental.from_variant(variant, spec))


def repeats_an_order_at_once(epoch_iterator):
    """Whether an epoch's order is drawn whole with the epoch's first batch.

    `ArrayDataAdapter`, which Keras makes of arrays.
    """
    from keras.src.trainers.data_adapters import array_data_adapter

    adapter = epoch_iterator.data_adapter
    return (
        isinstance(adapter, array_data_adapter.ArrayDataAdapter)
        and adapter._shuffle != "batch"
        and not epoch_iterator.steps_per_epoch
    )


def check_executions(epoch_iterator):
    """Raises ValueError if an epoch ends within an execution, and Keras cannot.

    Until Keras 3.6 an execution asks for `steps_per_execution` batches, and
    fails at the first one that is missing, while messages of the last step may
    be under way.
    """
    number = epoch_iterator.num_batches
    of_execution = epoch_iterator.steps_per_execution
    if number is None or number % of_execution == 0 or ENDS_EXECUTIONS:
        return
    raise ValueError(
        f"Keras {keras.__version__} cannot end an epoch within an execution. "
        f"Received: {number} batches and steps_per_execution={of_execution}. "
        "Give a divisor of the number of batches to `compile`, or install "
        "Keras 3.7 or later."
    )


def is_read_by_python(epoch_iterator):
    """Whether Python code makes the batches: all but arrays and `tf.data`'s.

    A generator, a `PyDataset`, a `DataLoader` of PyTorch, a dataset of Grain.

    `ArrayDataAdapter`, `TFDatasetAdapter`.
    """
    from keras.src.trainers.data_adapters import (
        array_data_adapter,
        tf_dataset_adapter,
    )

    return not isinstance(
        epoch_iterator.data_adapter,
        array_data_adapter.ArrayDataAdapter
        | tf_dataset_adapter.TFDatasetAdapter,
    )
