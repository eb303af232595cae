"""What TensorBoard is told of a training."""

import collections
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.board import written_plan
from keras_sparsity.callbacks import architecture_logger
from tests import forked, logger_functions
from tests.conftest import engines
from tests.logger_functions import BATCH, DIM, ROWS, STEPS, ids, train


def events(log_dir):
    """All that TensorBoard itself reads."""
    from tensorboard.backend.event_processing import event_accumulator

    found = event_accumulator.EventAccumulator(
        str(log_dir / written_plan.RUN), size_guidance={"tensors": 0}
    )
    found.Reload()
    return found


def scalars(found, tag):
    return {
        event.step: float(tf.make_ndarray(event.tensor_proto))
        for event in found.Tensors(tag)
    }


def texts(found, tag):
    return [
        tf.make_ndarray(event.tensor_proto).item().decode()
        for event in found.Tensors(tag)
    ]


def test_everything_on_one_process(tmp_path):
    results = train(tmp_path, False)
    found = events(tmp_path)
    assert list(scalars(found, "seconds/step")) == [8, 16, 24]
    assert scalars(found, "seconds/update")[24] > 0
    names = ("sharded", "stock")
    for name, alpha in zip(names, results["alpha"], strict=True):
        assert scalars(found, f"alpha/{name}/embeddings")[24] == pytest.approx(
            alpha
        )
        rows = found.Tensors(f"rows/{name}/embeddings/log2 of touches")
        assert [event.step for event in rows] == [8, 24]
    assert not [tag for tag in found.Tags()["tensors"] if "bytes" in tag]


