"""N processes give what one process gives with the dense gradient.

A matrix: cells (`matrix.py`) by places, an engine and a number of processes.
Each kind of cell also has a control, a comparison that must be seen to fail:
of a library that is broken on purpose (`breaks.py`), or with a reference that
ignores what the cell is about.

`make test` trains a cell at the places that `PLACES_OF` names, else at the next
of `_ROTATION`, so that a cell added to `CELLS` has one by itself. It leaves out
a few cells of which each field's value is trained in another. Some optimizers
have no cell of their own but share one with a way to train or a kind of model.
Every break is seen, by one kind of cell each. `make test-all` trains every cell
at every place, sees every break with each kind of cell that it is for, and
Hypothesis draws further cells from the same fields: some the same each time,
many anew.
"""

import dataclasses
import itertools
import typing

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies

import keras_sparsity as ks
from tests import matrix
from tests.cluster import ClusterError
from tests.conftest import engines
from tests.matrix import Cell
from tests.matrix_models import CONSTRAINTS, REGULARIZERS


class Case(typing.NamedTuple):
    """A cell, and how its control is made.

    Args:
        cell: the `Cell`.
        ignored: fields to change in a reference that ignores what the cell is
            about.
        broken: or a function of `breaks.py`.
    """

    cell: Cell
    ignored: dict | None = None
    broken: str | None = None


LOCAL = ("local", 1, 1)
N2, N3, N4, N22 = (
    ("native", n, m) for n, m in ((2, 1), (3, 1), (4, 1), (4, 2))
)
H2, H3, H4, H22 = (("horovod", *place[1:]) for place in (N2, N3, N4, N22))
PLACES = (LOCAL, N2, N3, N4, N22, H2, H3, H4, H22)

CLIP = {"global_clipnorm": 0.05}
MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9}
DECAY = {"weight_decay": 0.1}
L1_L2 = {
    "l1_regularization_strength": 0.001,
    "l2_regularization_strength": 0.01,
}
SCHEDULE = {
    "class_name": "ExponentialDecay",
    "config": {
        "initial_learning_rate": 0.1,
        "decay_steps": 5,
        "decay_rate": 0.5,
    },
    "module": "keras.optimizers.schedules",
    "registered_name": None,
}

