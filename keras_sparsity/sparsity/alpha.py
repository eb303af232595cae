"""How sparse each variable of a model is, measured while it trains."""

import dataclasses

import keras
import numpy as np

from keras_sparsity import collectives
from keras_sparsity._tf import checks, keras_variables
from keras_sparsity.collectives.differences import raise_if_different
from keras_sparsity.planning import VariableSpec
from keras_sparsity.sparsity import touches

__all__ = ["VariableSparsity", "measured", "popularity", "reset"]

# Of a variable's rows the busiest 1 %.
_BUSIEST = 100


@dataclasses.dataclass(frozen=True)
class VariableSparsity:
    """Which part of a variable training touches, over all ranks.

    A touch is one rank needing one row in one step of training. A row that
    occurs several times in a rank's part of the batch, or that is gathered
    twice in the step, is touched once. Where the ranks of a machine pull
    together, popularity and balance count the touches of machines.

    Attributes:
        name: the variable's path.
        shape: of the whole variable.
        dtype: its dtype.
        alpha: the fraction of the rows, and so of the elements, that one
            worker touches in a step, averaged over workers and sampled steps.
            Dedicated servers touch nothing, and are none. None where the
            gradient is dense (alpha counts as 1), and where no step was
            sampled yet.
        alpha_machine: the fraction that all workers of one machine touch
            together, averaged over their machines and sampled steps. None where
            alpha is, and under "allreduce" with several ranks on a machine:
            each then knows of its own touches only.
        num_steps: the sampled steps behind it; of a dense one 0.
        busiest_share: the share of all touches that the busiest 1 % of the
            rows (at least one row) get. None without a touch, and under
            "allreduce".
        owner_shares: of a table that is spread over processes, the share of
            all touches that each owner of rows served, by rank: all ranks, or
            the dedicated servers; else None.
        largest_rows: of such a table, the largest number of rows that one
            rank asks of one owner in a gather, on average over these; the
            native engine pads to it. None on other engines.

    Raises:
        Nothing: `ks.sparsity.measured` makes these objects and has checked
            its argument. `spec` raises as `ks.planning.VariableSpec`.

    Example:

    >>> import keras_sparsity as ks
    >>> table = ks.sparsity.VariableSparsity(
    ...     "table", (1000, 64), "float32", alpha=0.02, num_steps=16)
    >>> table.alpha, table.alpha_machine, table.num_steps
    (0.02, None, 16)

    References:
        EuroSys 2.2 and 3.1 (alpha).
    """

    name: str
    shape: tuple
    dtype: str
    alpha: float | None = None
    alpha_machine: float | None = None
    num_steps: int = 0
    busiest_share: float | None = None
    owner_shares: tuple | None = None
    largest_rows: float | None = None

    def spec(self, num_partitions=None):
        """The variable as `ks.planning` takes it.

        Args:
            num_partitions: as for `ks.planning.VariableSpec`.

        Example:

        >>> import keras_sparsity as ks
        >>> table = ks.sparsity.VariableSparsity(
        ...     "table", (1000, 64), "float32", alpha=0.02)
        >>> table.spec().num_bytes()
        256000
        """
        together = self.alpha_machine
        if together is not None:
            # The means over ranks and over machines weigh ranks in another
            # way where machines have different numbers of them.
            together = max(together, self.alpha)
        return VariableSpec(
            self.name,
            self.shape,
            self.alpha,
            self.dtype,
            together,
            num_partitions,
        )


def measured(model):
    """The sparsity of a model's variables, measured since training began.

    The first 16 steps in which a `ks.HybridOptimizer` updates a variable by
    rows are sampled, and then every 16th; only training counts. With N the
    number of rows and T_rs the set of those that worker r touches in step s

        alpha          = mean over r, s of |T_rs| / N
        alpha_machine  = mean over machines m, s of |union of T_rs, r on m| / N

    As in the paper, a variable is sparse if its gradient is of type
    `tf.IndexedSlices`: that of a `ks.ShardedTable` (of a `ShardedEmbedding`, a
    `SampledSoftmax`, or your own), and of an ordinary `keras.layers.Embedding`
    that nothing else uses. A regularizer makes the gradient dense, if every
    process has the whole variable; a regularizer's gradient of a sharded table
    does not travel, and is not counted.

    Every rank must call this function between steps, for example in a
    callback. It sends a few numbers for each variable. Measurements are not
    saved, and begin anew for a table that moves.

    Args:
        model: a model or a layer, or a list of variables.

    Returns:
        List of `VariableSparsity`, one for each of the model's trainable
        variables in their order, the same on all ranks.

    Raises:
        ValueError: if `model` is neither a model, a layer nor a list of
            variables; on every rank, if ranks give models with different
            variables.

    Example:

    >>> import keras, numpy as np, keras_sparsity as ks
    >>> model = keras.Sequential([
    ...     keras.Input((2,), dtype="int32"),
    ...     ks.layers.ShardedEmbedding(100, 4, name="words"),
    ...     keras.layers.Flatten(),
    ...     keras.layers.Dense(1, use_bias=False, name="out"),
    ... ])
    >>> with ks.HybridStrategy().scope():
    ...     model.compile("sgd", "mse")
    >>> ids = np.array([[1, 2], [2, 3], [1, 9], [1, 1]])
    >>> history = model.fit(ids, np.zeros(4), batch_size=2, verbose=0,
    ...                     shuffle=False)
    >>> for v in ks.sparsity.measured(model):
    ...     print(v.shape, v.alpha, v.num_steps)
    (100, 4) 0.025 2
    (8, 1) None 0

    References:
        EuroSys 2.2 and 3.1 (alpha), 4.3 (local aggregation).
    """
    variables = _variables_of(model)
    communicator = collectives.current()
    mine = [_reading(variable, communicator.rank) for variable in variables]
    paths = [variable.path for variable in variables]
    of_ranks = communicator.gather_objects((paths, mine), "sparsity/measured")
    raise_if_different(
        [paths for paths, _ in of_ranks],
        "The variables of which to tell the sparsity",
        "Every rank must ask for the same model.",
    )
    readings = zip(*(readings for _, readings in of_ranks), strict=True)
    return [
        _sparsity(variable, list(of_variable), communicator)
        for variable, of_variable in zip(variables, readings, strict=True)
    ]