def test_a_last_execution_of_fewer_steps(tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with ks.HybridStrategy().scope():
        model.compile("sgd", "mse", steps_per_execution=2)
    logger = ks.callbacks.ArchitectureLogger(tmp_path, every_steps=5)
    x = np.ones((5, 1))
    model.fit(x, x, 1, epochs=2, verbose=0, callbacks=[logger])
    assert list(scalars(events(tmp_path), "seconds/step")) == [5, 10]


def test_reports_on_a_terminal(tmp_path, capsys):
    assert command(["plan", str(tmp_path)], capsys)[0] == 1
    train(tmp_path, False)
    code, plan = command(["plan", str(tmp_path)], capsys)
    assert code == 0
    assert "after 24 steps" in plan
    assert "sharded/embeddings" in plan
    assert "alpha of the model" in plan
    code, report = command(["report", str(tmp_path)], capsys)
    assert code == 0
    assert plan in report
    assert re.search(r"seconds: update\s+[0-9.]+ ms", report)


def test_a_report_is_of_the_last_figures_of_the_latest_training(
    tmp_path, capsys
):
    plan = "| variable | alpha |\n| --- | --- |\n| {} | 1 |"

    def write(name, steps):
        writer = tf.summary.create_file_writer(str(tmp_path / written_plan.RUN))
        for step, figures in steps.items():
            with writer.as_default(step=step):
                tf.summary.text("plan", plan.format(name))
                for tag, value in figures.items():
                    tf.summary.scalar(tag, value)
        writer.close()

    write("first", {900: {"bytes/allgather/sent": 1e3, "seconds/step": 9.0}})
    later = {"bytes/allgather/received": 1e3, "seconds/step": 7.0}
    write(
        "second", {8: later, 16: {"bytes/push/sent": 5e3, "seconds/step": 2.0}}
    )
    # Without a figure so far.
    tf.summary.create_file_writer(str(tmp_path / written_plan.RUN)).close()
    _, shown = command(["report", str(tmp_path)], capsys)
    assert "second" in shown and "first" not in shown
    assert "after 16 steps" in shown
    assert "2,000.000 ms" in shown and "5.000 kB" in shown
    assert "allgather" not in shown and "7,000.000 ms" not in shown
    # Such as of the next model, which is not trained yet.
    write("third", {0: {}})
    _, shown = command(["report", str(tmp_path)], capsys)
    assert "third" in shown and "per step" not in shown


def command(arguments, capsys):
    """Exit code and output of `keras-sparsity`."""
    try:
        code = ks.launch.main(arguments)
    except SystemExit as end:
        code = end.code
    output = capsys.readouterr()
    if code:
        assert "has no folder 'architecture'" in output.err
    return code, output.out


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_everything_on_two_processes(engine, logged):
    log_dir, results = logged(engine)
    found = events(log_dir)
    tags = found.Tags()["tensors"]
    last = 2 * STEPS
    assert {t.partition("/")[0] for t in tags} == {
        *("plan", "alpha", "bytes", "seconds", "rows", "owners", "search")
    }
    # The search, as it was.
    num_partitions, sampled = results[0]["choice"]
    assert results[0]["partitions"] == num_partitions
    assert scalars(found, "search/tables/seconds by partitions") == (
        pytest.approx(sampled)
    )
    (image,) = found.Tensors("search/tables/samples and fit")
    width, height, picture = tf.make_ndarray(image.tensor_proto)
    assert tf.io.decode_png(picture).shape == (int(height), int(width), 4)
    (choice,) = texts(found, "search/tables/choice")
    assert choice.startswith(f"{num_partitions} partitions: ")
    # The plan: first of all, at each decision, and at the end.
    plans = texts(found, "plan")
    assert 2 <= len(plans) <= 2 * STEPS // 8 + 1
    (row,) = (x for x in plans[-1].splitlines() if "sharded" in x)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == [f"{ROWS} x {DIM}", "192.0 kB"]
    assert cells[4:6] == ["ps", str(num_partitions)]
    # Bytes and times of each path.
    for path in ("pull", "push", "allreduce", "allgather"):
        assert scalars(found, f"seconds/{path}")[last] > 0
        assert scalars(found, f"bytes/{path}/sent")[last] > 0
    dense = 8 * DIM + 1
    for way in ("sent", "received"):
        allreduce = scalars(found, f"bytes/allreduce/{way}")
        # Also while the search traces steps anew.
        assert list(allreduce.values()) == pytest.approx([4 * dense] * 6)
    step = scalars(found, "seconds/step")[last]
    # Each message takes a step at most, and those of a path may overlap.
    most = collections.Counter(
        architecture_logger.path_of(role.removeprefix("across/"))
        for role in results[0]["roles"]
    )
    most["stall"] = most.total()
    for part in ("pull", "push", "allreduce", "allgather", "other", "stall"):
        seconds = scalars(found, f"seconds/{part}")[last]
        assert 0 <= seconds <= most[part] * step, part
    expected = np.mean(
        [len(np.unique(part)) / ROWS for part in np.split(ids(), 2 * STEPS)]
    )
    assert scalars(found, "alpha/stock/embeddings")[last] == pytest.approx(
        expected, rel=0.2
    )


def test_a_search_that_the_training_ends_is_shown(cluster, tmp_path):
    results = cluster("native", 2).run(train, str(tmp_path), True, 20)
    found = events(tmp_path)
    num_partitions, sampled = results[0]["choice"]
    assert 2 <= len(sampled) <= 4  # of 21 steps at most
    assert scalars(found, "search/tables/seconds by partitions") == (
        pytest.approx(sampled)
    )
    (choice,) = texts(found, "search/tables/choice")
    assert choice.startswith(f"{num_partitions} partitions: ")
    assert results[0]["partitions"] == num_partitions
    assert f"| ps | {num_partitions} |" in texts(found, "plan")[-1]


def _bytes(found):
    return {
        tag: list(scalars(found, tag).values())
        for tag in found.Tags()["tensors"]
        if tag.startswith("bytes/p")
    }


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_bytes_are_those_of_a_training_step(engine, cluster, tmp_path):
    cluster(engine, 2).run(logger_functions.train_in_ways, str(tmp_path))
    found = {name: events(tmp_path / name) for name in logger_functions.WAYS}
    expected = _bytes(found["alone"])
    assert len(expected) == 4 and all(min(x) > 0 for x in expected.values())
    for name in ("later", "validated", "accumulated"):
        for tag, values in _bytes(found[name]).items():
            np.testing.assert_allclose(
                values[-1], expected[tag][-1], rtol=1e-3, err_msg=(name, tag)
            )
    assert not _bytes(found["eager"])
    for name, is_measured in (("alone", True), ("eager", False)):
        (row,) = (
            line
            for line in texts(found[name], "plan")[-1].splitlines()
            if line.startswith("| sharded/")
        )
        assert bool(row.split("|")[-2].strip()) is is_measured


def profile(log_dir):
    """Trains a little, the last steps under TensorFlow's profiler."""
    strategy = ks.HybridStrategy(architecture="hybrid")
    is_first = strategy.rank == 0
    start = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: (
            is_first
            and batch == 2
            and tf.profiler.experimental.start(f"{log_dir}")
        )
    )
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int64"),
            ks.layers.ShardedEmbedding(ROWS, DIM),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    with strategy.scope():
        model.compile("adagrad", "mse")
    x = ids()[: 5 * BATCH]
    model.fit(x, np.ones((len(x), 1)), BATCH, callbacks=[start], verbose=0)
    if is_first:
        tf.profiler.experimental.stop()