CELLS = {
    # Optimizers, with all numbers of partitions.
    "sgd": Case(Cell(partitions=(1,)), broken="rows_of_one_rank"),
    "momentum": Case(Cell(arguments=MOMENTUM, partitions=(2,))),
    "adagrad": Case(
        Cell(optimizer="Adagrad", partitions=(3,)), broken="last_of_equal_ids"
    ),
    "rmsprop": Case(Cell(optimizer="RMSprop", partitions=(8,))),
    "adam": Case(
        Cell(optimizer="Adam", partitions=(1,), ordinary=True),
        broken="dense_not_reduced",
    ),
    "sgd, clipped": Case(Cell(arguments=CLIP, partitions=(8,))),
    "momentum, clipped": Case(
        Cell(arguments={**MOMENTUM, **CLIP}, partitions=(3,))
    ),
    "adagrad, clipped": Case(
        Cell(optimizer="Adagrad", arguments=CLIP, partitions=(2,))
    ),
    "rmsprop, clipped": Case(
        Cell(optimizer="RMSprop", arguments=CLIP, partitions=(1,))
    ),
    "adam, clipped": Case(
        Cell(optimizer="Adam", arguments=CLIP, partitions=(3, 8)),
    ),
    "lion": Case(Cell(optimizer="Lion")),
    "lamb, without tables": Case(
        Cell(optimizer="Lamb", partitions=(), ordinary=True),
        ignored={"optimizer": "Adam"},
    ),
    "adafactor, without tables": Case(
        Cell(optimizer="Adafactor", partitions=(), ordinary=True),
        ignored={"optimizer": "Adam"},
    ),
    # Lazy: the rule in NumPy, on touched rows.
    **{
        f"lazy {name}": Case(
            Cell(optimizer=name, arguments=arguments, sparse_updates="lazy"),
            ignored={"sparse_updates": "exact"},
        )
        for name, arguments in {
            "SGD": MOMENTUM,
            "RMSprop": {},
            "Adadelta": {"rho": 0.5},
            "Adam": {"amsgrad": True},
            "AdamW": DECAY,
            "Adamax": {},
            "Lion": {},
        }.items()
    },
    "lazy, constrained": Case(
        Cell(optimizer="Adam", sparse_updates="lazy", constraint="max norm"),
        ignored={"constraint": None},
    ),
    "lazy, ordinary": Case(
        Cell(
            optimizer="Adam",
            sparse_updates="lazy",
            partitions=(),
            ordinary=True,
        ),
        ignored={"sparse_updates": "exact"},
    ),
    # What any optimizer may be told besides.
    "clipnorm": Case(
        Cell(arguments={"clipnorm": 0.02}, partitions=(5,), ordinary=True),
        broken="norms_of_own_rows",
    ),
    "global_clipnorm": Case(
        Cell(arguments=CLIP, ordinary=True),
        broken="clipped_before_aggregation",
    ),
    "clipvalue": Case(
        Cell(arguments={"clipvalue": 0.005}, ordinary=True),
        broken="clipped_before_aggregation",
    ),
    "weight decay": Case(
        Cell(optimizer="AdamW", arguments=DECAY, ordinary=True),
        ignored={"arguments": {}},
    ),
    "weight decay, not of a table": Case(
        Cell(
            arguments=DECAY,
            partitions=(3, 2),
            ordinary=True,
            not_decayed="by variable",
        ),
        broken="decays_partitions",
    ),
    "weight decay, not by name": Case(
        Cell(
            optimizer="Adam",
            arguments=DECAY,
            ordinary=True,
            not_decayed="by name",
        ),
        ignored={"not_decayed": None},
    ),
    "average": Case(
        Cell(
            optimizer="Adam", arguments={"use_ema": True, "ema_momentum": 0.7}
        ),
        ignored={"arguments": {}},
    ),
    "average that overwrites": Case(
        Cell(
            arguments={
                "use_ema": True,
                "ema_momentum": 0.7,
                "ema_overwrite_frequency": 3,
            }
        ),
        ignored={"arguments": {"use_ema": True, "ema_momentum": 0.7}},
    ),
    "accumulation": Case(
        Cell(optimizer="Adam", arguments={"gradient_accumulation_steps": 3}),
        ignored={"arguments": {}},
    ),
    "accumulation, clipped": Case(
        Cell(
            arguments={"gradient_accumulation_steps": 2, "clipnorm": 0.02},
            partitions=(1,),
        ),
        ignored={"arguments": {"gradient_accumulation_steps": 2}},
    ),
    "loss scale": Case(
        Cell(optimizer="Adam", loss_scale=True), broken="dense_not_reduced"
    ),
    "overflow": Case(
        Cell(optimizer="Adam", loss_scale=True, overflows=True),
        ignored={"overflows": False},
    ),
    "schedule": Case(
        Cell(optimizer="Adagrad", arguments={"learning_rate": SCHEDULE}),
        ignored={"arguments": {}},
    ),
    "plateau": Case(Cell(plateau=True, epochs=3), ignored={"plateau": False}),
    "frozen table": Case(
        Cell(
            optimizer="Adam",
            arguments=CLIP,
            frozen="table_0",
            partitions=(3, 2),
        ),
        ignored={"frozen": None},
    ),
    "frozen layer": Case(
        Cell(arguments=MOMENTUM, frozen="hidden"), ignored={"frozen": None}
    ),
    # What tables take.
    "l1": Case(
        Cell(regularizer="l1", partitions=(4,)), ignored={"regularizer": None}
    ),
    "l1l2": Case(
        Cell(regularizer="l1l2", optimizer="Adam", left_over=3),
        ignored={"regularizer": "l2"},
    ),
    **{
        constraint: Case(
            Cell(constraint=constraint, optimizer=optimizer),
            ignored={"constraint": None},
        )
        for constraint, optimizer in zip(
            CONSTRAINTS, itertools.cycle(["SGD", "Adam"]), strict=False
        )
    },
    "regularized and constrained": Case(
        Cell(regularizer="l2", constraint="max norm", partitions=(2,)),
        ignored={"constraint": None},
    ),
    # The loss.
    "ragged last batch": Case(
        Cell(left_over=5, epochs=2), broken="own_denominators"
    ),
    "empty parts": Case(
        Cell(left_over=1, epochs=2, batch=4, optimizer="Adam"),
        ignored={"left_over": 0},
    ),
    "empty parts, logarithm": Case(
        Cell(model="logarithm", batch=6, left_over=2, epochs=2),
        ignored={"left_over": 0},
    ),
    "empty parts, added losses": Case(
        Cell(
            model="added losses",
            regularizer="l1l2",
            ordinary=True,
            batch=6,
            left_over=3,
            epochs=2,
        ),
        ignored={"left_over": 0},
    ),
    "empty parts, without labels": Case(
        Cell(model="without labels", optimizer="Adam", batch=6, left_over=3),
        ignored={"left_over": 0},
    ),
    "masked": Case(
        Cell(model="sequence", mask=True), broken="own_denominators"
    ),
    "masked pooling": Case(Cell(mask=True), ignored={"mask": False}),
    "masked and weighted": Case(
        Cell(model="sequence", mask=True, weights="sample", left_over=1),
        ignored={"weights": None},
    ),
    "sample weights, adadelta": Case(
        Cell(weights="sample", optimizer="Adadelta"), ignored={"weights": None}
    ),
    "class weights, amsgrad": Case(
        Cell(
            weights="class",
            left_over=2,
            optimizer="Adam",
            arguments={"amsgrad": True, "beta_2": 0.5},
        ),
        ignored={"weights": None},
    ),
    "weights of one half": Case(
        Cell(weights="of one half", reduction="mean_with_sample_weight"),
        broken="own_denominators",
    ),
    "sum": Case(
        Cell(reduction="sum", arguments={"learning_rate": 0.05}, left_over=3),
        ignored={"reduction": "sum_over_batch_size"},
    ),
    # Ways to train.
    "steps_per_execution, rmsprop": Case(
        Cell(
            steps_per_execution=6,
            optimizer="RMSprop",
            arguments={"momentum": 0.9, "centered": True},
            partitions=(5,),
        ),
        broken="rows_of_one_rank",
    ),
    "run_eagerly": Case(
        Cell(run_eagerly=True, optimizer="Adam", ordinary=True),
        broken="dense_not_reduced",
    ),
    "jit_compile": Case(
        Cell(jit_compile=True, optimizer="Adam", arguments=CLIP, ordinary=True),
        broken="dense_not_reduced",
    ),
    "averages, swapped with loss scaling": Case(
        Cell(
            optimizer="Adam",
            arguments={
                "learning_rate": 0.05,
                "use_ema": True,
                "ema_momentum": 0.9,
            },
            loss_scale=True,
            validates=True,
            swaps=True,
            epochs=2,
        ),
        ignored={"swaps": False},
    ),
    "train_on_batch": Case(
        Cell(loop="train_on_batch", left_over=3, weights="sample"),
        broken="own_denominators",
    ),
    "own step, nadam": Case(
        Cell(model="own step", optimizer="Nadam", partitions=(7,)),
        broken="rows_of_one_rank",
    ),
    "own logs": Case(
        Cell(model="own logs", batch=4, steps=20), broken="results_of_own_part"
    ),
    "own loop, schedule free": Case(
        Cell(
            loop="own loop",
            optimizer="ScheduleFreeAdamW",
            arguments={"warmup_steps": 5},
        ),
        broken="rows_of_one_rank",
    ),
    # Models.
    "two inputs, adamax": Case(
        Cell(model="two inputs", optimizer="Adamax", partitions=(6,)),
        broken="rows_of_one_rank",
    ),
    "rows that a closure asks for": Case(
        Cell(model="closure", partitions=(3, 2), optimizer="Adagrad"),
        broken="rows_of_one_rank",
    ),
    "tied, ftrl": Case(
        Cell(
            model="tied",
            optimizer="Ftrl",
            arguments=L1_L2,
        ),
        broken="rows_of_one_rank",
    ),
    "sampled and tied": Case(
        Cell(
            model="tied softmax",
            optimizer="Adam",
            arguments=CLIP,
            left_over=3,
        ),
        broken="rows_of_one_rank",
    ),
    "sampled and tied, moved": Case(
        Cell(
            model="tied softmax",
            optimizer="Adagrad",
            partitions=(2,),
            run_eagerly=True,
            moves={
                "3": [5, "allgather"],
                "6": ["allreduce", ["ps", 3]],
                "9": [["ps", 4], "allreduce"],
            },
        ),
        broken="rows_of_one_rank",
    ),
    "a table that is read whole": Case(
        Cell(model="read whole", optimizer="Adagrad", partitions=(5,)),
        broken="rows_of_one_rank",
    ),
    "stateful, nesterov": Case(
        Cell(
            model="stateful",
            batch=12,
            arguments={**MOMENTUM, "nesterov": True},
        ),
        broken="rows_of_one_rank",
    ),
    "normalized": Case(Cell(model="normalized"), broken="own_statistics"),
    "normalized, synchronized": Case(
        Cell(model="normalized, synchronized"),
        ignored={"model": "normalized"},
    ),
    "added loss": Case(Cell(model="added loss"), ignored={"model": "pooled"}),
    "mixed_float16": Case(
        Cell(policy="mixed_float16", optimizer="Adam", ordinary=True),
        broken="rows_of_one_rank",
    ),
    "mixed_bfloat16": Case(
        Cell(policy="mixed_bfloat16", optimizer="Adam", arguments=CLIP),
        ignored={"arguments": {}},
    ),
    # Unusual ids and tables.
    "all ids equal": Case(
        Cell(same_id=True, optimizer="Adam", ordinary=True),
        broken="rows_of_one_rank",
    ),
    "fewer rows than ranks": Case(
        Cell(rows=2, partitions=(4,), arguments=CLIP), broken="rows_of_one_rank"
    ),
    "fewer rows than partitions": Case(
        Cell(rows=3, partitions=(16,), optimizer="Adam"),
        broken="rows_of_one_rank",
    ),
    "16 partitions": Case(Cell(partitions=(16,), arguments=MOMENTUM)),
    # Architectures.
    "allgather, clipped": Case(
        Cell(architecture="allgather", optimizer="Adagrad", arguments=CLIP),
        broken="dense_not_reduced",
    ),
    "allreduce, clipped": Case(
        Cell(
            architecture="allreduce",
            optimizer="Adam",
            arguments=CLIP,
            ordinary=True,
            regularizer="l2",
        ),
        broken="dense_not_reduced",
    ),
    "auto": Case(
        Cell(architecture="auto", optimizer="Adagrad", ordinary=True),
        broken="rows_of_one_rank",
    ),
    "servers, clipped": Case(
        Cell(
            architecture="ps",
            optimizer="Adam",
            arguments=CLIP,
            partitions=(2, 5),
            ordinary=True,
        ),
        broken="dense_not_served",
    ),
    # Ordinary embeddings whose rows are spread.
    "stock, clipped": Case(
        Cell(
            architecture="ps",
            stock=True,
            ordinary=True,
            optimizer="Adam",
            arguments=CLIP,
            partitions=(1, 1),
            regularizer="l2",
            constraint="max norm",
            left_over=3,
        ),
        broken="norms_of_own_rows",
    ),
    "stock, masked, mixed_float16": Case(
        Cell(
            architecture="ps",
            stock=True,
            model="sequence",
            mask=True,
            policy="mixed_float16",
            optimizer="Adagrad",
        ),
        ignored={"mask": False},
    ),
    "stock, read whole": Case(
        Cell(
            architecture="ps",
            stock=True,
            model="read whole",
            keeps_rows=True,
            optimizer="Adam",
        ),
        broken="rows_of_one_rank",
    ),
    "stock, own loop": Case(
        Cell(
            architecture="ps",
            stock=True,
            ordinary=True,
            loop="own loop",
            optimizer="Adam",
        ),
        broken="rows_of_one_rank",
    ),
    "stock, own step, moved": Case(
        Cell(
            architecture="ps",
            stock=True,
            model="own step",
            optimizer="Adam",
            arguments={"amsgrad": True},
            moves={"4": [5], "8": ["allgather"]},
        ),
        broken="rows_of_one_rank",
    ),
    "subclassed, adam": Case(
        Cell(
            model="looks up",
            optimizer="Adam",
            arguments=CLIP,
            partitions=(3, 2),
            left_over=3,
        ),
        broken="rows_of_one_rank",
    ),
    "stock, subclassed, own loop": Case(
        Cell(
            architecture="ps",
            stock=True,
            model="looks up",
            loop="own loop",
            optimizer="Adagrad",
            partitions=(1, 1),
        ),
        broken="rows_of_one_rank",
    ),
    "stock, by a closure": Case(
        Cell(
            architecture="ps",
            stock=True,
            model="closure",
            partitions=(1, 1),
            run_eagerly=True,
        ),
        broken="rows_of_one_rank",
    ),
    "naive servers": Case(
        Cell(
            architecture="naive_ps",
            arguments=MOMENTUM,
            model="two inputs",
            ordinary=True,
        ),
        broken="dense_not_served",
    ),
    "allreduce, lazy": Case(
        Cell(
            architecture="allreduce",
            optimizer="Adam",
            sparse_updates="lazy",
            left_over=1,
        ),
        ignored={"sparse_updates": "exact"},
    ),
    # Rows that are brought up to date when they are read.
    "kept, clipped": Case(
        Cell(
            optimizer="Adam",
            arguments=CLIP,
            partitions=(3, 8),
            ordinary=True,
            keeps_rows=True,
        ),
        broken="clipped_before_aggregation",
    ),
    "kept, overflow": Case(
        Cell(
            optimizer="Adam", loss_scale=True, overflows=True, keeps_rows=True
        ),
        ignored={"overflows": False},
    ),
    "kept, tied, ftrl": Case(
        Cell(model="tied", optimizer="Ftrl", arguments=L1_L2, keeps_rows=True),
        broken="rows_of_one_rank",
    ),
    "kept, mixed_float16": Case(
        Cell(
            policy="mixed_float16",
            optimizer="Adam",
            ordinary=True,
            keeps_rows=True,
        ),
        broken="rows_of_one_rank",
    ),
    "kept, own step, nadam": Case(
        Cell(
            model="own step",
            optimizer="Nadam",
            partitions=(7,),
            keeps_rows=True,
        ),
        broken="rows_of_one_rank",
    ),
    "kept, own loop": Case(
        Cell(
            loop="own loop",
            optimizer="AdamW",
            arguments=DECAY,
            ordinary=True,
            keeps_rows=True,
        ),
        ignored={"arguments": {}},
    ),
    "kept, servers": Case(
        Cell(
            architecture="ps",
            optimizer="Adam",
            arguments={"amsgrad": True},
            partitions=(2, 5),
            ordinary=True,
            keeps_rows=True,
        ),
        broken="dense_not_served",
    ),
    "kept, naive servers": Case(
        Cell(
            architecture="naive_ps",
            arguments=MOMENTUM,
            model="two inputs",
            ordinary=True,
            keeps_rows=True,
        ),
        ignored={"sparse_updates": "lazy"},
    ),
    "kept, bags": Case(
        Cell(model="bags", optimizer="Adam", keeps_rows=True),
        ignored={"sparse_updates": "lazy"},
    ),
    "kept, fewer rows than ranks": Case(
        Cell(rows=2, partitions=(4,), optimizer="Adam", keeps_rows=True),
        broken="rows_of_one_rank",
    ),
}

