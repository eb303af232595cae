"""`ks.PipelineStrategy` as users meet it."""

import dataclasses
import re

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity.pipeline import cuts
from keras_sparsity.stages import timing
from keras_sparsity.stages.cutting import Cutter
from tests import pipeline_functions
from tests.callbacks import test_histograms
from tests.conftest import engines

_REFUSALS = {
    "subclass": "cannot be cut.*Received: a Own; expected: a functional",
    "sharded": "'first' spreads its rows.*a ShardedEmbedding.*ks.export",
    "hybrid optimizer": "Received: a HybridOptimizer. Give `compile` the opt",
    "global norm": "needs the gradients of all stages.*global_clipnorm=1.0",
    "loss scaling": "Loss scaling needs.*a LossScaleOptimizer.*mixed_bfloat16",
    "accumulated norm": "=1.0 and gradient_accumulation_steps=2.*make batches",
    "several optimizers": r"a MultiOptimizer of \['SGD'\]. Give `compile` one",
    "hybrid strategy": "another strategy already.*a HybridStrategy",
    "another one": "another strategy already.*a PipelineStrategy",
    "shared layer": r"'more' shares.*second/kernel' on ranks \[1\],.*on \[0\]",
    "unknown layer": "must be.*'first'.*'second'.*'third'",
    "three stages": "2 processes train 2 stages.*'first', 'second'",
    "lists": r"missing: \['second'\]; unknown: \['third'\]",
    "rows of examples": "an output of 'second', whose first axis is not that",
    "repeated": r"unknown: \[\]; more than once: \['second'\]",
    "order": r"model's order.*order here: \['first', 'between'\]",
    "xla": "compiled with `jit_compile=True`",
    "pipeline's": "a PipelineStrategy in the scope of a Hybrid.*ks.export",
    "shard": "reads whole batches.*from `shard`",
    "shuffled": "different batches|same global batches",
    "plan": "that of the running processes.*num_machines=2",
    "no batch": "dataset.*a dataset with a batch",
    "callback": "a PartitionSearch under `ks.PipelineStrategy`.*`ks.plan",
    "callback of a list": "a PartitionSearch under `ks.PipelineStrategy`",
    "backup of a list": "BackupAndRestore moves.*ShardedCheckpoint",
    "small batches": "batch_size=2 and num_micro_batches=4. Use a larger",
    "outside": "compiled outside of its.*SGD.*`with strategy.scope",
}


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_stages_of_each_kind(cluster, engine):
    ranks = cluster(engine, 2).run(pipeline_functions.strategies)
    found = ranks[0]
    assert all(rank == found for rank in ranks)
    assert found["names"] == found["lists"]
    first, second = found["measured"]
    assert [*first, *second] == [*found["names"][0], *found["names"][1]]
    assert first and second
    assert np.isfinite(found["fitted"]).all()


def test_cuts_count_passes_that_are_computed_again(monkeypatch):
    monkeypatch.setattr(
        timing,
        "call_seconds",
        lambda cutter, has_backward=True: [3.0 if has_backward else 1.0] * 8,
    )
    layers = [keras.layers.Dense(4) for _ in range(8)]
    cutter = Cutter(keras.Sequential([keras.Input((4,)), *layers]))
    found = [
        cuts.measured(cutter, ks.PipelineStrategy(schedule))
        for schedule in ("1f1b", "spectrain")
    ]
    # 12 and 12 seconds; 12 with those of the second forward pass, and 15.
    assert [each(cutter.places, [[1], [1]], 2) for each in found] == [
        ([3], [1, 1]),
        ([2], [1, 1]),
    ]


def test_lists_may_leave_out_the_operations_of_masks():
    layers = [
        keras.layers.Embedding(10, 4, mask_zero=True, name="words"),
        keras.layers.LSTM(4, name="state"),
        keras.layers.Dense(2, name="classes"),
    ]
    cutter = Cutter(keras.Sequential([keras.Input((3,)), *layers]))
    names = [call.name for call in cutter.calls]
    (mask,) = set(names) - {"words", "state", "classes"}

    def cut(*lists):
        return cuts.places(cutter, _Lists(len(lists), list(lists)), None)

    assert cut(["words"], ["state", "classes"]) == [names.index("words")]
    assert cut(["words", mask, "state"], ["classes"]) == [names.index("state")]
    with pytest.raises(
        ValueError, match=r"missing: \['state'\]; unknown: \[\]"
    ):
        cut(["words"], ["classes"])


def test_lists_with_a_layer_that_is_called_twice():
    """It is in the stage of its last call."""
    inputs = keras.Input((4,))
    twice = keras.layers.Dense(4, name="twice")
    x = twice(keras.layers.Dense(4, name="between")(twice(inputs)))
    x = keras.layers.Dense(2, name="behind")(x)
    cutter = Cutter(keras.Model(inputs, x))
    lists = [["twice", "between"], ["behind"]]
    assert cuts.places(cutter, _Lists(2, lists), None) == [2]


@dataclasses.dataclass
class _Lists:
    """A strategy's part that says where a model is cut."""

    num_stages: int
    stages: list
    planned_cuts = None


