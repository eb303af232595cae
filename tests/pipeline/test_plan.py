"""`ks.plan` of a model in stages, against sizes worked out by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.launch import command_line
from tests import pipeline_functions
from tests.conftest import engines
from tests.pipeline import row_functions

_EXAMPLES, _WIDTH, _MICRO_BATCHES = 12, 16, 4
_ACTIVATION = 4 * _EXAMPLES * _WIDTH
_LAYER = 4 * (_WIDTH * _WIDTH + _WIDTH)
# Adam's two counters: steps and the learning rate.
_ADAM = {num: 2 * num * _LAYER + 8 + 4 for num in (2, 3)}


def _held(schedule, num_ahead, num_layers):
    """Bytes that a stage holds beside weights, gradients and slots."""
    # A pass's input and the outputs of its layers.
    of_pass = _ACTIVATION * (1 + num_layers)
    if schedule == "gpipe":
        return of_pass
    if schedule == "1f1b":
        return of_pass * (num_ahead + 1) // _MICRO_BATCHES
    copies = {"vanilla": 0, "stash": num_ahead, "spectrain": 1}[schedule]
    made = _ACTIVATION * num_layers
    if not num_ahead:  # of one micro-batch at a time
        made //= _MICRO_BATCHES
    inputs = (num_ahead + 1) * _ACTIVATION
    return inputs + made + copies * num_layers * _LAYER


@pytest.mark.parametrize(
    "schedule",
    [
        "gpipe",
        "1f1b",
        *(
            pytest.param(schedule, marks=pytest.mark.all_cells)
            for schedule in ("vanilla", "stash")
        ),
        "spectrain",
    ],
)
def test_sizes(cluster, schedule, tmp_path, capsys):
    found = cluster("native", 3, has_groups=True).run(
        pipeline_functions.planned, schedule, str(tmp_path)
    )
    plan, num_bytes, *_ = found[0]
    assert all(other == plan for other, *_ in found)
    assert all(is_same and is_finite for *_, is_same, is_finite in found)
    is_flushed = schedule in ("gpipe", "1f1b")
    assert plan.num_examples == _EXAMPLES
    assert plan.num_micro_batches == _MICRO_BATCHES
    assert sum(stage.weight_bytes for stage in plan.stages) == num_bytes
    for number, stage in enumerate(plan.stages):
        num_ahead, num_layers = 2 - number, (2, 3, 3)[number]
        assert len(stage.layers) == num_layers
        assert stage.weight_bytes == num_layers * _LAYER
        assert stage.gradient_bytes == num_layers * _LAYER
        assert stage.sent_bytes == (_ACTIVATION if num_ahead else 0)
        assert stage.returned_bytes == (_ACTIVATION if number else 0)
        assert stage.missed_updates == (0 if is_flushed else num_ahead)
        assert stage.memory_bytes == (
            2 * num_layers * _LAYER
            + _ADAM[num_layers]
            + _held(schedule, num_ahead, num_layers)
        )
    seconds = [stage.seconds for stage in plan.stages]
    assert all(stage.update_seconds > 0 for stage in plan.stages)
    if is_flushed:
        # A slow first stage hides all waiting of 1f1b.
        assert max(seconds) <= plan.step_seconds < sum(seconds)
    else:
        assert plan.step_seconds == max(seconds)
    assert 0 <= plan.bubble < 1
    assert plan.busiest_bytes == 4 * _ACTIVATION
    assert plan.allreduce_bytes == pytest.approx(4 * 2 / 3 * num_bytes)
    command_line.main(["plan", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "before training" in shown
    assert "dense_2 to dense_4 (3)" in shown
    command_line.main(["report", str(tmp_path)])
    assert "dense_2 to dense_4 (3)" in capsys.readouterr().out


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_masks_and_unknown_sizes(cluster, engine):
    ranks = cluster(engine, 2).run(pipeline_functions.planned_branches)
    (plan, _), (other, _) = ranks
    assert plan == other
    assert all(is_same for _, is_same in ranks)
    first, second = plan.stages
    # What the layers "first", "second" and "norm" have made, and a mask.
    wide, state, mask = 4 * 5 * 8 * 4, 4 * 8 * 4, 4 * 5
    assert first.sent_bytes - mask in (wide + state, wide + 2 * state)
    assert second.returned_bytes == first.sent_bytes - mask


@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [
        ("stash", 1),
        pytest.param("1f1b", 2, marks=pytest.mark.all_cells),
    ],
)
def test_rows_that_are_looked_up(cluster, schedule, replicas):
    """Not whole tables, which take no part in a step."""
    ranks = cluster("native", 2 * replicas, has_groups=replicas > 1).run(
        row_functions.planned, schedule, replicas
    )
    plan = ranks[0][0]
    assert all(other == plan and is_same for other, is_same in ranks)
    table = 4 * 4 * pipeline_functions.NUM_ROWS
    # Of a replica's examples, of 5 ids each; with a number of 2 bytes.
    rows = pipeline_functions.BATCH_SIZE // replicas * 5 * (4 * 4 + 2)
    for stage in plan.stages:
        assert (stage.table_bytes, stage.row_bytes) == (table, rows)
        # Weights and two slots, and no copy of the table.
        assert 3 * table < stage.memory_bytes < 4 * table
        dense = stage.gradient_bytes - table
        summed = 4 * dense * (replicas - 1) / replicas
        summed += 2 * rows * (replicas - 1)
        assert plan.summed_bytes(stage) == summed
    assert "| rows looked up |" in plan.markdown()


class _Holder(keras.layers.Layer):
    """Means of the rows of an `Embedding` that it holds."""

    def __init__(self, num_rows):
        super().__init__(name="holder")
        self.rows = keras.layers.Embedding(num_rows, 4)

    def build(self, shape):
        self.rows.build(shape)

    def call(self, ids):
        return keras.ops.mean(self.rows(ids), 1)


def test_rows_of_an_embedding_that_a_layer_holds():
    """Up to all of them, as the layer may look up any number."""
    num_rows = pipeline_functions.NUM_ROWS
    strategy = ks.PipelineStrategy("gpipe", num_micro_batches=1)
    with strategy.scope():
        ids = keras.Input((5,), dtype="int32")
        model = keras.Model(ids, keras.layers.Dense(1)(_Holder(num_rows)(ids)))
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.zeros((8, 5)), np.zeros((8, 1))))
    (stage,) = ks.plan(model, data).stages
    assert stage.table_bytes == num_rows * 16
    assert stage.row_bytes == num_rows * (16 + 2)


def test_plans_do_not_warn_and_raise_on_all_ranks(cluster):
    ranks = cluster("native", 2).run(pipeline_functions.planned_often)
    for warnings, error in ranks:
        assert not warnings
        assert error.startswith("On rank 1: ") and "ids begin at 1" in error


def test_stages_are_measured_at_once(cluster):
    ranks = cluster("native", 2).run(pipeline_functions.planned_together)
    traced, asked, begun = zip(*ranks, strict=True)
    assert max(traced) <= min(begun)
    # A forward pass, and one with its backward pass.
    assert asked[0] == asked[1] == [asked[0][0]] * 2
