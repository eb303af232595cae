"""Values that callbacks give variables between epochs."""

import keras
import tensorflow as tf


class Changes:
    """Finds them, and has all workers train with them.

    Args:
        own_values: `OwnValues`, whose variables servers have not.
    """

    def __init__(self, store, own_values, collectives):
        self._store, self._own_values = store, own_values
        self._collectives = collectives
        self._begun = []

    def begin(self):
        """From now on, what is assigned is a change."""
        # Without copies: TensorFlow assigns to a variable's new memory.
        self._begun = [
            (v, tf.convert_to_tensor(v.value))
            for v in [*self._store.variables, *self._own_values.variables]
        ]

    def settle(self):
        """Gives all ranks the changes of any; all ranks together.

        Of a variable that several ranks have changed, that of the first one.
        """
        rank, gather = self._collectives.rank, self._collectives.gather_objects
        own, served = self._found()
        sources = None
        while True:
            told = gather((rank, own, served), "asynchronous/changes")
            ranks = {each for each, *_ in told}
            # Again, if a rank is lost before it has uploaded its changes.
            if sources is not None and sources <= ranks:
                break
            first = {}
            for each, _, numbers in reversed(told):
                first.update(dict.fromkeys(numbers, each))
            sources = set(first.values())
            self._store.upload(
                {
                    id(self._begun[number][0])
                    for number, source in first.items()
                    if source == rank
                }
            )
            if not sources:
                break
        values = {}
        for _, of_rank, _ in reversed(told):
            values.update(of_rank)
        for number, value in values.items():
            self._begun[number][0].assign(value)
        self._begun = []

    def _found(self):
        """What has changed here, by number: own values; whether servers' have.

        Returns:
            dict of values; list of numbers.
        """
        num_served = len(self._store.variables)
        changed = [
            number
            for number, (variable, begun) in enumerate(self._begun)
            if not tf.reduce_all(tf.convert_to_tensor(variable.value) == begun)
        ]
        own = {
            number: keras.ops.convert_to_numpy(self._begun[number][0])
            for number in changed
            if number >= num_served
        }
        return own, [number for number in changed if number < num_served]
