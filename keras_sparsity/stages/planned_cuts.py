"""The cuts of a planned model, found again in the same model made anew."""

import dataclasses
import re

from keras_sparsity._tf import checks

# Keras numbers layers without a name of their own over all models: `dense_1`
# of one model is `dense_5` of the same model made anew.
_NUMBER = re.compile(r"_\d+(?=/|$)")


@dataclasses.dataclass(frozen=True)
class PlannedCuts:
    """Places between a model's calls, whatever numbers Keras gives these.

    Args:
        names: tuple of the names of all of the model's calls, in order.
        places: tuple of the places of the cuts.

    Example:

    >>> import keras
    >>> from keras_sparsity.stages.cutting import Cutter
    >>> def cutter():
    ...     layers = [keras.layers.Dense(1) for _ in range(3)]
    ...     return Cutter(keras.Sequential([keras.Input((1,)), *layers]))
    >>> names = tuple(call.name for call in cutter().calls)
    >>> PlannedCuts(names, (1,)).places_in(cutter())
    [1]
    """

    names: tuple
    places: tuple

    def places_in(self, cutter):
        """The places of the cuts of the model of a `Cutter`, a list.

        Raises:
            ValueError: if the model makes other calls than the planned one.
        """
        names = [call.name for call in cutter.calls]
        if _without_numbers(names) != _without_numbers(self.names):
            raise ValueError(
                "`plan.strategy()` trains the model that was planned, made "
                "anew in its scope. Received: a model of the layers "
                f"{checks.spell(names)}; planned: "
                f"{checks.spell(list(self.names))} (numbers that Keras appends "
                "to names may differ). Plan this model, or name the layers "
                "after which it is cut: `stages` of `ks.PipelineStrategy` and "
                "`ks.LayerPlacementStrategy`."
            )
        places = list(self.places)
        cutter.check_possible(places)
        return places


def _without_numbers(names):
    return [_NUMBER.sub("", name) for name in names]
