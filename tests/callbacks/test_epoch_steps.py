"""Steps of an epoch whose last execution is a shorter one."""

from unittest import mock

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity.callbacks import move_times
from keras_sparsity.callbacks.auto_architecture import AutoArchitecture
from keras_sparsity.callbacks.epoch_steps import EpochSteps


class Counts(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.steps = EpochSteps(self)
        self.of_executions, self.of_epochs = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.steps.begin()

    def on_train_batch_end(self, batch, logs=None):
        self.of_executions.append(self.steps.add_execution())

    def on_epoch_end(self, epoch, logs=None):
        self.of_epochs.append(self.steps.number)


def fit(*callbacks, num_steps=5):
    """Two epochs, two steps at a time."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with ks.HybridStrategy().scope():
        model.compile("sgd", "mse", steps_per_execution=2)
    x = np.ones((num_steps, 1))
    model.fit(x, x, 1, epochs=2, verbose=0, callbacks=list(callbacks))


@pytest.mark.parametrize(
    ("num_steps", "of_epoch"), [(5, [2, 2, 1]), (4, [2, 2]), (1, [1])]
)
def test_the_last_execution_of_an_epoch_counts_its_own_steps(
    num_steps, of_epoch
):
    counts = Counts()
    fit(counts, num_steps=num_steps)
    assert counts.of_executions == 2 * of_epoch
    assert counts.of_epochs == 2 * [num_steps]


def test_a_loop_of_the_users_own_gives_no_length_of_an_epoch():
    counts = Counts()
    counts.set_model(mock.Mock(steps_per_execution=2))
    counts.on_train_batch_end(1)
    assert counts.of_executions == [2]


def test_an_epoch_goes_on_after_some_steps():
    steps = EpochSteps(mock.Mock(params={"steps": 5}))
    steps._callback.model.steps_per_execution = 2
    steps.begin(2)
    assert [steps.add_execution() for _ in range(2)] == [2, 1]


def test_the_search_for_placements_divides_times_by_them():
    search = AutoArchitecture(ks.HybridStrategy())
    search.is_ready = lambda: False
    with mock.patch.object(move_times.Counted, "end") as end:
        fit(search)
    assert [call.args for call in end.call_args_list] == 2 * [(2,), (2,), (1,)]
