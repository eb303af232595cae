"""The tutorials run, on every engine, and their text is what they say."""

import importlib.util
import math
import pathlib
import re
import sys

import numpy as np
import pytest

from keras_sparsity import launch
from tests import forked
from tests.conftest import HAS_HOROVOD

ROOT = pathlib.Path(__file__).parents[1]
TUTORIALS = ROOT / "tutorials"


@pytest.fixture(scope="module")
def text():
    spec = importlib.util.spec_from_file_location(
        "tutorial_text", TUTORIALS / "text.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def write_cycle(path, num_words=40_000):
    """Text in which each word tells the next: easy to learn, if it learns."""
    words = [f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(60)]
    text = [words[i % 60] for i in range(num_words)]
    path.write_text(" ".join(text))
    return path


def test_standard_library_is_a_corpus_of_tens_of_thousands_of_words(text):
    corpus = text.load_corpus()
    assert 20_000 < len(corpus.vocabulary) < 100_000
    assert corpus.train.dtype == corpus.held_out.dtype == np.int32
    assert corpus.train[:, 0].size > 500_000
    assert corpus.held_out[:, 0].size > 5_000
    assert corpus.train.max() < len(corpus.vocabulary)
    assert corpus.train.min() == 0
    # The same in every process and at every run.
    np.testing.assert_array_equal(text.load_corpus().train, corpus.train)


def test_vocabulary_goes_from_frequent_to_rare(text, tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("b a b once b a " + "b a " * 10_000)
    corpus = text.load_corpus([path], time=3)
    assert corpus.vocabulary == ["<unk>", "b", "a"]


def test_words_have_neither_punctuation_nor_numbers_nor_escapes(text):
    found = text.WORD.findall(r"self.x_1 = f(3, 'a\nTwo\n') # été, 12ab")
    assert found == ["self", "x_1", "f", "a", "été"]


def test_targets_are_the_words_that_follow(text):
    ids = {"a": 1, "b": 2, "c": 3}
    pieces = [["a", "b", "c", "what", "a", "b"], ["c", "a"], [], ["a"]]
    np.testing.assert_array_equal(
        text.make_sequences(pieces, ids, 2),
        [[[1, 2], [2, 3]], [[3, 0], [0, 1]]],
    )


def test_unigram_perplexity_is_that_of_the_smoothed_frequencies(text):
    train = np.array([[[0, 1, 1], [1, 1, 2]]], "int32")
    held_out = np.array([[[1, 1, 0], [1, 2, 0]]], "int32")
    corpus = text.Corpus(["<unk>", "b", "a"], train, held_out)
    p = np.array([0 + 1, 2 + 1, 1 + 1]) / 6
    expected = math.exp(-(math.log(p[1]) + math.log(p[2]) + math.log(p[0])) / 3)
    assert corpus.unigram_perplexity() == pytest.approx(expected)


def test_too_little_text_says_what_to_do(text, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("too little")
    with pytest.raises(ValueError, match="Fix: --text with more"):
        text.load_corpus([path])


# Where Horovod is, it; the smoke run, without it, has the native engine.
ENGINE = "horovod" if HAS_HOROVOD else "native"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """`run(*arguments)` gives what a tutorial prints, run by the launcher.

    In a folder of its own. The launcher runs in this process, which has
    imported TensorFlow already, as has the one that its ranks are forked from.
    """
    monkeypatch.chdir(tmp_path)

    def run(*arguments, num_processes=2):
        engine = ENGINE if num_processes > 1 else "local"
        with forked.ranks():
            code = launch.main(
                ["run", "-n", str(num_processes), "--engine", engine]
                + [str(argument) for argument in arguments]
            )
        output, errors = capfd.readouterr()
        assert code == 0, output + errors
        return output

    return run


PAGES = ROOT / "docs" / "tutorials"


def losses_of(output, num_processes):
    """The lists of losses that a tutorial's output has."""
    return [
        list(map(float, line.split(": ")[1].split(", ")))
        for line in output.splitlines()
        if line.startswith(f"losses with {num_processes} process(es): ")
    ]


@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(PAGES.glob("*.txt"))]
)
def test_pages_keep_the_output_of_the_command_that_the_tutorial_names(name):
    command, *output = (PAGES / f"{name}.txt").read_text().splitlines()
    source = (TUTORIALS / f"{name}.py").read_text()
    commands = " ".join(source.replace("\\\n", " ").split())
    assert command.startswith("$ keras-sparsity run")
    assert command.removeprefix("$ ") in commands
    assert len(output) > 3
    # Of the recording machine, pages show no path.
    assert not [line for line in output if re.search(r"(^|[\s'\"(])/\w", line)]


@pytest.mark.parametrize(
    "name", ["01_one_process_to_several.py", "custom_loop.py"]
)
def test_losses_are_the_same_with_one_process_and_with_two(run, name):
    script = TUTORIALS / name
    losses = [losses_of(run(script, num_processes=n), n) for n in (1, 2)]
    np.testing.assert_allclose(losses[1], losses[0], atol=2e-4)
    assert losses[0][0][1] < losses[0][0][0]
    page = (PAGES / name).with_suffix(".txt").read_text()
    np.testing.assert_allclose(losses_of(page, 2), losses[0], atol=2e-4)


def test_plans_and_draws_what_each_architecture_costs(run, tmp_path):
    output = run(TUTORIALS / "02_plan_and_architecture.py")
    assert "alpha of the model" in output
    assert "Architecture: 'of_items' " in output
    assert (tmp_path / "plan" / "bytes_by_alpha.png").stat().st_size > 10_000
    assert list((tmp_path / "plan" / "logs" / "architecture").glob("events.*"))


def test_searches_partitions_and_keeps_the_choice(run, tmp_path):
    script = TUTORIALS / "03_partition_search.py"
    output = run(script, "--steps", 130)
    assert "PartitionSearch: 'tables' gets" in output
    assert "ms by the fit" in output
    folder = tmp_path / "logs"
    assert list((folder / "architecture").glob("events.*"))
    assert (folder / "partitions.json").exists()


def test_resumes_saves_and_exports(run):
    script = TUTORIALS / "04_saving_resuming_exporting.py"
    output = run("--max-restarts", 1, script)
    assert "going on in epoch 2 after 16 of its steps" in output
    assert "['Embedding', 'GlobalAveragePooling1D', 'Dense']" in output
    assert "all predict the same" in output


def test_trains_stages_by_three_schedules(run):
    script = TUTORIALS / "05_pipeline.py"
    output = run(script)
    page = (PAGES / "05_pipeline.txt").read_text()
    found, recorded = [
        re.findall(r"^(\w+): loss of unseen text ([\d.]+)$", each, re.M)
        for each in (output, page)
    ]
    assert [name for name, _ in found] == ["1f1b", "vanilla", "spectrain"]
    losses = [float(loss) for _, loss in found]
    # Below that of words drawn alike, which a model begins with.
    assert max(losses) < 0.8 * math.log(1_000)
    np.testing.assert_allclose(
        losses, [float(loss) for _, loss in recorded], rtol=0.05
    )
    assert "both predict the same" in output


def test_trains_with_old_weights(run):
    output = run(TUTORIALS / "08_asynchronous.py")
    page = (PAGES / "08_asynchronous.txt").read_text()
    found, recorded = [
        re.findall(r"^(\w+): loss of unseen text ([\d.]+)$", each, re.M)
        for each in (output, page)
    ]
    names = ["synchronous", "bounded", "fixed"]
    assert [name for name, _ in found] == names
    np.testing.assert_allclose(
        [float(loss) for _, loss in found],
        [float(loss) for _, loss in recorded],
        rtol=0.05,
    )
    steps = re.findall(r"^(\w+): steps of each worker \[(.*)\]$", output, re.M)
    numbers = {name: [int(n) for n in of.split(", ")] for name, of in steps}
    assert numbers["fixed"] == numbers["synchronous"] == [80, 80]
    assert sum(numbers["bounded"]) == 80


def test_places_layers_as_one_process_trains(run, monkeypatch):
    script = TUTORIALS / "06_layer_placement.py"
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    output = run(script, num_processes=3)
    page = (PAGES / "06_layer_placement.txt").read_text()
    found, recorded = [
        re.findall(r"^(.*): accuracy ([\d.]+)$", each, re.M)
        for each in (output, page)
    ]
    assert [who for who, _ in found] == ["3 processes", "one process"]
    accuracies = [float(number) for _, number in found]
    assert min(accuracies) > 0.9
    np.testing.assert_allclose(
        accuracies, [float(number) for _, number in recorded], atol=0.02
    )
    assert re.search(r"pool_2 .*chosen, the paper's", output)
    assert "both predict the same" in output


def test_trains_by_the_strategy_that_it_plans(run):
    script = TUTORIALS / "07_which_strategy.py"
    output = run(script)
    page = (PAGES / "07_which_strategy.txt").read_text()
    for text in (output, page):
        # Data parallelism sends 8 times the bytes.
        assert re.search(
            r"at 20 Mbit/s the best exact one: (pipeline|layer placement)", text
        )
        assert re.search(r"data parallelism .* 631.8 kB .* yes +link", text)
        assert text.count("missed updates") == 2
        assert re.search(
            r"^trained by a (Hybrid|Pipeline|LayerPlacement)Strategy$",
            text,
            re.M,
        )
        found = re.findall(r"^(?:2|one) process.*: accuracy (.*)$", text, re.M)
        several, alone = map(float, found)
        assert alone > 0.9
        assert several == pytest.approx(alone, abs=0.02)


# On the newest TensorFlow alone, as `make demo`.
@pytest.mark.all_cells
@pytest.mark.smoke
def test_language_model_learns_and_exports_on_two_processes(run, tmp_path):
    output = run(
        TUTORIALS / "language_model.py",
        *("--text", write_cycle(tmp_path / "text.txt")),
        *("--export", tmp_path / "exported", "--num-sampled", 20),
        *("--batch-size", 64, "--time", 10, "--steps-per-epoch", 60),
        *("--dim", 16, "--units", 32, "--learning-rate", 0.02),
    )
    assert "2 process(es)" in output
    for line in ("before training", "unigram model", "after training"):
        # Once: the other rank's output does not show.
        assert (
            output.count(f"perplexity {line}")
            + output.count(f"perplexity, {line}")
            == 1
        )
    assert "reloaded without this package" in output
    assert (tmp_path / "exported" / "language_model.keras").exists()