# Where `make test` runs a cell: in turn, unless named.
_ROTATION = (N2, H2)
PLACES_OF = {
    "sgd": (N2, LOCAL),
    "adagrad, clipped": (N2,),
    "rmsprop": (H2,),
    "adam": (N2, LOCAL),
    "adam, clipped": (H2,),
    "clipnorm": (N22,),
    "frozen table": (N2,),
    "empty parts, logarithm": (N4,),
    "empty parts, added losses": (H4,),
    "empty parts, without labels": (N4,),
    "fewer rows than ranks": (N3,),
    "kept, tied, ftrl": (N4,),
    "unit norm": (H2,),
    "own logs": (H2,),
    "average that overwrites": (N2,),
    "accumulation, clipped": (H2,),
    "schedule": (N2,),
    "rows that a closure asks for": (N2,),
    "a table that is read whole": (H2,),
    "normalized, synchronized": (H2,),
}
# Whose fields others have.
LEFT_OUT = {
    "momentum",
    "sgd, clipped",
    "momentum, clipped",
    "rmsprop, clipped",
    "lazy RMSprop",
    "lazy AdamW",
    "lazy Adamax",
    "lazy Lion",
    "average",
    "accumulation",
    "loss scale",
    "overflow",
    "max norm",
    "empty parts",
    "masked",
    "masked pooling",
    "mixed_float16",
    "stock, own loop",
    "kept, own loop",
    "kept, naive servers",
    "kept, fewer rows than ranks",
    "regularized and constrained",
    "sample weights, adadelta",
    "own step, nadam",
    "16 partitions",
    "lazy SGD",
    "lazy Adam",
    "lazy, constrained",
    "lazy, ordinary",
    "l1l2",
    "run_eagerly",
    "masked and weighted",
    "tied, ftrl",
    "sampled and tied",
    "servers, clipped",
    "subclassed, adam",
    "stock, by a closure",
    "kept, clipped",
    "kept, mixed_float16",
    "allreduce, clipped",
    "stock, read whole",
    "adagrad",
    "global_clipnorm",
}


