"""The file of a partition search: written, read and refused."""

import json

import pytest

import keras_sparsity as ks
from keras_sparsity.callbacks import saved_partitions

CONDITIONS = {"processes": 4, "old": 1}
CHOICE = {
    "num_partitions": 2,
    "size": 2,
    "samples": [{"num_partitions": 2, "seconds": 0.1, "error_seconds": 0.0}],
    "theta": [0.1, 0.0, 0.0, 0.0],
    "misfit": 0.0,
}


def document(**wrong):
    choices = {"tables": {**CHOICE, **wrong}}
    return json.dumps({"version": 1, "conditions": {}, "choices": choices})


UNREADABLE = {
    # Text of the file: what is said of it.
    "{": "it cannot be read (JSONDecodeError",
    "[]": "it cannot be read (TypeError",
    '{"version": 0}': "it is of version 0, not 1",
    '{"version": 1}': "it cannot be read (KeyError",
    "[" * 100_000: "it cannot be read (RecursionError",
    document(num_partitions=None): "it cannot be read",
    document(num_partitions=10**30): "it cannot be read",
    document(num_partitions="2"): "it cannot be read",
    document(size=0): "it cannot be read",
    document(theta=[0.1, None]): "it cannot be read",
    document(theta=3): "it cannot be read",
    document(misfit="large"): "it cannot be read",
    document(samples=[3]): "it cannot be read",
    document(samples=[{"num_partitions": 2, "seconds": -1}]): (
        "it cannot be read"
    ),
    document(other=3): "it cannot be read",
}


@pytest.mark.parametrize(
    ("text", "reason"),
    UNREADABLE.items(),
    ids=[text[-70:] for text in UNREADABLE],
)
def test_an_unreadable_file_gives_a_reason(tmp_path, text, reason):
    path = tmp_path / "search.json"
    path.write_text(text)
    choices, why = saved_partitions.load(path, {}, ["tables"])
    assert choices is None
    assert why.startswith(reason)


def test_a_readable_file_of_the_table_is_taken(tmp_path):
    """So that each text above is refused for its own error."""
    path = tmp_path / "search.json"
    path.write_text(document())
    choices, why = saved_partitions.load(path, {}, ["tables"])
    assert choices["tables"].num_partitions == 2
    assert why is None


@pytest.fixture
def saved(tmp_path):
    """A file, and the choice that it holds."""
    sampler = ks.planning.PartitionSampler(size=4)
    for count, seconds in ((1, 0.1), (2, 0.05), (4, 0.04), (8, 0.06)):
        sampler.record(count, seconds)
    choice = sampler.choice()
    path = tmp_path / "search.json"
    saved_partitions.save(path, CONDITIONS, {"tables": choice})
    return path, choice


def test_a_saved_choice_is_read_back(saved):
    path, choice = saved
    found = saved_partitions.load(path, CONDITIONS, ["tables"])
    assert found == ({"tables": choice}, None)
    assert [entry.name for entry in path.parent.iterdir()] == ["search.json"]


@pytest.mark.parametrize(
    ("conditions", "groups", "reason"),
    [
        (
            {"processes": 2, "new": 1},
            ["tables"],
            "processes was 4 and is 2; new was not there and is 1; "
            "old was 1 and is not there",
        ),
        (CONDITIONS, ["a"], "it has choices for ['tables']"),
    ],
)
def test_a_choice_for_something_else_is_refused(
    saved, conditions, groups, reason
):
    found = saved_partitions.load(saved[0], conditions, groups)
    assert found == (None, reason)
