"""The command `keras-sparsity plan` of a saved model."""

import re
import subprocess
import sys
import time

import keras
import pytest

import keras_sparsity as ks
from keras_sparsity import launch
from keras_sparsity.board import described_plan


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A chain of 13 layers, 10 of which have 1,056 parameters."""
    layers = [
        keras.layers.Dense(32, activation="relu", name=f"dense_{number}")
        for number in range(10)
    ]
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(5_000, 32, name="rows"),
            keras.layers.GlobalAveragePooling1D(name="mean"),
            *layers,
            keras.layers.Dense(1, name="out"),
        ]
    )
    model.compile("adam", "mse")
    path = tmp_path_factory.mktemp("saved") / "model.keras"
    model.save(path)
    return str(path)


def test_a_thousand_machines_take_seconds(saved, capsys):
    begin = time.monotonic()
    arguments = "--machines 1000 --rate 1000 --latency 0.1 --memory 8"
    assert launch.main(["plan", saved, *arguments.split()]) == 0
    # Seconds on a free machine.
    assert time.monotonic() - begin < 60
    # Long lines are broken.
    shown = " ".join(capsys.readouterr().out.split())
    for way in ("data parallelism", "layer placement after", "1f1b"):
        assert way in shown
    assert re.search(r" (2 stages x 500|4 stages x 250) replicas ", shown)
    assert "on 1000 machines of 1, links of 1000 Mbit/s" in shown
    assert "32000 examples" in shown
    assert re.search(r"Slower ways that are not shown: \d+", shown)


def test_the_table_tells_the_size_of_unknown_inputs(saved, tmp_path):
    words = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(50, 2, name="rows")(words)
    x = keras.layers.GlobalAveragePooling1D(name="mean")(x)
    path = str(tmp_path / "text.keras")
    keras.Model(words, keras.layers.Dense(1, name="out")(x)).save(path)
    cluster = ks.planning.Cluster(2, megabits_per_second=1_000)
    for model, is_told in ((path, True), (saved, False)):
        shown = described_plan.described(model, cluster, 4).markdown()
        assert ("lengths of sequences, count as 16:" in shown) == is_told


def test_more_than_a_thousand_machines_and_options(saved):
    cluster = ks.planning.Cluster(4_000, 2, megabits_per_second=1_000)
    plan = described_plan.described(saved, cluster, 16_000, alpha=0.01)
    whole = next(c for c in plan.costs if c.way == "data parallelism")
    # The rows of the 2 examples of a process do not fill its memory: weights,
    # gradients, two slots, and the outputs of the layers.
    parameters = 5_000 * 32 + 10 * (32 * 32 + 32) + 33
    outputs = 4 * (6 * 32 + 32 + 10 * 32 + 1)
    assert whole.memory_bytes == (4 * 4 * parameters + 2 * outputs,)
    # To 8,000 owners even these rows are more than a ring of all gradients.
    assert whole.busiest_bytes == pytest.approx(
        2 * 4 * parameters * 7_999 / 8_000
    )


def test_alpha_counts(saved):
    cluster = ks.planning.Cluster(2, megabits_per_second=1_000)
    bytes_by_alpha = [
        next(
            cost.busiest_bytes
            for cost in described_plan.described(
                saved, cluster, 64, alpha
            ).costs
            if cost.way == "data parallelism"
        )
        for alpha in (0.01, 0.1)
    ]
    rest = 2 * 4 * (10 * (32 * 32 + 32) + 33) / 2
    # Rows to pull and gradients to push, of 2,500 rows of the other machine.
    for alpha, found in zip((0.01, 0.1), bytes_by_alpha, strict=True):
        rows = alpha * 2_500 * (2 * 32 * 4 + 2)
        assert rest + rows <= found <= rest + 1.125 * rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--machines 0", "--machines: must be a positive integer, at most"),
        ("--machines 2.5", "--machines: must be a positive integer, at most"),
        ("--machines 100001", "--machines: .*, at most 100,000.*'100001'"),
        ("--processes-per-machine 0", "--processes-per-machine: must be a pos"),
        ("--rate 0", "--rate: must be a positive number. Received: '0'"),
        ("--rate nan", "--rate: must be a positive number. Received: 'nan'"),
        ("--latency -1", "--latency: must be a positive number.*'-1'"),
        ("--message fast", "--message: must be a positive number.*'fast'"),
        ("--message-byte 0", "--message-byte: must be a positive number"),
        ("--memory 1e999", "--memory: must be a positive number.*'1e999'"),
        ("--speed 0", "--speed: must be a positive number"),
        ("--batch-size 0", "--batch-size: must be a positive integer."),
        ("--alpha 2", "--alpha: must be a fraction from 0 to 1.*'2'"),
        ("--unknown 2", "unrecognized arguments: --unknown 2"),
    ],
)
def test_wrong_values_of_options_are_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        launch.main(["plan", "model.keras", *arguments.split()])
    assert end.value.code == 2
    # Lines are broken to the terminal's width.
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(message, told), told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("SAVED", "needs --machines and --rate. Received: neither"),
        ("SAVED --rate 3", "needs --machines and --rate. Received: --rate"),
        ("FOLDER --machines 2", "--machines are for a saved model.*a file"),
        ("FOLDER", "has no folder 'architecture'"),
        ("no.keras --machines 2 --rate 1", "no file or folder 'no.keras'"),
        ("no.keras", "no file or folder 'no.keras'"),
        (
            "OTHER --machines 2 --rate 1",
            "is no model that can be loaded.*`model.save` has.*Keras says: ",
        ),
        ("/dev/null", "plan of a saved model needs --machines and --rate"),
        (
            "SAVED --machines 100000 --processes-per-machine 100000 --rate 1",
            "--processes-per-machine must be at most 100,000. Received: 10,0",
        ),
    ],
)
def test_wrong_usage_is_explained(arguments, message, saved, tmp_path, capsys):
    other = tmp_path / "other.keras"
    other.write_text("no model")
    for name, path in (
        ("SAVED", saved),
        ("FOLDER", tmp_path),
        ("OTHER", other),
    ):
        arguments = arguments.replace(name, str(path))
    assert launch.main(["plan", *arguments.split()]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(message, told), told


def test_a_report_takes_a_folder(saved, capsys):
    assert launch.main(["report", saved]) == 1
    assert "folder of an ArchitectureLogger. Received: the file" in (
        capsys.readouterr().err
    )


def test_rows_of_sharded_layers(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            ks.layers.ShardedEmbedding(100, 2, name="rows"),
            keras.layers.Flatten(),
            keras.layers.Dense(1, use_bias=False),
        ]
    )
    model.compile("sgd", "mse")
    model.save(tmp_path / "sharded.keras")
    cluster = ks.planning.Cluster(2, megabits_per_second=1.0)
    for alpha, part in ((None, 3 * 2 / 100), (0.5, 0.5)):
        plan = described_plan.described(
            str(tmp_path / "sharded.keras"), cluster, 6, alpha
        )
        ways = {cost.way: cost for cost in plan.costs}
        assert set(ways) == {"data parallelism", "layer placement"}
        table = ks.planning.VariableSpec("rows", (100, 2), part)
        dense = ks.planning.VariableSpec("out", (4, 1))
        total = ks.planning.plan([table, dense], cluster, engine="native").total
        assert ways["data parallelism"].busiest_bytes == max(
            *total.sent_bytes, *total.received_bytes
        )


def test_the_command_loads_a_model_that_a_strategy_has_compiled(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            ks.layers.ShardedEmbedding(100, 2, name="rows"),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    with ks.HybridStrategy().scope():
        model.compile("adam", loss=ks.losses.GlobalMean("mse"))
    model.save(tmp_path / "model.keras")
    # In a new process, which imports what the command imports.
    command = [sys.executable, "-m", "keras_sparsity.launch", "plan"]
    options = ["model.keras", "--machines", "2", "--rate", "100"]
    found = subprocess.run(
        command + options,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert "data parallelism" in found.stdout


def test_a_sampled_softmax_is_on_one_tail_worker(tmp_path):
    words = keras.Input((3,), dtype="int32")
    x = ks.layers.ShardedEmbedding(100, 2, name="rows")(words)
    x = keras.layers.Dense(4, name="hidden")(x)
    softmax = ks.layers.SampledSoftmax(1000, 8, use_bias=False)
    path = str(tmp_path / "language.keras")
    keras.Model(words, softmax(x)).save(path)
    cluster = ks.planning.Cluster(4, megabits_per_second=1.0)
    plan = described_plan.described(path, cluster, num_examples=6)
    ways = {(cost.way, cost.num_tails): cost for cost in plan.costs}
    assert set(ways) == {("data parallelism", 0), ("layer placement", 1)}
    placed = ways["layer placement", 1]
    assert placed.stages[0] in ("rows", "hidden")
    # The tail worker has all classes: weights, gradients and Adam's slots.
    assert placed.memory_bytes[1] >= 4 * 4 * (4 * 1000)
    # Of a class in 1000 a process touches its label's and a sample's, 2 bytes
    # for the number and 4 numbers; none of them travels to the tail.
    classes = ks.planning.VariableSpec(
        "softmax", (1000, 4), (6 / 4 * 3 + 8) / 1000
    )
    others = ways["data parallelism", 0].busiest_bytes - placed.busiest_bytes
    assert others > ks.planning.plan([classes], cluster).total.busiest_bytes / 3


def test_tied_weights_are_refused(tmp_path):
    words = keras.Input((3,), dtype="int32")
    rows = ks.layers.ShardedEmbedding(100, 2, name="rows")
    softmax = ks.layers.SampledSoftmax(100, 8, table=rows)
    path = str(tmp_path / "tied.keras")
    keras.Model(words, softmax(rows(words))).save(path)
    cluster = ks.planning.Cluster(2, megabits_per_second=1.0)
    with pytest.raises(ValueError, match=r"cannot be cut.*ks.export\(model\)"):
        described_plan.described(path, cluster)