def _in_make_test():
    """The places of each cell; those that are left out have a turn, too."""
    turn = itertools.cycle(_ROTATION)
    places = {
        name: PLACES_OF[name] if name in PLACES_OF else (next(turn),)
        for name in CELLS
    }
    return places | dict.fromkeys(LEFT_OUT, ())


IN_MAKE_TEST = _in_make_test()


def _parameters():
    """Place by place, so that each cluster starts once."""
    skipped = {param.values[0]: param.marks for param in engines()}
    for place in PLACES:
        for name in CELLS:
            marks = list(skipped.get(place[0], ()))
            if place not in IN_MAKE_TEST[name]:
                marks.append(pytest.mark.all_cells)
            elif place == N2 and name in ("adam", "adagrad, clipped"):
                marks.append(pytest.mark.smoke)
            yield pytest.param(
                *place, name, marks=marks, id=f"{place[0]}-{place[1:]}-{name}"
            )


def trained(cluster, cell, place, broken=None):
    """The cell's outcomes, by rank."""
    if not hasattr(keras.optimizers, cell.optimizer):
        pytest.skip(f"this Keras has no {cell.optimizer}")
    try:
        return cluster(*place).run(
            matrix.train, cell.to_json(), broken, timeout=200
        )
    except ClusterError as error:
        raise AssertionError(
            f"The cell cannot be trained. Replay it:\n{cell.replay(place)}"
        ) from error


