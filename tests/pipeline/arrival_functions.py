"""Functions that the processes of tests of messages' arrival run."""

import threading
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.pipeline.links import Link

# More than are in flight.
NUM_BATCHES = 6
_SECONDS = 60


class Arrivals:
    """Counts messages; passes wait until enough of them have come.

    Args:
        are_made_again: whether passes are computed a second time, for their
            backward pass. Only those then wait, as more would block all of
            TensorFlow's threads.
    """

    def __init__(self, are_made_again):
        self._changed, self._count = threading.Condition(), 0
        self._are_made_again, self._known = are_made_again, set()
        self.in_time = []

    def note(self, received):
        with self._changed:
            self._count += 1
            self._changed.notify_all()
        return received

    def wait(self, values, number):
        """Gives the values when so many messages have come."""
        number = int(number)
        if self._are_made_again and number not in self._known:
            self._known.add(number)
            return values
        # That of its own gradients, too.
        most = min(number + self._are_made_again, NUM_BATCHES)
        with self._changed:
            self.in_time.append(
                self._changed.wait_for(lambda: self._count >= most, _SECONDS)
            )
        return values

    def noting(self, stock):
        """A `Link`'s method that receives, with a note of each arrival."""

        def receive(link, *args):
            received = stock(link, *args)
            first, *others = tf.nest.flatten(received)
            first = _called(self.note, first)
            return tf.nest.pack_sequence_as(received, [first, *others])

        return receive


class Waiting(keras.layers.Layer):
    """The values; its passes wait for messages.

    Args:
        arrivals: `Arrivals`.
        of_forward, of_backward: the number of messages of mini-batches or
            micro-batches behind its own that a pass waits for; None: of none.
    """

    def __init__(self, arrivals, of_forward=None, of_backward=None, **kwargs):
        super().__init__(**kwargs)
        self._arrivals = arrivals
        self._of_forward, self._of_backward = of_forward, of_backward

    def call(self, inputs):
        values, numbers = inputs
        number = numbers[0, 0]

        @tf.custom_gradient
        def waiting(values):
            made = self._waited(values, number, self._of_forward)

            def gradient(upstream):
                return self._waited(upstream, number, self._of_backward)

            return made, gradient

        return waiting(values)

    def _waited(self, values, number, more):
        if more is None:
            return tf.identity(values)
        number += more
        return _called(self._arrivals.wait, values, number)


def _called(function, values, *args):
    # Stateful ones would run one after the other.
    made = tf.numpy_function(
        function, [values, *args], values.dtype, stateful=False
    )
    return tf.ensure_shape(made, values.shape)


def waited(schedule, which, messages_ahead=False):
    """Whether each message came while the pass ahead of it still ran.

    Args:
        schedule: the schedule.
        which: `"gradients"`, for which forward passes of the first stage wait,
            or `"activations"`, for which backward passes of the last wait.
        messages_ahead: whether they are those that the next turn uses.

    Returns:
        List of bools of the rank that waits.
    """
    is_flushed = schedule in ("gpipe", "1f1b")
    is_last = which == "activations"
    arrivals = Arrivals(are_made_again=not (is_flushed or is_last))
    options = {"of_forward": int(messages_ahead)}, {}
    if which == "activations":
        options = {}, {"of_backward": 2}
    x, numbers = keras.Input((3,), name="x"), keras.Input((1,), name="numbers")
    y = keras.layers.Dense(4, name="first")(x)
    y = Waiting(arrivals, **options[0])([y, numbers])
    y = keras.layers.Dense(4, "tanh", name="cut")(y)
    y = keras.layers.Dense(4, name="second")(y)
    y = Waiting(arrivals, **options[1])([y, numbers])
    model = keras.Model([x, numbers], keras.layers.Dense(2)(y))
    num_parts = NUM_BATCHES if is_flushed else 1
    strategy = ks.PipelineStrategy(
        schedule, ["cut"], num_parts, messages_ahead=messages_ahead
    )
    with strategy.scope():
        model.compile("sgd", "mse")
    name = f"receive_{which}"
    noting = arrivals.noting(getattr(Link, name))
    x = np.ones((2 * NUM_BATCHES, 3), "float32")
    numbers = np.repeat(np.arange(NUM_BATCHES, dtype="float32"), 2)[:, None]
    with mock.patch.object(Link, name, noting):
        model.fit(
            [x, numbers],
            x[:, :2],
            batch_size=len(x) if is_flushed else 2,
            shuffle=False,
            verbose=0,
        )
    return arrivals.in_time
