"""Every argument of the public API, wrong: one error that says what to do.

`tests/bad_arguments` has the cases; the tests after theirs see that no
argument is left out.
"""

import re

import keras
import pytest

import keras_sparsity as ks
from tests.bad_arguments import BAD
from tests.public_calls import (
    ANY_VALUE,
    DIM,
    ROWS,
    VALID,
    parameters,
    public_callables,
)

# Public classes that only this package makes, and errors.
NOT_CALLED = {
    "collectives.CollectiveError": "an error",
    "collectives.Collectives": "made by `start`",
    "collectives.Route": "made by `all_to_all`",
    "collectives.Route.reversed": "no argument",
    "collectives.agreed_seed": "no argument",
    "collectives.current": "no argument",
    "collectives.explained": "for this package's own errors",
    "collectives.failure": "no argument",
    "launch.LaunchError": "an error",
    "launch.main": "see tests/launch/test_wrong_usage.py",
    "losses.GlobalMean.call": "what Keras's losses call",
    "planning.Choice": "made by `plan`",
    "planning.PartitionChoice": "made by `PartitionSampler`",
    "planning.PartitionChoice.explained": "no argument",
    "planning.PartitionSample": "made by `PartitionSampler`",
    "planning.PartitionSampler.choice": "no argument",
    "planning.PartitionSampler.proposal": "no argument",
    "planning.Plan": "made by `plan`",
    "planning.TransferBytes": "made by `transfer_bytes`",
    "sparsity.VariableSparsity": "made by `measured`",
    "HybridOptimizer.options": "no argument",
    "HybridOptimizer.places": "no argument",
    "HybridOptimizer.state": "no argument",
    # Between files of this package.
    "callbacks.ArchitectureLogger.see": "called by `fit`",
    "callbacks.ShardedCheckpoint.begin": "called by `fit`",
    "callbacks.ShardedCheckpoint.order_seed": "called by `fit`",
    "callbacks.ShardedCheckpoint.join": "called by `fit`",
    "callbacks.ShardedCheckpoint.use_input": "called by `fit`",
    "callbacks.ShardedCheckpoint.use_collectives": "called by `fit`",
    "callbacks.ShardedCheckpoint.has": "called by `fit`",
    **dict.fromkeys(
        (
            f"ShardedTable.{name}"
            for name in (
                "create",
                "hold",
                "place",
                "layout_over_owners",
                "read",
                "settle",
                "shard",
                "to_stock",
                "use_constraint",
                "use_regularizer",
            )
        ),
        "called by layers, saving and the optimizer",
    ),
    **dict.fromkeys(
        (
            f"HybridOptimizer.{name}"
            for name in (
                "follow",
                "may_keep_rows_of",
                "slots_of",
                "updates_rows_of",
            )
        ),
        "called where tables are moved",
    ),
    **dict.fromkeys(
        (
            f"layers.SampledSoftmax.{name}"
            for name in ("sampled_losses", "full_losses")
        ),
        "called by the loss",
    ),
    **dict.fromkeys(
        (
            f"layers.SampledSoftmax.{name}"
            for name in ("asked", "following", "may_come_with_others", "sample")
        ),
        "called where rows are pulled together",
    ),
    **dict.fromkeys(
        (
            f"layers.ShardedEmbeddingCollection.{name}"
            for name in ("flat", "packed")
        ),
        "called by `export`",
    ),
}


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    BAD,
    ids=[f"{name} {', '.join(map(str, wrong))}" for name, wrong, _ in BAD],
)
def test_bad_input_is_explained(name, wrong, message):
    function, arguments = VALID[name]()
    error = ValueError
    if message.startswith("TypeError: "):
        error, message = TypeError, message.removeprefix("TypeError: ")
    with pytest.raises(error) as raised:
        function(**{**arguments, **wrong})
    assert type(raised.value) in (ValueError, TypeError)
    assert re.search(f"(?s){message}", str(raised.value)), raised.value


@pytest.mark.parametrize("to", [0, "a", 2.0, ("ps", 0), ("ps", 1, 2), "auto"])
def test_bad_places_of_tables_are_explained(to):
    layer = ks.layers.ShardedEmbedding(ROWS, DIM, name="words")
    moved = keras.Sequential([keras.Input((3,)), layer])
    with pytest.raises(ValueError, match=r"`moves\['words'\].*Received"):
        ks.moves.move(moved, {layer.table: to})
    with pytest.raises(ValueError, match=r"`partitions\['words'\].*integer"):
        ks.moves.repartition(moved, {layer.table: to})
    layer.table.variable._value = None  # as if it were built later
    with pytest.raises(ValueError, match="not distributed yet. Build the"):
        ks.moves.repartition(moved, {layer.table: 2})


# Which need a new process, or a checkpoint.
EXPENSIVE = {"launch.run", "callbacks.ShardedCheckpoint.restore"}


@pytest.mark.parametrize("name", [n for n in VALID if n not in EXPENSIVE])
def test_the_other_arguments_are_right(name):
    """So that it is the wrong one that each line of the table is about."""
    function, arguments = VALID[name]()
    function(**arguments)


# Nothing is left out.


def test_every_argument_is_in_the_table():
    callables = public_callables()
    tested = {f"{name}.{key}" for name, wrong, _ in BAD for key in wrong}
    missing = []
    for name, function in callables.items():
        if name in NOT_CALLED:
            continue
        missing += [
            f"{name}.{parameter}"
            for parameter in parameters(function)
            if f"{name}.{parameter}" not in tested | set(ANY_VALUE)
        ]
    assert not missing
    assert {name for name, _, _ in BAD} <= VALID.keys()


def test_the_lists_name_what_exists():
    callables = public_callables()
    overridden = {"HybridOptimizer.apply", "HybridOptimizer.build"}
    overridden |= {n for n in VALID if n.endswith(".call")}
    assert VALID.keys() <= callables.keys() | overridden
    assert NOT_CALLED.keys() <= callables.keys() | {"losses.GlobalMean.call"}