# Drawn cells.

_ONE_OF = strategies.sampled_from
# Without Lion: its sign makes a full step of a gradient that is rounding
# noise.
_RULES = {
    "SGD": [{}, MOMENTUM],
    "RMSprop": [{}, {"momentum": 0.5}],
    "Adagrad": [{}],
    "Adadelta": [{}],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [DECAY],
    "Adamax": [{}],
    "Nadam": [{}],
    "Ftrl": [{}],
}
_CLIPS = [{}, {"clipnorm": 0.02}, {"clipvalue": 0.005}, CLIP]
_BESIDES = [
    {},
    DECAY,
    {"use_ema": True, "ema_momentum": 0.7},
    {"use_ema": True, "ema_overwrite_frequency": 4},
    {"gradient_accumulation_steps": 3},
    {"learning_rate": SCHEDULE},
]


@strategies.composite
def cells(draw):
    """Any cell whose fields go together."""

    def one_of(*values):
        return draw(_ONE_OF(values))

    optimizer = one_of(*_RULES)
    arguments = one_of(*_RULES[optimizer])
    lazy = optimizer in ("RMSprop", "Adadelta", "Adam", "AdamW", "Adamax")
    sparse_updates = one_of("exact", "exact", "lazy") if lazy else "exact"
    fields = {"loss_scale": one_of(False, False, True)}
    if sparse_updates == "exact":
        constraints = list(CONSTRAINTS)
        if optimizer == "Ftrl":
            # Its rows come near to zero, where a norm's direction is noise.
            constraints = ["max norm", "non negative"]
        fields["constraint"] = one_of(None, None, *constraints)
        arguments = {**arguments, **one_of(*_CLIPS), **one_of(*_BESIDES)}
        if "weight_decay" in arguments:
            fields["not_decayed"] = one_of(None, "by variable")
    else:
        fields["loss_scale"] = False
    model = one_of("pooled", "sequence", "two inputs", "tied", "own step")
    loops = matrix.LOOPS
    if model == "sequence":
        # TensorFlow's average loss is a sum over an example's positions.
        loops = ("fit", "train_on_batch")
    # `fit` ends by taking the averages of the weights.
    if model == "own step" or "use_ema" in arguments:
        loops = ("fit",)
    loop = one_of(*loops)
    batch = draw(strategies.integers(1, 10))
    if loop != "own loop":
        fields["left_over"] = draw(strategies.integers(0, batch - 1))
        fields["regularizer"] = one_of(None, None, *REGULARIZERS)
        fields["reduction"] = one_of("sum_over_batch_size", "sum")
        if model != "own step":
            fields["weights"] = one_of(None, "sample", "of one half")
    if loop == "fit":
        fields["epochs"] = one_of(1, 2)
        fields["steps_per_execution"] = one_of(1, 1, 4)
        if arguments.get("learning_rate") is not SCHEDULE:  # cannot be set
            fields["plateau"] = draw(strategies.booleans())
    several = strategies.lists(
        strategies.integers(1, 16), min_size=1, max_size=2
    )
    return Cell(
        model=model,
        optimizer=optimizer,
        arguments=arguments,
        sparse_updates=sparse_updates,
        batch=batch,
        loop=loop,
        rows=draw(strategies.integers(2, 40)),
        partitions=tuple(draw(several)),
        ordinary=draw(strategies.booleans()),
        mask=draw(strategies.booleans()),
        run_eagerly=draw(strategies.booleans()),
        keeps_rows=draw(strategies.booleans()),
        **fields,
    )


