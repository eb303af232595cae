"""State of Keras's callbacks. Checked on Keras 3.5 to 3.15."""

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


def set_learnt(callback, learnt):
    """Gives a callback its former state, after its `on_train_begin`.

    `EarlyStopping._set_monitor_op`, at the end of the first epoch, forgets the
    best value in Keras 3.5.

    Args:
        callback: one of `LEARNT`.
        learnt: dict by attribute; None: nothing learnt yet.
    """
    learnt = {n: v for n, v in learnt.items() if v is not None}
    vars(callback).update(learnt)
    name = "_set_monitor_op"
    if "best" not in learnt or not hasattr(callback, name):
        return
    stock = getattr(callback, name)

    def set_monitor_op():
        delattr(callback, name)
        stock()
        callback.best = learnt["best"]

    setattr(callback, name, set_monitor_op)
