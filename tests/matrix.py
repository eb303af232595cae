"""The matrix of what can be trained: a cell, its training and its judge.

A cell says all that a model is built of and trained with, in a form that JSON
holds. `train` trains it on every rank of a cluster, `reference` by stock Keras
in one process, fed the dense gradient, and `differences` compares the two. One
cell by hand, here Adam on two processes:

    python -m tests.matrix '{"optimizer": "Adam"}' --engine native -n 2
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import typing
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.conversion import saving
from keras_sparsity.update import lookups, rules
from tests import breaks, oracles
from tests.cluster import Cluster
from tests.matrix_models import CLASSES, LENGTH, build

STEPS = 12
# Of the distance that a variable has moved. Half the digits, more rounding.
TOLERANCE = {"float32": 1e-4, "mixed_float16": 0.03, "mixed_bfloat16": 0.1}
# What a control must differ by.
FAR = {"float32": 1e-2, "mixed_float16": 0.3, "mixed_bfloat16": 0.5}

TWO_INPUTS = ("two inputs", "closure", "without labels")
LOOPS = ("fit", "train_on_batch", "own loop")
WEIGHTS = ("sample", "class", "of one half")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is trained, and how.

    Args:
        model: a key of `matrix_models.MODELS`.
        optimizer: the name of a class in `keras.optimizers`.
        arguments: its arguments, those by which it differs from `defaults`.
        sparse_updates: `"exact"` or `"lazy"`.
        not_decayed: what is excluded from weight decay: `"by variable"` the
            first table, `"by name"` the ordinary embedding.
        loss_scale: whether a `LossScaleOptimizer` is around the optimizer.
        overflows: whether one example of step 7 has an infinite weight.
        policy: the dtype policy.
        rows: number of rows of each table.
        partitions: for each table, its number of partitions.
        ordinary: whether there is an ordinary embedding too.
        stock: whether the tables are ordinary embeddings, too, of a model
            that is built inside of the strategy's scope.
        same_id: whether all ids are equal.
        regularizer: of the tables and a dense kernel; a key of
            `matrix_models.REGULARIZERS`.
        constraint: of the tables; a key of `matrix_models.CONSTRAINTS`.
        mask: whether id 0 is masked.
        weights: of the examples: None or one of `WEIGHTS`.
        reduction: of the loss.
        batch: size of the global batch.
        left_over: number of examples in a last, smaller batch.
        epochs: number of epochs.
        steps: number of steps in an epoch, before what is left over.
        loop: one of `LOOPS`.
        run_eagerly, steps_per_execution, jit_compile: as in `compile`.
        plateau: whether `ReduceLROnPlateau` watches a loss that never falls
            by enough.
        validates: whether `fit` ends each epoch with a validation.
        swaps: whether that is of averages, by `SwapEMAWeights`.
        frozen: layer that is frozen in the second of three calls of `fit`.
        architecture: the strategy's.
        moves: what tables are moved to while `fit` runs, see `MoveAt`.
        keeps_rows: whether untouched rows are brought up to date when they
            are read, of tables as small as these, too.
    """

    model: str = "pooled"
    optimizer: str = "SGD"
    arguments: dict = dataclasses.field(default_factory=dict)
    sparse_updates: str = "exact"
    not_decayed: str | None = None
    loss_scale: bool = False
    overflows: bool = False
    policy: str = "float32"
    rows: int = 23
    partitions: tuple = (3,)
    ordinary: bool = False
    stock: bool = False
    same_id: bool = False
    regularizer: str | None = None
    constraint: str | None = None
    mask: bool = False
    weights: str | None = None
    reduction: str = "sum_over_batch_size"
    batch: int = 8
    left_over: int = 0
    epochs: int = 1
    steps: int = STEPS
    loop: str = "fit"
    run_eagerly: bool = False
    steps_per_execution: int = 1
    jit_compile: bool | str = "auto"
    plateau: bool = False
    validates: bool = False
    swaps: bool = False
    frozen: str | None = None
    architecture: str = "hybrid"
    moves: dict = dataclasses.field(default_factory=dict)
    keeps_rows: bool = False

    @classmethod
    def from_json(cls, text):
        fields = json.loads(text)
        fields["partitions"] = tuple(fields.get("partitions", cls.partitions))
        return cls(**fields)

    def to_json(self):
        """The fields that differ from the defaults."""
        default = dataclasses.asdict(Cell())
        fields = dataclasses.asdict(self)
        return json.dumps({k: v for k, v in fields.items() if v != default[k]})

    def replay(self, place):
        """The command that runs this cell again."""
        engine, num_processes, machines = place
        return (
            f"python -m tests.matrix '{self.to_json()}' "
            f"--engine {engine} -n {num_processes} --machines {machines}"
        )