def _draws():
    """A few that are the same each time; many anew."""
    for engine in engines():
        for num_processes in (2, 3, 4):
            phases = [hypothesis.Phase.generate, hypothesis.Phase.shrink]
            options = {"max_examples": 40, "phases": phases}
            marks = [pytest.mark.timeout(3600)]
            yield pytest.param(
                *engine.values,
                num_processes,
                options,
                marks=[*engine.marks, *marks],
                id=f"{engine.values[0]}-{num_processes}-anew",
            )
    options = {
        "max_examples": 3,
        "phases": [hypothesis.Phase.generate],
        "derandomize": True,
    }
    for engine in engines():
        yield pytest.param(
            *engine.values,
            2,
            options,
            marks=engine.marks,
            id=f"{engine.values[0]}-the same",
        )


# Each of their fields is a cell's.
@pytest.mark.all_cells
@pytest.mark.parametrize(("engine", "num_processes", "options"), list(_draws()))
def test_drawn_cells(cluster, engine, num_processes, options):
    place = (engine, num_processes, 1)

    @hypothesis.settings(
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        **options,
    )
    @hypothesis.given(cells())
    def compare(cell):
        matrix.verify(cell, trained(cluster, cell, place), place)

    compare()


@pytest.mark.parametrize("name", CELLS)
def test_cells_round_trip(name):
    cell = CELLS[name].cell
    assert Cell.from_json(cell.to_json()) == cell


