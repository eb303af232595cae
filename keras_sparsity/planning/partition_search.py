"""Finds the number of partitions of a table by trying some.

With P partitions on `size` owners, the time of an iteration is taken to be

    theta0 + theta1 * share(P) + theta2 * P + theta3 / P,
    share(P) = ceil(P / size) / P

fitted by non-negative least squares. `share` is the part of the rows that the
busiest owner has, for which all others wait. theta2 is the cost of a partition:
splitting ids, stitching rows, one update more. theta3 is an owner's gain from
smaller pieces: they fit into the processor's cache, or several cores work on
them.

The paper has theta0 + theta1 / P + theta2 * P. Up to P = size, its 1 / P is the
share; beyond, 1 / P goes on falling while the busiest owner's load does not,
and a fit of it alone picks a wrong P.
"""

import dataclasses
import math

import numpy as np

from keras_sparsity._tf import checks

# The paper needed 5 (EuroSys Table 5). Seven powers of two span a factor of 64.
MAX_SAMPLES = 7
# The time has risen when so many samples one after another are slower than the
# fastest by so much. One alone may be other work on the machine, or a hump
# before a fall: 200,000 x 64 under exact Adam, 2 processes on 2 cores with
# other work on them, took 48 and 63 ms with 1 and 2 partitions, and 31 with 32.
# Simulated on curves like that one, with 2 % of noise and every seventh sample
# 40 % slower, the choice took over 1.07 times the best's time in 5 % of the
# searches; when the first slower sample ended them, over 2.2 times.
_RISEN = 2
_RISE = 0.05


@dataclasses.dataclass(frozen=True)
class PartitionSample:
    """The measured time of one number of partitions.

    Args:
        num_partitions: P.
        seconds: seconds of an iteration.
        error_seconds: standard error of `seconds`.

    Raises:
        Nothing: `PartitionSampler.record` checks the numbers.

    Example:

    >>> PartitionSample(4, seconds=0.02).error_seconds
    0.0

    References:
        EuroSys 3.2.
    """

    num_partitions: int
    seconds: float
    error_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class PartitionChoice:
    """A number of partitions, with the samples and the fit behind it.

    Args:
        num_partitions: the choice.
        size: number of processes.
        samples: tuple of `PartitionSample`, in the order of their taking.
        theta: the fitted `(theta0, theta1, theta2, theta3)` in seconds, see
            `keras_sparsity.planning.partition_search`.
        misfit: root mean square of the fit's relative errors at the samples.

    Raises:
        Nothing: `PartitionSampler.choice` makes it.

    Example:

    >>> sampler = PartitionSampler(size=2, max_samples=3)
    >>> for count in (1, 2, 4):
    ...     sampler.record(count, 0.1 + 0.2 / count)
    >>> choice = sampler.choice()
    >>> choice.num_partitions, round(choice.predicted_seconds(4), 3)
    (4, 0.15)

    References:
        EuroSys 3.2 (equation 1).
    """

    num_partitions: int
    size: int
    samples: tuple
    theta: tuple
    misfit: float

    @property
    def sampled_seconds(self):
        """Seconds of an iteration by P, as sampled: a dict."""
        return {s.num_partitions: s.seconds for s in self.samples}

    def predicted_seconds(self, num_partitions):
        """Seconds of an iteration by the fit.

        Args:
            num_partitions: P.
        """
        checks.positive_integer("num_partitions", num_partitions)
        terms = _terms(num_partitions, self.size)
        return float(np.dot(self.theta, terms))

    def explained(self):
        """The choice and its reasons in one line."""
        seconds = self.sampled_seconds
        fastest = min(seconds, key=seconds.get)
        slowest = max(seconds, key=seconds.get)
        count = self.num_partitions
        if count in seconds:
            why = f"the fastest sample, {_milliseconds(seconds[count])}"
        else:
            why = (
                f"{_milliseconds(self.predicted_seconds(count))} by the fit, "
                f"against {_milliseconds(seconds[fastest])} sampled at "
                f"{fastest}"
            )
        return (
            f"{count} partitions: {why} (the slowest, at {slowest}: "
            f"{_milliseconds(seconds[slowest])}; {len(seconds)} samples from "
            f"{min(seconds)} to {max(seconds)}; fit {self._equation()}, off "
            f"by {self.misfit:.1%})"
        )

    def _equation(self):
        names = ("", f" ceil(P/{self.size})/P", " P", " / P")
        terms = [
            f"{1e3 * theta:.3g}{name}"
            for theta, name in zip(self.theta, names, strict=True)
            if theta > 1e-9
        ]
        return f"{' + '.join(terms)} ms"


