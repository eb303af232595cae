"""Training steps of several models, timed in turn."""

import statistics
import time

import keras

# The first ones of a `fit` wait for its input.
_LEFT_OUT = 2


class Steps:
    """Some training steps of a model; called, it trains and times them.

    Args:
        model: compiled inside of a strategy's scope.
        dataset: this rank's, without an end.
        num_steps: how many steps a call trains.
    """

    def __init__(self, model, dataset, num_steps):
        self._model = model
        self._dataset = dataset
        self._num_steps = num_steps
        self._clock = _Clock()

    def train(self, num_steps):
        self._clock.seconds = []
        self._model.fit(
            self._dataset,
            steps_per_epoch=num_steps,
            verbose=0,
            callbacks=[self._clock],
        )

    def __call__(self):
        """Median milliseconds of a step, as long as its slowest rank's."""
        self.train(self._num_steps)
        ranks = self._model.distribute_strategy.collectives.gather_objects(
            self._clock.seconds[_LEFT_OUT:], name="benchmark/seconds"
        )
        return 1e3 * statistics.median(map(max, zip(*ranks, strict=True)))


class _Clock(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self._start)
