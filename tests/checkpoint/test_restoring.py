"""Values of a checkpoint, on other numbers of processes and stages."""

import types

import keras
import numpy as np
import pytest

from keras_sparsity.checkpoint import restoring
from keras_sparsity.checkpoint.state import Entry
from keras_sparsity.exchange.layout import Layout

SAVED = [np.float32(1.0), np.float32(5.0)]  # by two processes


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("aggregation", "read", "expected"),
    [("sum", np.sum, 6.0), ("mean", np.mean, 3.0)],
)
def test_what_is_read_stays(aggregation, read, expected, size):
    """A metric's variable is summed or averaged over the ranks when read."""
    variables = [
        keras.Variable(7.0, aggregation=aggregation) for _ in range(size)
    ]
    for rank, variable in enumerate(variables):
        entry = _entry("metrics", variable, None, is_replicated=False)
        restoring.restore_own(entry, SAVED, rank, size)
    assert read([v.numpy() for v in variables]) == expected


def test_other_variables_of_another_keras():
    """Its versions differ in the order of averages and accumulators."""
    entries = [_entry("model", keras.Variable([1.0]), None)]
    for versions, told in [
        ({"keras": "3.4.0"}, "under Keras '3.4.0', and this is"),
        ({"keras": [[]]}, "under Keras"),
        ({"keras": keras.__version__}, "another directory. The first of them"),
        (None, "another directory. The first of them"),
    ]:
        with pytest.raises(ValueError, match="another model") as error:
            restoring.check_same_variables(
                entries, [], "folder", {"versions": versions}
            )
        assert told in str(error.value)


def _entry(section, variable, ranks, rank=0, is_replicated=True):
    is_here = ranks is None or rank in ranks
    return Entry(
        *(section, "it", tuple(variable.shape), variable.dtype),
        [variable] if is_here else [],
        is_replicated=is_replicated,
        ranks=ranks,
    )


def _restored(section, make, record, num_saved, ranks, size, is_replicated):
    """Values by rank; a file's value is ten times its rank, dense.h5's 99."""
    variables = [make() for _ in range(size)]

    def file(name):
        rank = 9.9 if name == "dense.h5" else int(name[5:-3])

        def dataset(names, shape, dtype):
            assert (names, dtype) == (["3"], variables[0].dtype)
            return np.full(shape, 10 * rank, dtype)

        return types.SimpleNamespace(dataset=dataset)

    for rank, variable in enumerate(variables):
        restoring.restore(
            _entry(section, variable, ranks, rank, is_replicated),
            *(3, record, file, num_saved),
            types.SimpleNamespace(rank=rank, size=size),
        )
    return [variable.numpy().tolist() for variable in variables]


def _number():
    return keras.Variable(7.0, aggregation="sum")


def _seed():
    return keras.Variable([3, 4], dtype="uint32", name="seed_generator_state")


@pytest.mark.parametrize(
    ("section", "record", "num_saved", "ranks", "size", "expected"),
    [
        # Of a stage on rank 1, to one process, and to two ranks of three.
        ("model", {"ranks": [1]}, 2, (0,), 1, [10]),
        ("model", {"ranks": [1]}, 2, (0, 1), 3, [10, 10, 7]),
        # Between models in stages and others.
        ("model", {}, 2, (1,), 2, [7, 99]),
        ("model", {"ranks": [1]}, 2, None, 2, [10, 10]),
        # What the last stage has counted; each rank's counts, all together.
        ("metrics", {"ranks": [1]}, 2, (1, 2), 3, [7, 10, 10]),
        ("metrics", {"each_rank": True}, 3, (1, 2), 3, [7, 30, 30]),
    ],
)
def test_from_stages_to_others(
    section, record, num_saved, ranks, size, expected
):
    found = _restored(section, _number, record, num_saved, ranks, size, True)
    assert found == expected


def test_counts_of_the_last_stage_without_stages():
    """They are summed over the ranks when they are read."""
    found = _restored("metrics", _number, {"ranks": [1]}, 2, None, 2, False)
    assert found == [10, 0]


def test_random_states_of_a_stage():
    record = {"ranks": [1, 2], "each_rank": True}
    same = _restored("model", _seed, record, 3, (1, 2), 3, False)
    assert same == [[3, 4], [10, 10], [20, 20]]
    # Of more ranks: that of the first of those that saved it, and others'.
    more = _restored("model", _seed, record, 3, (0, 1, 2), 3, False)
    assert more[0] == [10, 10]
    assert [counter for _, counter in more] == [10] * 3
    assert len({seed for seed, _ in more}) == 3


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_of_each_process_are_cut_as_batches_are(size):
    """The states of a stateful layer, a row for each example."""
    rows = np.arange(8, dtype="float32").reshape(4, 2)
    variables = [keras.Variable(np.ones((4 // size, 2))) for _ in range(size)]
    for rank, variable in enumerate(variables):
        entry = _entry("model", variable, None, is_replicated=False)
        restoring.restore_own(entry, np.split(rows, 2), rank, size)
    np.testing.assert_array_equal(np.concatenate(variables), rows)


def test_one_number_of_each_process_is_of_as_many_only():
    record = {"each_rank": True}
    with pytest.raises(ValueError, match="own on each of the 2 proc.*Resume"):
        _restored("model", _number, record, 2, None, 3, False)


PARTITIONED = {"num_partitions": 3, "owners": [1, 0]}


@pytest.mark.parametrize(
    ("record", "layout"),
    [
        (PARTITIONED, Layout(7, 2, (0, 1))),
        (PARTITIONED, Layout(7, 5, (1,))),
        (PARTITIONED, None),
        ({}, Layout(7, 2, (1, 0))),
    ],
)
def test_rows_of_other_partitions(record, layout):
    whole = np.arange(14, dtype="float32").reshape(7, 2)
    count = record.get("num_partitions", 1)

    def file(name):
        def dataset(names, shape, dtype):
            number, *partition = names
            assert (number, dtype) == ("3", "float32")
            source = int(partition[0]) if partition else 0
            ranks = ["rank-00001.h5", "rank-00000.h5"]
            assert name == (ranks[source % 2] if record else "dense.h5")
            assert shape == whole[source::count].shape
            return whole[source::count]

        return types.SimpleNamespace(dataset=dataset)

    for rank in range(2):
        owned, new_count = [0], 1
        if layout is not None:
            owned, new_count = (
                layout.owned_partitions(rank),
                layout.num_partitions,
            )
        expected = [whole[partition::new_count] for partition in owned]
        pieces = [keras.Variable(-np.ones_like(rows)) for rows in expected]
        entry = Entry("model", "it", (7, 2), "float32", pieces, layout)
        ranks = types.SimpleNamespace(rank=rank, size=2)
        restoring.restore(entry, 3, record, file, 2, ranks)
        for piece, rows in zip(pieces, expected, strict=True):
            np.testing.assert_array_equal(piece, rows)