class PartitionSampler:
    """The paper's search: proposes samples, records them, and chooses.

    It starts at `start`, doubles P until the time rises, then halves P from
    the start until the time rises. Two slower samples in a row count as a
    rise; one alone may be noise. The remaining samples try the best P of the
    fit. The choice lies between the smallest and the largest P sampled.

    The fastest sample wins, unless the fit predicts an unsampled P to be
    faster by more than both the misfit and the samples' error: noise does not
    make a curve beat a measurement.

    Args:
        size: number of processes.
        start: the first P, for example the number of machines.
        allowed: function from P to a bool: whether P may be tried or chosen,
            for example within a memory limit; by default any P may.
        max_samples: largest number of samples.

    Raises:
        ValueError: if a number is not positive, `allowed` is no such
            function, or it forbids `start`.

    Example:

    >>> seconds = lambda count: 1 + 8 * -(-count // 6) / count + 0.1 * count
    >>> sampler = PartitionSampler(size=6)
    >>> while (count := sampler.proposal()) is not None:
    ...     sampler.record(count, seconds(count))
    >>> sampler.choice().num_partitions
    6

    References:
        EuroSys 3.2 (equation 1).
    """

    def __init__(self, size, start=1, allowed=None, max_samples=MAX_SAMPLES):
        self.size = checks.positive_integer("size", size)
        self.start = checks.positive_integer("start", start)
        checks.check(
            allowed is None or callable(allowed),
            "allowed",
            allowed,
            "None or a function from a number of partitions to a bool",
        )
        self.max_samples = checks.positive_integer("max_samples", max_samples)
        self._allowed = allowed or (lambda count: True)
        self._samples = {}
        try:
            is_allowed = bool(self._allowed(self.start))
        except Exception as error:  # whatever the function raises
            raise ValueError(
                "`allowed` must be a function from a number of partitions to "
                f"a bool. Received: allowed={checks.spell(allowed)}, which for "
                f"{start} raised {type(error).__name__}: "
                f"{checks.shortened(error)}"
            ) from error
        if not is_allowed:
            raise ValueError(
                "`start` must be an allowed number of partitions. Received: "
                f"start={start}."
            )

    @property
    def samples(self):
        """Tuple of `PartitionSample`, in the order of `record`."""
        return tuple(self._samples.values())

    def proposal(self):
        """The next P to sample, or None: choose now."""
        if len(self._samples) >= self.max_samples:
            return None
        if self.start not in self._samples:
            return self.start
        for following in (lambda count: 2 * count, lambda count: count // 2):
            count = self._along(following)
            if count is not None:
                return count
        return self._unsampled_best()

    def record(self, num_partitions, seconds, error_seconds=0.0):
        """Records the measured time of an iteration.

        Args:
            num_partitions: P.
            seconds: seconds of an iteration with P partitions.
            error_seconds: their standard error.

        Raises:
            ValueError: if a number is out of range.
        """
        count = checks.positive_integer("num_partitions", num_partitions)
        checks.positive_number("seconds", seconds)
        checks.check(
            checks.is_number(error_seconds) and 0 <= error_seconds < np.inf,
            "error_seconds",
            error_seconds,
            "a number that is not negative",
        )
        self._samples[count] = PartitionSample(
            count, float(seconds), float(error_seconds)
        )

    def choice(self):
        """The `PartitionChoice` by the samples so far.

        Raises:
            ValueError: if there is no sample.
        """
        if not self._samples:
            raise ValueError(
                "There is nothing to choose by: no sample is recorded. Call "
                "`record(num_partitions, seconds)` first."
            )
        theta, misfit = _fit(self.samples, self.size)
        fastest = self._fastest()
        count = fastest.num_partitions
        best, seconds = self._fitted_best(theta)
        doubt = max(misfit, self._noise(), 0.01)
        if best not in self._samples and seconds * (1 + doubt) < (
            fastest.seconds
        ):
            count = best
        return PartitionChoice(
            count, self.size, self.samples, tuple(theta.tolist()), misfit
        )

    def _along(self, following):
        """The next P on the way from the start, or None at its end."""
        last = fastest = self._samples[self.start]
        num_risen = 0
        while num_risen < _RISEN:
            count = following(last.num_partitions)
            if count < 1 or not self._allowed(count):
                return None
            if count not in self._samples:
                return count
            last = self._samples[count]
            fastest = min(fastest, last, key=lambda s: s.seconds)
            has_risen = last.seconds > fastest.seconds * (1 + _RISE)
            num_risen = num_risen + 1 if has_risen else 0
        return None

    def _unsampled_best(self):
        """The P that is worth a sample by the fit, or None."""
        if len(self._samples) < 3:
            return None
        theta, _ = _fit(self.samples, self.size)
        best, seconds = self._fitted_best(theta)
        fastest = self._fastest().seconds
        is_worth_it = best not in self._samples and seconds < 0.99 * fastest
        return best if is_worth_it else self._even_beside_fastest()

    def _even_beside_fastest(self):
        """The nearest unsampled P with equal shares of all owners, or None.

        If all samples near the fastest are uneven (1, 3 and 7 among two
        owners), the fit does not know the effect of evenness.
        """
        place = self._fastest().num_partitions
        if place % self.size == 0:
            return None
        below = max((c for c in self._samples if c < place), default=place)
        above = min((c for c in self._samples if c > place), default=place)
        even = [
            count
            for count in range(below + 1, above)
            if count % self.size == 0 and self._allowed(count)
        ]
        return min(even, key=lambda c: abs(c - place), default=None)

    def _fastest(self):
        """The sample that took the least time."""
        return min(self._samples.values(), key=lambda s: s.seconds)

    def _fitted_best(self, theta):
        """The P with the least time by the fit, inside the range: and that."""
        counts = [
            count
            for count in range(min(self._samples), max(self._samples) + 1)
            if count in self._samples or self._allowed(count)
        ]
        seconds = [np.dot(theta, _terms(c, self.size)) for c in counts]
        best = int(np.argmin(seconds))
        return counts[best], float(seconds[best])

    def _noise(self):
        return max(s.error_seconds / s.seconds for s in self._samples.values())


def busiest_rows(num_rows, num_partitions, size):
    """Number of rows at the busiest owner of a table.

    Partition p belongs to the owner number p modulo `size`, and row r to
    partition r modulo P, so the first owner has the most.

    Example:

    >>> busiest_rows(num_rows=10, num_partitions=3, size=2)
    7
    """
    even, rest = divmod(num_rows, num_partitions)
    return even * -(-num_partitions // size) + -(-rest // size)


def _terms(num_partitions, size):
    """The factors of theta0 to theta3."""
    share = math.ceil(num_partitions / size) / num_partitions
    return np.array([1.0, share, num_partitions, 1.0 / num_partitions])


def _fit(samples, size):
    """`(theta, misfit)`, of the relative errors.

    In 400 simulated searches with 1 % of noise, the choice by these four terms
    was more than 3 % slower than the best once on curves without theta3, once
    without theta1, and never on curves with both; by the first three terms 0,
    26 and 29 times.
    """
    # Imported here: it takes 0.3 s, and few programs search.
    from scipy.optimize import nnls

    seconds = np.array([s.seconds for s in samples])
    terms = np.array([_terms(s.num_partitions, size) for s in samples])
    relative = terms / seconds[:, np.newaxis]
    theta, residual = nnls(relative, np.ones(len(samples)))
    return theta, float(residual / math.sqrt(len(samples)))


def _milliseconds(seconds):
    return f"{1e3 * seconds:.4g} ms"