def test_a_profilers_trace_names_the_paths(tmp_path):
    # Processes of its own: in those that have run other tests, TensorFlow
    # 2.18's profiler was seen to abort when it is stopped.
    with forked.ranks():
        ks.launch.run(profile, 2, engine="native", args=(tmp_path,))
    (path,) = tmp_path.rglob("*.xplane.pb")
    trace = path.read_bytes()
    for name in (b"/pull/", b"/push/", b"/all_reduce/", b"/update/"):
        assert name in trace, name


def test_times_of_a_path_are_those_behind_the_last_rank():
    update = architecture_logger.UPDATE
    # Calls, seconds, bytes sent and received, of two steps.
    of_ranks = [
        {
            update: [2, 0.4, 0, 0],
            "table/words/pull/ids": [2, 1.0, 8, 4],
            "table/words/pull/rows": [2, 0.6, 40, 20],
            "optimizer/dense": [2, 0.2, 16, 16],
        },
        {
            update: [2, 0.8, 0, 0],
            "table/words/pull/ids": [2, 3.0, 4, 8],
            "table/words/pull/rows": [2, 0.4, 20, 40],
            "optimizer/dense": [2, 1.0, 16, 16],
        },
    ]
    totals = architecture_logger._of_a_step(of_ranks, 5)
    assert architecture_logger._figures(totals) == pytest.approx(
        {
            "seconds/update": 0.3,
            "seconds/pull": 0.5 + 0.2,
            "seconds/allreduce": 0.1,
            "seconds/stall": 0.5 + 0.05 + 0.2,
            "bytes/pull/sent": 3 + 15,
            "bytes/pull/received": 3 + 15,
            "bytes/allreduce/sent": 8,
            "bytes/allreduce/received": 8,
        }
    )


def test_paths_by_role():
    for role, path in {
        "table/words/pull/ids": "pull",
        "table/words/push/rows": "push",
        "table/words/check_inside": "other",
        "optimizer/dense": "allreduce",
        "optimizer/rows/values": "allgather",
        "optimizer/update": "update",
        "model/logs": "other",
    }.items():
        assert architecture_logger.path_of(role) == path


@pytest.mark.parametrize("name", ["tensorboard", "matplotlib"])
def test_a_missing_library_is_said(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"{name} is not .*pip install"):
        ks.callbacks.ArchitectureLogger(tmp_path)


def test_a_model_compiled_elsewhere_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    logger = ks.callbacks.ArchitectureLogger(tmp_path)
    with pytest.raises(ValueError, match="compiled inside of"):
        model.fit(np.ones((2, 1)), np.ones((2, 1)), callbacks=[logger])