# Controls.


def assert_is_seen(cell, outcome, size=1, instead=None):
    found = matrix.differences(cell, outcome, size, instead)
    far = matrix.FAR[cell.policy]
    assert not all(value < far for value in found.values()), found


def _broken():
    """Each break of each cell, on the engines in turn; in `make test` once."""
    seen = set()
    skipped = {param.values[0]: param.marks for param in engines()}
    for name, (_, _, broken) in CELLS.items():
        if broken is None:
            continue
        engine = ("native", "horovod")[len(seen) % 2]
        marks = list(skipped[engine])
        if broken in seen:
            marks.append(pytest.mark.all_cells)
        seen.add(broken)
        yield pytest.param(engine, name, marks=marks)


@pytest.mark.parametrize(("engine", "name"), list(_broken()))
def test_a_broken_library_is_seen(cluster, engine, name):
    cell, _, broken = CELLS[name]
    for outcome in trained(cluster, cell, (engine, 2, 1), broken):
        assert_is_seen(cell, outcome, 2)


def clip_one_step():
    """What a step of SGD makes of +3 on rank 0 and -2 on rank 1."""
    strategy = ks.HybridStrategy()
    gradient = tf.constant([3.0 if strategy.rank == 0 else -2.0])
    moved = {}
    for clip in ("clipvalue", "clipnorm", "global_clipnorm"):
        for wrap in (lambda optimizer: optimizer, ks.HybridOptimizer):
            with strategy.scope():
                variable = keras.Variable([0.0])
                optimizer = wrap(keras.optimizers.SGD(1.0, **{clip: 0.25}))
                optimizer.build([variable])
            strategy.run(optimizer.apply, args=([gradient], [variable]))
            moved.setdefault(clip, []).append(float(variable.numpy()[0]))
    return moved


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_stock_keras_clips_before_aggregation_and_this_does_not(
    cluster, engine
):
    for moved in cluster(engine, 2).run(clip_one_step):
        for clip, (stock, hybrid) in moved.items():
            assert stock == 0.0, clip  # 0.25 - 0.25
            assert hybrid == -0.25, clip  # of 3 - 2


