"""Rank 0 warns of what mixes examples in other ranks' stages."""

import keras


class MixingTold(keras.callbacks.Callback):
    """Has rank 0 repeat the warnings of other stages, each once.

    A rank finds its own stage's when it traces a step, and a launcher shows
    rank 0's output alone. Looks after a run's first batch of each kind.

    Args:
        collectives: `Collectives` of all ranks.
        mixing: `Mixing` of the model.
    """

    def __init__(self, collectives, mixing):
        super().__init__()
        self._collectives, self._mixing = collectives, mixing
        self._kinds = set()

    def on_train_batch_end(self, batch, logs=None):
        self._tell("train")

    def on_test_batch_end(self, batch, logs=None):
        self._tell("test")

    def on_predict_batch_end(self, batch, logs=None):
        self._tell("predict")

    def _tell(self, kind):
        if kind in self._kinds or self._collectives.size == 1:
            return
        self._kinds.add(kind)
        found = self._collectives.gather_objects(
            self._mixing.told, name="pipeline/mixing"
        )
        if self._collectives.rank == 0:
            for of_rank in found:
                for place, text in of_rank.items():
                    self._mixing.tell(place, text)
