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
