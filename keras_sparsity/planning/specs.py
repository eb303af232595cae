"""A cluster and the variables of a model, as costs depend on them."""

import dataclasses
import math

import numpy as np

from keras_sparsity._tf import checks

MOST_PROCESSES = 100_000  # figures are kept for each
_WORDS, _WORD_BYTES = "int32", 4  # of encoded rows


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Machines that run the same number of processes each.

    Args:
        num_machines: N, at least 1.
        processes_per_machine: L, at least 1.
        megabits_per_second: rate of a machine's link, in each direction.
            With it `ks.plan` predicts times. None: unknown.
        latency_seconds: time of an empty message on a link, without the
            processors' time at its ends. None: it is not counted.
        message_seconds: processor time of an empty message, where it is sent
            and where it arrives. None: it is not counted.
        relative_speed: computation of a machine, relative to the one that
            makes the plan.
        processes_per_processor: the number of processes that share the
            computation of one machine: by default L; more where several
            machines are emulated on one.
        memory_bytes: memory of a process. None: it is not compared.
        message_seconds_per_byte: processor time of each byte of a message,
            where it is sent and where it arrives. None: it is not counted.

    Raises:
        ValueError: if a number is not positive, or a count, or the number of
            all processes, above 100,000.

    Example:

    >>> Cluster(num_machines=4, processes_per_machine=2).size
    8

    References:
        EuroSys 3.1 (N machines, each a worker).
    """

    num_machines: int = 1
    processes_per_machine: int = 1
    megabits_per_second: float | None = None
    latency_seconds: float | None = None
    message_seconds: float | None = None
    relative_speed: float = 1.0
    processes_per_processor: int | None = None
    memory_bytes: float | None = None
    message_seconds_per_byte: float | None = None

    def __post_init__(self):
        for name in ("num_machines", "processes_per_machine"):
            count = getattr(self, name)
            count = checks.positive_integer(name, count, most=MOST_PROCESSES)
            _set(self, name, count)
        checks.check(
            self.size <= MOST_PROCESSES,
            "processes_per_machine",
            self.processes_per_machine,
            f"a number with which {self.num_machines:,} machines have at most "
            f"{MOST_PROCESSES:,} processes",
        )
        if self.processes_per_processor is not None:
            checks.positive_integer(
                "processes_per_processor",
                self.processes_per_processor,
                " or None",
                MOST_PROCESSES,
            )
        for name in (
            *("megabits_per_second", "latency_seconds", "message_seconds"),
            *("message_seconds_per_byte", "memory_bytes"),
        ):
            if getattr(self, name) is not None:
                checks.positive_number(name, getattr(self, name), " or None")
        checks.positive_number("relative_speed", self.relative_speed)

    @property
    def size(self):
        """Number of processes."""
        return self.num_machines * self.processes_per_machine

    @property
    def seconds_per_byte(self):
        """Of a link; None if the rate is unknown."""
        if self.megabits_per_second is None:
            return None
        return 8e-6 / self.megabits_per_second


@dataclasses.dataclass(frozen=True)
class VariableSpec:
    """A variable, as its cost depends on it.

    Args:
        name: name of the variable.
        shape: its shape; `(num_rows, ...)` of a sparse variable.
        alpha: of a sparse variable the fraction of its rows, and so of its
            elements, that one worker touches in a step, 0 to 1; duplicate
            rows count once. None for a dense variable.
        dtype: name of its dtype.
        alpha_machine: the fraction that all L workers of a machine touch
            together, for local aggregation. By default 1 - (1 - alpha)^L, for
            workers that choose their rows independently. Popular rows make it
            smaller: measure it.
        num_partitions: P. By default the number of processes for a sparse
            variable, 1 for a dense one.
        row_bytes: bytes of a sparse variable's row where rows travel, a
            multiple of 4, as `engine_bytes` counts them. By default those of
            its dtype.

    Raises:
        ValueError: if an argument has another type or range.

    Example:

    >>> table = VariableSpec("table", (1000, 64), alpha=0.02)
    >>> table.num_bytes()
    256000
    >>> table.num_bytes("float16")
    128000

    References:
        EuroSys 2.2 and 3.1 (alpha), 4.3 (local aggregation).
    """

    name: str
    shape: tuple
    alpha: float | None = None
    dtype: str = "float32"
    alpha_machine: float | None = None
    num_partitions: int | None = None
    row_bytes: int | None = None

    def __post_init__(self):
        checks.string("name", self.name)
        _set(self, "shape", _shape(self.shape, self.alpha is not None))
        dtype_bytes("dtype", self.dtype)
        checks.check(
            self.alpha is None or _is_fraction(self.alpha),
            "alpha",
            self.alpha,
            "a fraction from 0 to 1, or None for a dense variable",
        )
        checks.check(
            self.alpha_machine is None
            or (
                self.is_sparse
                and _is_fraction(self.alpha_machine)
                and self.alpha_machine >= self.alpha
            ),
            "alpha_machine",
            self.alpha_machine,
            f"None, or for a sparse variable a fraction from alpha (which is "
            f"{self.alpha}) to 1",
        )
        if self.num_partitions is not None:
            checks.num_partitions(
                "num_partitions", self.num_partitions, " or None"
            )
        if self.row_bytes is not None:
            checks.positive_integer("row_bytes", self.row_bytes, " or None")
            checks.check(
                self.is_sparse and self.row_bytes % _WORD_BYTES == 0,
                "row_bytes",
                self.row_bytes,
                f"None, or of a sparse variable a multiple of {_WORD_BYTES}",
            )

    @property
    def is_sparse(self):
        return self.alpha is not None

    @property
    def of_rows(self):
        """The variable as its rows travel."""
        if self.row_bytes is None:
            return self
        return dataclasses.replace(
            self,
            shape=(self.shape[0], self.row_bytes // _WORD_BYTES),
            dtype=_WORDS,
            row_bytes=None,
        )

    @property
    def num_elements(self):
        return math.prod(self.shape)

    def num_bytes(self, dtype=None):
        """w: bytes of the whole variable, in its own dtype or another."""
        dtype = self.dtype if dtype is None else dtype
        return self.num_elements * dtype_bytes("dtype", dtype)


def alpha_model(variables):
    """The sparsity of a model: the mean of alpha, weighted by size.

    Args:
        variables: list of `VariableSpec`; alpha of a dense one is 1.

    Returns:
        alpha_model, 0 to 1.

    Raises:
        ValueError: if there is no variable, or one of another type.

    Example:

    >>> kernel = VariableSpec("kernel", (100, 100))
    >>> table = VariableSpec("table", (300, 100), alpha=0.2)
    >>> round(alpha_model([kernel, table]), 3)
    0.4

    References:
        EuroSys 3.1.
    """
    variables = checked_variables(variables)
    sizes = np.array([v.num_elements for v in variables], float)
    alphas = [v.alpha if v.is_sparse else 1.0 for v in variables]
    return float(np.dot(sizes, alphas) / sizes.sum())


def checked_variables(variables):
    checks.check(
        isinstance(variables, (list, tuple))
        and len(variables) > 0
        and all(isinstance(v, VariableSpec) for v in variables),
        "variables",
        variables,
        "a list of one or more `ks.planning.VariableSpec`",
    )
    return list(variables)


def dtype_bytes(name, dtype):
    if isinstance(dtype, str) and dtype == "bfloat16":  # NumPy has none
        return 2
    try:
        known = np.dtype(dtype)
    except Exception:  # whatever an object's own method raises
        known = None
    checks.check(
        dtype is not None and known is not None and known.kind in "biufc",
        name,
        dtype,
        "the name of a dtype of numbers, such as 'float32'",
    )
    return known.itemsize


def check_is(value, kind, name):
    checks.check(
        isinstance(value, kind),
        name,
        value,
        f"a `ks.planning.{kind.__name__}`",
    )


def _is_fraction(value):
    return checks.is_number(value) and 0 <= value <= 1


def _shape(shape, has_rows):
    is_valid = isinstance(shape, (list, tuple)) and all(
        checks.is_integer(n) and n >= 1 for n in shape
    )
    checks.check(
        is_valid and (len(shape) > 0 or not has_rows),
        "shape",
        shape,
        "a tuple of positive integers, and of a sparse variable not empty: "
        "its first axis is that of the rows",
    )
    return tuple(int(n) for n in shape)


def _set(instance, name, value):
    object.__setattr__(instance, name, value)
