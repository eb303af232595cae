"""Brings `fit`'s input back to where a training run was interrupted."""

import warnings

from keras_sparsity._tf import keras_input


def replay(
    epoch_iterator, num_epochs, num_steps, on_done, first_is_enough=False
):
    """Has the next epoch begin where the interrupted one stopped.

    Earlier input is read once more and thrown away: only this brings shuffles,
    generators and their random numbers to their former state. Of arrays
    (`fit(x, y)`), one batch of each earlier epoch is enough.

    Args:
        epoch_iterator: the iterator of Keras's `fit`.
        num_epochs: how many epochs were completed.
        num_steps: how many steps of the interrupted epoch were done.
        on_done: called when the input is there.
        first_is_enough: whether one batch of each earlier epoch was all that
            every process has read of it for sure.
    """
    num_per_execution = epoch_iterator.steps_per_execution
    if num_steps % num_per_execution:
        raise ValueError(
            f"The training stopped after {num_steps} steps of an epoch, which "
            "is no multiple of steps_per_execution. Received: "
            f"steps_per_execution={num_per_execution}. Resume with a divisor "
            f"of {num_steps}."
        )
    first_is_enough |= keras_input.repeats_an_order_at_once(epoch_iterator)

    def enumerate_epoch(stock):
        for _ in range(num_epochs):
            _pass_epoch(epoch_iterator, stock(), first_is_enough)
        executions = stock()
        for _ in range(num_steps // num_per_execution):
            try:
                _pass_execution(next(executions)[-1], num_per_execution)
            except StopIteration:
                raise ValueError(
                    "The input has fewer batches than before the "
                    f"interruption. Expected: more than {num_steps} in epoch "
                    f"{num_epochs} (counted from 0). Give `fit` the same "
                    "input, or train in another directory."
                ) from None
        on_done()
        yield from executions

    if num_epochs or num_steps:
        keras_input.on_next_epoch(epoch_iterator, enumerate_epoch)
    else:
        on_done()


def _pass_epoch(epoch_iterator, executions, first_is_enough):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the input has ended
        with epoch_iterator.catch_stop_iteration():
            for *_, iterator in executions:
                _pass_execution(iterator, epoch_iterator.steps_per_execution)
                if first_is_enough:
                    break


def _pass_execution(iterator, num_steps):
    next(iterator)
    for _ in range(num_steps - 1):
        try:
            next(iterator)
        except StopIteration:  # a last execution of fewer steps
            return
