"""Input that is read once more does not fit the training before."""

import pytest

import keras_sparsity as ks
from tests import checkpoint_functions as functions


def test_fewer_batches_than_before(tmp_path):
    functions.train(tmp_path, kind="dataset", interrupt_after=7)
    model = functions.build()
    x, y = functions.arrays()
    checkpoint = ks.callbacks.ShardedCheckpoint(tmp_path)
    with pytest.raises(ValueError, match="fewer batches than before"):
        model.fit(x[:16], y[:16], batch_size=8, callbacks=[checkpoint])


def test_steps_per_execution_that_do_not_meet(tmp_path):
    functions.train(tmp_path, interrupt_after=4)
    with pytest.raises(ValueError, match="Resume with a divisor of 3"):
        functions.train(tmp_path, steps_per_execution=2)