@pytest.mark.parametrize("speed", [(1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_slow_messages_cross_where_the_model_is_narrow(cluster, engine, speed):
    """On a slow link, or by a slow processor."""
    for stages, speeds in cluster(engine, 2).run(
        pipeline_functions.cut_by_slow_links, speed
    ):
        assert stages[0] == ("dense_0", "dense_1")
        # Loopback, and its processor time: below 100 ns, 10 MB/s.
        ((seconds, handling),) = speeds
        assert 0 <= seconds < 1e-7 and 0 <= handling < 1e-7


@pytest.mark.parametrize(
    ("layer", "options", "expected"),
    [
        (
            keras.layers.LSTM(4, stateful=True, name="states"),
            {"schedule": "1f1b"},
            r"'numbers' has batches of 8.*into 4 parts.*_batches=1\)`",
        ),
        (
            keras.layers.Flatten(),
            {"num_micro_batches": 2},
            r"into 2 parts \(num_micro_batches=2",
        ),
    ],
)
def test_mini_batches_that_a_model_takes_whole(layer, options, expected):
    inputs = keras.Input(batch_shape=(8, 2, 3), name="numbers")
    model = keras.Model(inputs, layer(inputs))
    with ks.PipelineStrategy(**options).scope():
        with pytest.raises(ValueError, match=expected):
            model.compile("sgd", "mse")
    # As the error says, and where nothing is trained in parts.
    for schedule in ("1f1b", "stash"):
        other = keras.models.clone_model(model)
        number = 1 if schedule == "1f1b" else None
        strategy = ks.PipelineStrategy(schedule, num_micro_batches=number)
        with strategy.scope():
            other.compile("sgd", "mse")
        assert other.predict(np.zeros((8, 2, 3)), 8, verbose=0).shape[0] == 8


def test_refusals(cluster):
    for found in cluster("native", 2).run(pipeline_functions.refusals):
        expected = set(_REFUSALS)
        if not hasattr(keras.optimizers, "MultiOptimizer"):
            expected.remove("several optimizers")  # of a later Keras
        assert found.keys() == expected
        for name, message in found.items():
            assert message is not None, name
            assert re.search(_REFUSALS[name], message, re.DOTALL), message


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_a_loaded_model_goes_on_to_the_bit(cluster, engine, tmp_path):
    for rank in cluster(engine, 2).run(
        pipeline_functions.resumed, str(tmp_path)
    ):
        for value, other in zip(*rank, strict=True):
            np.testing.assert_array_equal(value, other)


def test_compiled_again(cluster):
    for rank in cluster("native", 2).run(pipeline_functions.compiled_again):
        for pair in rank:
            for value, other in zip(*pair, strict=True):
                np.testing.assert_array_equal(value, other)


def test_callbacks_decide_alike(cluster, tmp_path):
    ranks = cluster("native", 2).run(
        pipeline_functions.fitted_with_callbacks, str(tmp_path)
    )
    (history, evaluated, weights, kinds), (*other, _, kinds_of_other) = ranks
    assert other == [history, evaluated]
    # On every rank; the other one sends its weights, and writes no file.
    assert kinds == kinds_of_other == ["CSVLogger"] * 2
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    # The loss falls; asked for the largest, it goes back to the first one.
    assert len(history["loss"]) == 2
    assert history["val_loss"][1] < history["val_loss"][0]
    assert evaluated["loss"] == pytest.approx(history["val_loss"][0], rel=1e-5)
    # The weights of both stages, which are those of the first epoch again.
    assert len(test_histograms.written(tmp_path / "listed")) == len(weights)
    # Of one process, whose number their names have.
    names = [path.name for path in (tmp_path / "listed").rglob("*tfevents*")]
    assert len({name.split(".")[-3] for name in names}) == 1
    histograms = test_histograms.written(tmp_path)
    assert len(histograms) == 2 * len(weights) == 8
    for path, value in weights.items():
        buckets = histograms[f"{path}/histogram", 0]
        assert buckets[:, 2].sum() == value.size
        np.testing.assert_allclose(
            [buckets[0, 0], buckets[-1, 1]],
            [value.min(), value.max()],
            rtol=1e-5,
        )


# In the same ones, above; in others from a checkpoint: `test_saved_state.py`.
@pytest.mark.all_cells
@pytest.mark.parametrize("model", ["dense", "branches", "nested"])
def test_a_loaded_model_goes_on_in_other_stages(cluster, model, tmp_path):
    """Saved by two processes, loaded by three, four and one.

    To the bit in the same stages alone: TensorFlow fuses the operations of
    another part of a model otherwise.
    """
    path = str(tmp_path / "staged.keras")
    first, *others = {
        "dense": (
            ["dense_1"],
            ["dense_0", "dense_2"],
            ["dense_0", "dense_1", "dense_2"],
        ),
        "branches": (
            ["second"],
            ["first", "norm"],
            ["rows", "first", "both"],
        ),
        "nested": (
            ["middle/inner/dense"],
            ["middle/inner/norm", "middle/dense"],
            ["dense", "middle/inner/dense", "middle/inner/last"],
        ),
    }[model]
    weights = cluster("native", 2).run(
        pipeline_functions.save_stages, path, model, first
    )[0]
    for names in [*others, None]:
        size = len(names) + 1 if names else 1
        found = cluster(
            "native" if names else "local", size, has_groups=True
        ).run(pipeline_functions.go_on_with_stages, path, model, names)[0]
        for value, expected in zip(found, weights, strict=True):
            np.testing.assert_allclose(value, expected, atol=1e-6)
