"""State of Keras's callbacks. Checked on Keras 3.5 to 3.15."""

import keras

from keras_sparsity._tf import checks

# Attributes that change while a model trains; all else are settings.
LEARNT = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch"),
    "ReduceLROnPlateau": ("best", "wait", "cooldown_counter"),
    "ModelCheckpoint": (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
}


def learnt(callbacks):
    """The state of callbacks: the name of each one's class, and a dict.

    This has what Keras's callbacks have learnt, by attribute.
    """
    found = []
    for callback in callbacks:
        kind = type(callback).__name__
        names = [n for n in LEARNT.get(kind, ()) if n in vars(callback)]
        found.append([kind, {n: vars(callback)[n] for n in names}])
    return found


def check_learnt(saved, path):
    """Raises where a checkpoint has more than callbacks learn in training.

    It may be someone else's: settings, such as the path to which a callback
    writes, are the script's own.
    """
    for kind, of_kind in saved:
        for name, value in of_kind.items():
            is_value = value is None or isinstance(value, (int, float))
            if name not in LEARNT.get(kind, ()) or not is_value:
                raise ValueError(
                    f"The checkpoint {path} would set {kind}.{name} to "
                    f"{checks.spell(value)}, which no {kind} learns in "
                    "training: it is damaged, or made to do harm. Use another."
                )


def append_logs(callbacks):
    """Has each `CSVLogger` of a `fit` that goes on keep the lines so far."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def log_weights_within(board, entered, is_writer):
    """Has a `TensorBoard` write its histograms of weights in a context.

    `TensorBoard._log_weights`.

    Args:
        entered: function without arguments that returns the context.
        is_writer: whether it writes them; else it enters the context alone.
    """

    def log_weights(epoch):
        with entered():
            if is_writer:
                type(board)._log_weights(board, epoch)

    board._log_weights = log_weights


def set_all_learnt(callbacks, saved):
    """Gives callbacks the state of others of their classes, in their order.

    Rank 0 may have more of them than others.

    Args:
        callbacks, saved: lists; `saved` as from `learnt`.
    """
    saved = list(saved)
    for callback in callbacks:
        for number, (kind, of_kind) in enumerate(saved):
            if kind == type(callback).__name__:
                set_learnt(callback, of_kind)
                del saved[number]
                break


def set_learnt(callback, learnt):
    """Gives a callback its former state, after its `on_train_begin`.

    `EarlyStopping._set_monitor_op`, at the end of the first epoch, forgets the
    best value in Keras 3.5.
    """
    # None: nothing is learnt yet.
    learnt = {n: v for n, v in learnt.items() if v is not None}
    vars(callback).update(learnt)
    name = "_set_monitor_op"
    vars(callback).pop(name, None)  # of a `fit` that had failed
    if "best" not in learnt or not hasattr(callback, name):
        return
    stock = getattr(callback, name)

    def set_monitor_op():
        delattr(callback, name)
        # Of a second training: `on_train_begin` may have forgotten it.
        best = callback.best
        stock()
        callback.best = best

    setattr(callback, name, set_monitor_op)