# All cells.


@pytest.mark.parametrize(
    ("engine", "num_processes", "machines", "name"), list(_parameters())
)
def test_training_equals_one_process(
    cluster, engine, num_processes, machines, name
):
    """And is far from a reference that ignores what the cell is about."""
    place = engine, num_processes, machines
    cell, ignored, _ = CELLS[name]
    outcomes = trained(cluster, cell, place)
    assert len(outcomes) == num_processes
    matrix.verify(cell, outcomes, place)
    if cell.keeps_rows:
        assert sum(outcome.num_kept for outcome in outcomes) > 0
    if ignored:
        other = dataclasses.replace(cell, **ignored)
        assert_is_seen(cell, outcomes[0], num_processes, instead=other)


def _fields(cell):
    """The values of the fields, and the names of the arguments."""
    values = dataclasses.asdict(cell)
    found = {("argument", name) for name in values.pop("arguments")}
    return found | {(name, repr(value)) for name, value in values.items()}


def test_make_test_trains_every_field():
    trained_there = {
        param.values[-1]
        for param in _parameters()
        if pytest.mark.all_cells.mark not in [m.mark for m in param.marks]
    }
    found = set().union(*(_fields(CELLS[name].cell) for name in trained_there))
    assert set(CELLS) - trained_there == LEFT_OUT
    for name in LEFT_OUT:
        assert _fields(CELLS[name].cell) <= found, name
    assert set(PLACES_OF) <= trained_there


# The same run twice.

TWICE = Cell(optimizer="Adam", arguments=CLIP, partitions=(3,), ordinary=True)


# Sums are: `tests/collectives`; and runs that start anew: `test_repeatable.py`.
@pytest.mark.all_cells
@pytest.mark.timeout(420)
@pytest.mark.parametrize("engine", engines())
def test_the_same_run_gives_the_same_bits(cluster, engine):
    place = (engine, 4 if engine == "horovod" else 2, 1)
    first, second = (trained(cluster, TWICE, place) for _ in range(2))
    for outcome in (*first, *second):
        for name, value in first[0].end.items():
            np.testing.assert_array_equal(outcome.end[name], value, name)
        assert outcome.losses == first[0].losses