# Data.


def data(cell):
    """Inputs, labels and weights (or None) of all examples."""
    rng = np.random.default_rng(7)
    count = cell.steps * cell.batch + cell.left_over
    ids = oracles.zipf_ids(rng, cell.rows, (count, LENGTH))
    others = oracles.zipf_ids(rng, cell.rows, (count, 2))
    if cell.same_id:
        ids, others = np.ones_like(ids), np.ones_like(others)
    if cell.mask and cell.model != "sequence":
        # The mean of no rows at all is NaN in stock Keras, too.
        ids[:, 0], others[:, 0] = ids[:, 0].clip(1), others[:, 0].clip(1)
    if cell.model == "logarithm":
        ids = np.maximum(ids, 1)
    ids, others = ids.astype("int32"), others.astype("int32")
    shape = (count, LENGTH) if cell.model == "sequence" else (count,)
    is_tied = cell.model in ("tied", "tied softmax", "read whole")
    high = cell.rows if is_tied else CLASSES
    labels = rng.integers(0, high, shape)
    weights = None
    if cell.weights == "sample":
        weights = rng.choice([0.0, 0.3, 1.0, 2.5], shape)
    elif cell.weights == "of one half":  # rank 0's part has none
        weights = np.ones(shape)
        weights[np.arange(count) % cell.batch < cell.batch // 2] = 0.0
    if cell.overflows:
        weights = np.ones(shape) if weights is None else weights
        weights[6 * cell.batch + 1] = np.inf
    if weights is not None:
        weights = weights.astype("float32")
    has_two_inputs = cell.model in TWO_INPUTS
    inputs = [ids, others] if has_two_inputs else ids
    return inputs, labels, weights


# Training.

# A larger epsilon than the default: it keeps a gradient that is rounding noise
# from becoming a full step.
_DEFAULTS = {
    "SGD": {"learning_rate": 0.5},
    "RMSprop": {"learning_rate": 0.01, "epsilon": 1e-4},
    "Adagrad": {"learning_rate": 0.1},
    "Adadelta": {"learning_rate": 1.0, "epsilon": 1e-4},
    "Ftrl": {"learning_rate": 0.1},
    "Lion": {"learning_rate": 0.01},
    "Adafactor": {"learning_rate": 0.01},
}
_OTHERS = {"learning_rate": 0.01, "epsilon": 1e-4}


def inner_optimizer(cell, model):
    kind = getattr(keras.optimizers, cell.optimizer)
    arguments = {**_DEFAULTS.get(cell.optimizer, _OTHERS), **cell.arguments}
    rule = kind.from_config(arguments)
    if cell.not_decayed == "by variable":
        rule.exclude_from_weight_decay(var_list=model.trainable_variables[:1])
    elif cell.not_decayed == "by name":
        rule.exclude_from_weight_decay(var_names=["ordinary"])
    if cell.loss_scale:
        return keras.optimizers.LossScaleOptimizer(
            rule, initial_scale=8.0, dynamic_growth_steps=6
        )
    return rule


class Outcome(typing.NamedTuple):
    """What training led to: arrays by the name of what they are.

    And the number of variables of which this rank's rows were kept.
    """

    start: dict
    end: dict
    losses: list
    num_kept: int = 0


def train(text, broken=None):
    """On every rank: the outcome of a cell, given as JSON.

    Args:
        text: the cell.
        broken: a function of `breaks.py`, by name, or None.
    """
    cell = Cell.from_json(text)
    with breaks.entered(broken), _afresh(cell), _keeping(cell):
        strategy = ks.HybridStrategy(
            sparse_updates=cell.sparse_updates, architecture=cell.architecture
        )
        with strategy.scope() if cell.stock else contextlib.nullcontext():
            model = build(cell, _table_of(cell), strategy.size)
        optimizer = inner_optimizer(cell, model)
        if cell.loop == "own loop":
            optimizer = ks.HybridOptimizer(optimizer, cell.sparse_updates)
        else:
            _compile(cell, model, optimizer, strategy)
            optimizer = model.optimizer
        optimizer.build(model.trainable_variables)

        def values():
            return _named(model, optimizer.state())

        start = values()
        losses = _LOOPS[cell.loop](cell, model, optimizer, strategy)
        num_kept = len(lookups.keepers_of(model.trainable_variables))
        return Outcome(start, values(), losses, num_kept)


def _table_of(cell):
    stock = keras.layers.Embedding
    return stock if cell.stock else ks.layers.ShardedEmbedding


def reference(cell, size=1):
    """The outcome of a cell by stock Keras in one process.

    Only batch normalization, which sees a rank's part alone, depends on the
    number of processes, `size`.
    """
    is_normalized = cell.model.startswith("normalized")
    cell = dataclasses.replace(
        cell, architecture="hybrid", moves={}, keeps_rows=False, stock=False
    )
    return _reference(cell.to_json(), size if is_normalized else 1)


@functools.cache
def _reference(text, size):
    cell = Cell.from_json(text)
    with _afresh(cell):
        model = build(cell, keras.layers.Embedding, size)
        inner = inner_optimizer(cell, model)
        if cell.policy == "mixed_float16" and not cell.loss_scale:
            # As `compile` does it by itself.
            inner = keras.optimizers.LossScaleOptimizer(inner)
        kind = oracles.DenseGradients
        if cell.sparse_updates == "lazy":
            kind = oracles.TouchedRows
        optimizer = kind(inner)
        optimizer.build(model.trainable_variables)

        def values():
            state = [v.numpy() for v in inner.variables]
            # That oracle keeps slots of its own.
            return _named(model, () if kind is oracles.TouchedRows else state)

        start = values()
        # The plainest way to train: one step after the other.
        plain = dataclasses.replace(
            cell, run_eagerly=True, steps_per_execution=1, jit_compile="auto"
        )
        _compile(plain, model, optimizer)
        losses = _fit(plain, model, optimizer)
        return Outcome(start, values(), losses)


def _keeping(cell):
    """While entered, rows of small tables may be kept, if the cell says so."""
    smallest = 0 if cell.keeps_rows else rules._SMALL_ELEMENTS
    return mock.patch.object(rules, "_SMALL_ELEMENTS", smallest)


@contextlib.contextmanager
def _afresh(cell):
    """Under the cell's dtype policy, names counted from the start."""
    before = keras.config.dtype_policy()
    keras.utils.clear_session()
    keras.config.set_dtype_policy(cell.policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _named(model, state):
    """All that training changes and that all ranks share."""
    values = {v.path: v.numpy() for v in model.weights if "state" not in v.name}
    values.update((f"optimizer/{i}", value) for i, value in enumerate(state))
    return values


def _compile(cell, model, optimizer, strategy=None):
    with strategy.scope() if strategy else contextlib.nullcontext():
        model.compile(
            optimizer,
            loss=_loss(cell, model),
            run_eagerly=cell.run_eagerly,
            steps_per_execution=cell.steps_per_execution,
            jit_compile=cell.jit_compile,
            # The reference has its own.
            auto_scale_loss=strategy is not None,
        )


def _loss(cell, model):
    if cell.model == "without labels":
        return None
    if cell.model == "tied softmax":
        return model.layers[-1].loss(cell.reduction)
    return keras.losses.SparseCategoricalCrossentropy(reduction=cell.reduction)


def _fit(cell, model, optimizer, strategy=None):
    x, y, weights = data(cell)
    options = {
        "batch_size": cell.batch,
        "epochs": cell.epochs,
        "shuffle": False,
        "verbose": 0,
    }
    if cell.weights == "class":
        options["class_weight"] = {0: 0.5, 1: 2.0, 2: 0.0}
    if cell.plateau:
        options["callbacks"] = [
            keras.callbacks.ReduceLROnPlateau(
                monitor="loss", factor=0.3, patience=1, min_delta=10.0
            )
        ]
    if cell.moves and strategy:
        options.setdefault("callbacks", []).append(MoveAt(cell.moves))
    if cell.swaps:
        swaps = keras.callbacks.SwapEMAWeights()
        options.setdefault("callbacks", []).append(swaps)
    if cell.validates:
        first = slice(cell.batch + 1)
        options["validation_data"] = (x[first], y[first])
    losses = []
    for part, frozen in _phases(cell, len(y)):
        if cell.frozen:
            for layer in model.layers:
                layer.trainable = layer.name != frozen
            _compile(cell, model, optimizer, strategy)
        history = model.fit(
            tf.nest.map_structure(lambda a: a[part], x),  # noqa: B023
            None if cell.model == "without labels" else y[part],
            sample_weight=None if weights is None else weights[part],
            **options,
        )
        losses += history.history["loss"]
        losses += history.history.get("val_loss", [])
    return losses


class MoveAt(keras.callbacks.Callback):
    """Moves tables in the middle of `fit`.

    Args:
        moves: dict from the number of executions (as text, as JSON has it)
            to a list: for each table its number of partitions then, its
            architecture, or both.
    """

    def __init__(self, moves):
        super().__init__()
        self._moves = moves
        self._executions = 0

    def on_train_batch_end(self, batch, logs=None):
        self._executions += 1
        targets = self._moves.get(str(self._executions), ())
        tables = saving.tables_of(self.model)
        counts, others = {}, {}
        for table, to in zip(tables, targets, strict=bool(targets)):
            if isinstance(to, int):
                counts[table] = to
            else:
                others[table] = to if isinstance(to, str) else tuple(to)
        if targets:
            ks.moves.repartition(self.model, counts)
            ks.moves.move(self.model, others)
            _check_places(tables, targets)


def _check_places(tables, targets):
    """That tables are where they were moved to."""
    if ks.collectives.current().size == 1:
        return
    for table, to in zip(tables, targets, strict=True):
        architecture, count = to, None
        if isinstance(to, int):
            architecture, count = "ps", to
        elif not isinstance(to, str):
            architecture, count = to
        assert table.architecture == architecture
        assert table.is_sharded == (architecture == "ps")
        if count:
            assert table.layout.num_partitions == count


def _phases(cell, count):
    """For each call of `fit`: its examples, and the layer that is frozen."""
    if cell.frozen is None:
        return [(slice(None), None)]
    ends = [cell.batch * (cell.steps * k // 3) for k in range(3)] + [count]
    return [
        (slice(ends[0], ends[1]), None),
        (slice(ends[1], ends[2]), cell.frozen),
        (slice(ends[2], ends[3]), None),
    ]


def _batches(cell):
    x, y, weights = data(cell)
    for _ in range(cell.epochs):
        for start in range(0, len(y), cell.batch):
            part = slice(start, start + cell.batch)
            yield (
                tf.nest.map_structure(lambda a: a[part], x),  # noqa: B023
                y[part],
                None if weights is None else weights[part],
            )


def _train_on_batch(cell, model, optimizer, strategy):
    for x, y, weights in _batches(cell):
        model.train_on_batch(x, y, weights)
    return []


def _own_loop(cell, model, optimizer, strategy):
    """As in TensorFlow's guide."""
    x, y, _ = data(cell)
    dataset = tf.data.Dataset.from_tensor_slices(
        (tuple(x) if isinstance(x, list) else x, y)
    )
    dataset = strategy.experimental_distribute_dataset(
        dataset.batch(cell.batch)
    )
    loss_object = keras.losses.SparseCategoricalCrossentropy(reduction="none")

    def train_step(batch):
        inputs, labels = batch
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(
                loss_object(labels, model(inputs, training=True)),
                global_batch_size=cell.batch,
            )
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def step(batch):
        losses = strategy.run(train_step, args=(batch,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    if not cell.run_eagerly:
        step = tf.function(step)
    losses = [
        float(step(batch)) for _ in range(cell.epochs) for batch in dataset
    ]
    return [float(np.mean(losses))]


_LOOPS = {
    "fit": _fit,
    "train_on_batch": _train_on_batch,
    "own loop": _own_loop,
}


# Judging.


def differences(cell, outcome, size=1, instead=None):
    """How far an outcome is from the reference.

    Args:
        cell: the `Cell` that was trained.
        outcome: its `Outcome` on one rank.
        size: the number of processes.
        instead: the cell whose reference to compare with, by default the same.

    Returns:
        Dictionary of floats by name: the largest difference of each variable
        and slot, in distances that the reference's has moved; the losses'.
    """
    expected = reference(instead or cell, size)
    names = list(expected.end)
    if instead is not None or cell.sparse_updates == "lazy":
        # Other slots, or in an order of their own.
        names = [name for name in names if not name.startswith("optimizer/")]
    elif names != list(outcome.end):
        raise AssertionError(
            f"Expected: {names}. Received: {list(outcome.end)}."
        )
    found = oracles.relative_difference(
        [expected.start[name] for name in names],
        [expected.end[name] for name in names],
        [outcome.end[name] for name in names],
    )
    found = dict(zip(names, found, strict=True))
    # `train_on_batch` has none; another cell may call `fit` more often.
    has_all = instead is None and cell.loop != "train_on_batch"
    for a, b in zip(outcome.losses, expected.losses, strict=has_all):
        # Without a loss where each batch is trained on by itself.
        if np.isfinite(b):
            found["loss"] = max(found.get("loss", 0.0), abs(a - b) / abs(b))
    return found


def tolerance(cell, name):
    """What may differ of a variable, or of a slot, by its name.

    Slots are sums that may come back to where they started (Ftrl's `linear`),
    and then have moved by less than what they were rounded at.
    """
    return TOLERANCE[cell.policy] * (10 if name.startswith("optimizer/") else 1)


def verify(cell, outcomes, place):
    """Raises, with the command that replays it, if a rank is off."""
    for rank, outcome in enumerate(outcomes):
        found = differences(cell, outcome, len(outcomes))
        wrong = {
            name: value
            for name, value in found.items()
            if not value < tolerance(cell, name)
        }
        if wrong:
            raise AssertionError(
                f"Rank {rank} differs from one process, in distances moved: "
                f"{wrong}. Replay it:\n{cell.replay(place)}"
            )


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix",
        description="Trains one cell and compares it with one process.",
    )
    parser.add_argument("cell", type=Cell.from_json, help="as JSON")
    parser.add_argument("--engine", default="native")
    parser.add_argument("-n", "--num-processes", type=int, default=2)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300)
    options = parser.parse_args()
    place = (options.engine, options.num_processes, options.machines)
    engine, num_processes, machines = place
    cluster = Cluster(num_processes, engine, machines)
    try:
        outcomes = cluster.run(
            train, options.cell.to_json(), timeout=options.timeout
        )
    finally:
        cluster.stop()
    for name, value in differences(
        options.cell, outcomes[0], num_processes
    ).items():
        print(f"{value:10.2e}  {name}")
    verify(options.cell, outcomes, place)
    print(f"Equal to one process, on each of {num_processes} ranks.")


if __name__ == "__main__":
    # Workers find `train` under the module's own name.
    from tests import matrix

    matrix.main()
