"""A worker that was started anew takes part in a `fit` that runs."""

import contextlib
import logging
import time

import keras

from keras_sparsity._tf import keras_callbacks, keras_variables, random_seeds
from keras_sparsity.asynchronous import meeting
from keras_sparsity.training import resuming


class Progress:
    """What ranks learn while they train, apart from what servers have."""

    def __init__(self, model, callbacks):
        self._model, self._callbacks = model, callbacks

    def state(self, own_values):
        """An object that pickles; `own_values` are updated by no rule."""
        history, rate = self._model.history, self._rate()
        return {
            "values": [keras.ops.convert_to_numpy(v) for v in own_values],
            "rate": None if rate is None else float(rate),
            "history": (history.epoch, history.history),
            "callbacks": keras_callbacks.learnt(self._callbacks),
        }

    def take(self, state, own_values):
        """Takes the `state` of another rank."""
        for variable, value in zip(own_values, state["values"], strict=True):
            variable.assign(value)
        if state["rate"] is not None:
            self._rate().assign(state["rate"])
        history = self._model.history
        history.epoch, values = state["history"]
        history.history.clear()
        history.history.update(values)
        keras_callbacks.set_all_learnt(self._callbacks, state["callbacks"])

    def _rate(self):
        """The variable, which callbacks may set; None of a schedule."""
        rate = self._model.optimizer.learning_rate
        return rate if keras_variables.is_variable(rate) else None


@contextlib.contextmanager
def begun(model, callbacks, arguments, number):
    """Context of a `fit`, as `resuming.resuming`; waits for others' epoch.

    A `fit` that the others have ended is resumed by a joining process alone,
    from the end of its `ShardedCheckpoint`. So is one that they run, by a
    server, which takes its place in their epoch with the state at its
    beginning.

    Args:
        arguments: `fit`'s, by name; gets `initial_epoch`.
        number: which `fit` of this process it is.

    Yields:
        The `ShardedCheckpoint` or None, and how many epochs of the input others
        have read.
    """
    collectives = model.distribute_strategy.collectives
    letters = meeting.joining(collectives)
    is_server = collectives.is_server
    comes_back = letters and is_server and letters.runs(number)
    epoch = None if is_server else letters and letters.wait(number)
    if epoch is None:
        trains = letters is None
        told = arguments, meeting.left(collectives), trains
        with resuming.resuming(model, callbacks, *told) as checkpoint:
            is_over = _first(arguments) >= arguments.get("epochs", 1)
            if not trains and is_server:
                has_it = checkpoint and checkpoint.has(_first(arguments))
                _check_has_state(has_it if comes_back else is_over, number)
            elif not trains and not is_over:
                _stay_out(number)
            yield checkpoint, 0
        return
    order_seed = resuming.next_order_seed()
    checkpoint = resuming.checkpoint_among(callbacks)
    first = _first(arguments)
    arguments["initial_epoch"] = epoch
    keras_callbacks.append_logs(callbacks)
    with contextlib.ExitStack() as stack:
        if checkpoint:
            stack.callback(checkpoint.end)
            order_seed = checkpoint.join(model, callbacks, epoch, order_seed)
        stack.enter_context(random_seeds.array_orders_change(order_seed))
        yield checkpoint, epoch - first


def _first(arguments):
    return arguments.get("initial_epoch", 0)


def _check_has_state(has_state, number):
    if not has_state:
        raise RuntimeError(
            "A server that was started anew takes the state of each `fit` "
            "from its ShardedCheckpoint. Received: no checkpoint of `fit` "
            f"number {number + 1} of the script that has it. Give each one, "
            "with a folder of its own, the same each time the script is run."
        )


def _stay_out(number):
    """Waits for the end of the others, which ends this process."""
    logging.getLogger(__name__).warning(
        "The others have ended `fit` number %d of the script, and no "
        "ShardedCheckpoint of it has its end: this process takes part no more.",
        number + 1,
    )
    while True:
        time.sleep(1)
