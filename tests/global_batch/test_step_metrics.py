"""Metrics in a step: results follow updates, in few messages."""

from unittest import mock

import keras

from keras_sparsity import collectives
from keras_sparsity.global_batch import step_metrics


def test_results_are_combined_again_after_an_update_only():
    first = keras.metrics.Mean(name="first")
    second = keras.metrics.Mean(name="second")
    messages = []
    stock = step_metrics.combined

    def counted(variables, communicator):
        messages.append({v.path.split("/")[0] for v in variables})
        return stock(variables, communicator)

    with (
        mock.patch.object(step_metrics, "combined", counted),
        step_metrics.results_are_global(
            lambda: [first, second], collectives.current()
        ) as results,
    ):
        first.update_state([1.0, 3.0])
        second.update_state([5.0])
        assert float(first.result()) == 2.0
        assert float(second.result()) == 5.0
        assert messages == [{"first", "second"}]
        second.update_state([7.0])
        assert float(first.result()) == 2.0
        assert float(second.result()) == 6.0
        assert messages[1:] == [{"second"}]
    assert [float(result) for result in results] == [2.0, 5.0, 2.0, 6.0]
    assert float(second.result()) == 6.0