def popularity(model):
    """How often rows were touched, in the steps that `measured` is of.

    Every rank must call it, between steps. It goes through the counts of all
    rows.

    Args:
        model: as for `measured`.

    Returns:
        dict from the name of each sparse variable, if a step was sampled, to
        `(touches, rows)`: two int64 arrays, each number of touches that occurs
        and how many rows have it. The same on all ranks. Variables under
        "allreduce" are left out, as each rank knows its own touches only.

    Raises:
        ValueError: if `model` is neither a model, a layer nor a list of
            variables.

    Example:

    >>> import keras, keras_sparsity as ks
    >>> ks.sparsity.popularity(keras.layers.Embedding(10, 4))
    {}

    References:
        EuroSys 3.2 (the load of servers, by partitions).
    """
    communicator = collectives.current()
    mine = {}
    for variable in _variables_of(model):
        if len(variable.shape) == 0:
            continue  # It has no rows.
        reading = _reading(variable, communicator.rank, variable.shape[0])
        is_known = reading is not None and not reading.is_of_rank
        if is_known and reading.num_steps:
            mine[variable.path] = reading.busiest
    of_ranks = communicator.gather_objects(mine, "sparsity/popularity")
    return {
        name: _summed([part[name] for part in of_ranks if name in part])
        for name in of_ranks[0]
    }


def _summed(histograms):
    """One histogram of several, each `(numbers, how often each occurs)`."""
    numbers, counts = map(np.concatenate, zip(*histograms, strict=True))
    numbers, index = np.unique(numbers, return_inverse=True)
    return numbers.astype(np.int64), np.bincount(index, counts).astype(np.int64)


def reset(model):
    """Forgets the measurements and samples the next 16 steps again.

    Every rank must call it between the same steps. Nothing is traced anew.

    Args:
        model: as for `measured`.

    Raises:
        ValueError: if `model` is neither a model, a layer nor a list of
            variables.

    Example:

    >>> import keras, keras_sparsity as ks
    >>> ks.sparsity.reset(keras.layers.Embedding(10, 4))

    References:
        EuroSys 3.1 (alpha).
    """
    for variable in _variables_of(model):
        counts = touches.existing(variable)
        if counts is not None:
            counts.reset()


def _variables_of(model):
    is_list = isinstance(model, (list, tuple))
    checks.check(
        isinstance(model, keras.layers.Layer)
        or (is_list and all(keras_variables.is_variable(v) for v in model)),
        "model",
        model,
        "a Keras model or layer, or a list of its variables",
    )
    return list(model) if is_list else list(model.trainable_variables)


def _is_spread(variable):
    table = getattr(variable, "table", None)
    return table is not None and table.is_sharded


def _num_busiest(variable):
    return max(1, variable.shape[0] // _BUSIEST)


def _reading(variable, rank, num_busiest=None):
    """One rank's `Reading` of a variable, or None."""
    counts = touches.existing(variable)
    if counts is None:
        return None
    reading = counts.read(num_busiest or _num_busiest(variable))
    # Where every rank counts all touches, one tells.
    is_told = rank == 0 or _is_spread(variable) or reading.is_of_rank
    return reading if is_told else None


def _sparsity(variable, readings, communicator):
    """`VariableSparsity` from the readings of all ranks."""
    machines = communicator.machines
    sparsity = VariableSparsity(
        variable.path,
        tuple(variable.shape),
        keras.backend.standardize_dtype(variable.dtype),
    )
    told = [reading for reading in readings if reading is not None]
    num_steps = max((reading.num_steps for reading in told), default=0)
    if not num_steps:
        return sparsity
    num_touches = sum(reading.num_touches for reading in told)
    num_together = sum(reading.num_together for reading in told)
    num_elements = num_steps * variable.shape[0]
    busiest_share = owner_shares = alpha_machine = None
    # Rows that several ranks touch are not known where each counts its own.
    if not told[0].is_of_rank or len(set(machines)) == len(machines):
        of_workers = machines[: communicator.num_workers]
        alpha_machine = num_together / (len(set(of_workers)) * num_elements)
    if num_touches and not told[0].is_of_rank:
        busiest = _sum_of_largest(
            [reading.busiest for reading in told], _num_busiest(variable)
        )
        busiest_share = busiest / num_touches
        if _is_spread(variable):
            owner_shares = tuple(
                reading.num_touches / num_touches
                for reading in told[-communicator.num_servers :]
            )
    # Of each rank alone, where touches are those of a machine's together.
    num_asked = sum(reading.num_asked for reading in told) or num_touches
    return dataclasses.replace(
        sparsity,
        alpha=num_asked / (communicator.num_workers * num_elements),
        alpha_machine=alpha_machine,
        num_steps=num_steps,
        busiest_share=busiest_share,
        owner_shares=owner_shares,
        largest_rows=max(reading.largest_rows for reading in told) or None,
    )


def _sum_of_largest(histograms, num_largest):
    """The sum of the largest numbers.

    Args:
        histograms: list of `(numbers, how often each occurs)`.
        num_largest: how many to add.
    """
    numbers, counts = (part[::-1] for part in _summed(histograms))
    before = np.cumsum(counts) - counts
    return int(numbers @ np.clip(num_largest - before, 0, counts))
