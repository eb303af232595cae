"""Rules whose weights follow a momentum, or rest."""

import dataclasses
import functools

import numpy as np

from keras_sparsity.update.closed_form.base import (
    ClosedForm,
    num_steps_of,
    powers,
)


@dataclasses.dataclass(frozen=True)
class Momentum(ClosedForm):
    r"""A velocity that shrinks by `momentum` is added in each step.

    Attributes:
        momentum: the factor.
        kind: the velocity's kind of slot.
        sign: 1: it is added; -1: it is subtracted.
        others: tuple of `(kind, factor)` of the other slots.
        is_nesterov: whether the weights are one step ahead.
    """

    momentum: float
    kind: str
    sign: int = 1
    others: tuple = ()
    is_nesterov: bool = False

    @property
    def factors(self):
        return {self.kind: self.momentum, **dict(self.others)}

    @functools.cached_property
    def kernel(self):
        ahead = self.momentum if self.is_nesterov else 1.0
        return ahead * powers(self.momentum, num_steps_of(self.momentum))

    def moved(self, weights, slots, sums):
        return weights + slots[self.kind] * (self.sign * sums[0])


@dataclasses.dataclass(frozen=True)
class Resting(ClosedForm):
    """The weights rest, but for their decay; slots shrink.

    Attributes:
        slot_factors: tuple of `(kind, factor)`.
    """

    slot_factors: tuple

    @property
    def factors(self):
        return dict(self.slot_factors)

    @property
    def kernel(self):
        return np.zeros((1, 1))

    def moved(self, weights, slots, sums):
        del slots, sums
        return weights
