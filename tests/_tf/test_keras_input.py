"""Each private name that is used, so that a new version says which broke."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf import keras_input

pytestmark = pytest.mark.smoke


def test_dataset_inputs():
    dataset = tf.data.Dataset.range(2)
    assert keras_input.dataset_inputs(dataset) == []
    assert keras_input.dataset_inputs(dataset.batch(2)) == [dataset]


def _epoch_iterator(**arguments):
    from keras.src.backend.tensorflow import trainer

    return trainer.TFEpochIterator(
        distribute_strategy=tf.distribute.get_strategy(), **arguments
    )


def test_on_next_epoch():
    """Once, and as `fit` enumerates an epoch in this version of Keras."""
    iterator = _epoch_iterator(x=np.arange(6), batch_size=2)

    def without_the_first(stock):
        executions = stock()
        next(next(executions)[-1])
        yield from executions

    def batches():
        return [next(item[-1]).numpy().tolist() for item in _epoch(iterator)]

    keras_input.on_next_epoch(iterator, without_the_first)
    assert batches() == [[2, 3], [4, 5]]
    assert batches() == [[0, 1], [2, 3], [4, 5]]


def test_change_input():
    """Before it begins; None changes nothing."""
    iterator = _epoch_iterator(x=np.arange(6), batch_size=2)
    keras_input.change_input(
        iterator, lambda dataset: dataset.map(lambda x: x + 1)
    )
    keras_input.change_input(iterator, lambda dataset: None)
    batches = [next(item[-1]).numpy().tolist() for item in _epoch(iterator)]
    assert batches == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("knows", [True, False])
def test_knows_ranks(knows):
    dataset = tf.data.Dataset.range(2).map(
        lambda i: (i, tf.numpy_function(lambda x: x, [i], tf.int64))
    )
    if knows:
        dataset = dataset.map(lambda i, j: (i, tf.ensure_shape(j, [])))
    iterator = _epoch_iterator(x=dataset)
    assert keras_input.knows_ranks(iterator) is knows
    # Of an element None there is nothing to know.
    iterator = _epoch_iterator(x=dataset.map(lambda i, j: ((i, j), None)))
    assert keras_input.knows_ranks(iterator) is knows
    assert keras_input.batch_shapes(iterator)[1] is None


def _epoch(iterator):
    return (
        iterator
        if hasattr(iterator, "__next__")
        else (iterator.enumerate_epoch())
    )


def test_what_makes_the_batches():
    arrays = _epoch_iterator(x=np.arange(6), batch_size=2, shuffle=True)
    assert keras_input.repeats_an_order_at_once(arrays)
    assert not keras_input.is_read_by_python(arrays)
    by_batches = _epoch_iterator(x=np.arange(6), batch_size=2, shuffle="batch")
    assert not keras_input.repeats_an_order_at_once(by_batches)
    generated = _epoch_iterator(x=((np.ones(2),) for _ in range(9)))
    assert keras_input.is_read_by_python(generated)
    assert not keras_input.repeats_an_order_at_once(generated)


def test_a_data_loader_of_pytorch_is_read_by_python():
    """Which need not be installed for Keras's adapter of it."""
    from keras.src.trainers.data_adapters import torch_data_loader_adapter

    adapter = torch_data_loader_adapter.TorchDataLoaderAdapter
    iterator = _epoch_iterator(x=np.arange(6), batch_size=2)
    iterator.data_adapter = object.__new__(adapter)
    assert keras_input.is_read_by_python(iterator)


@pytest.mark.parametrize(
    ("num_batches", "ends", "is_refused"),
    [(6, False, False), (5, False, True), (5, True, False)],
)
def test_an_epoch_that_ends_within_an_execution(
    num_batches, ends, is_refused, monkeypatch
):
    """Whether Keras can do that, and a check that it need not."""
    monkeypatch.setattr(keras_input, "ENDS_EXECUTIONS", ends)
    iterator = _epoch_iterator(
        x=np.arange(num_batches), batch_size=1, steps_per_execution=2
    )
    refused = contextlib.nullcontext()
    if is_refused:
        message = "Received: 5 batches and steps_per_execution=2"
        refused = pytest.raises(ValueError, match=message)
    with refused:
        keras_input.check_executions(iterator)


def test_executions_of_unknown_numbers_are_not_checked(monkeypatch):
    monkeypatch.setattr(keras_input, "ENDS_EXECUTIONS", False)
    iterator = _epoch_iterator(
        x=((np.ones(2),) for _ in range(9)), steps_per_execution=2
    )
    keras_input.check_executions(iterator)


def test_the_versions_that_end_executions():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=2)
    told = contextlib.nullcontext()
    if not keras_input.ENDS_EXECUTIONS:
        told = pytest.warns(UserWarning, match="ran out of data")
    with told:
        model.evaluate(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
