"""What each rank reads."""

import collections
import itertools
import pathlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity.data import distribution, fingerprints
from keras_sparsity.data.batches import split_batch
from keras_sparsity.data.dataset_graph import CannotSplit, DatasetGraph
from keras_sparsity.data.equal_steps import ending_together, with_equal_steps
from tests.conftest import engines, engines_and_sizes

# Cutting batches, in one process.


def _structures():
    x = np.arange(10.0).reshape(5, 2)
    ragged = tf.ragged.constant([[1], [2, 3], [], [4], [5, 6]])
    return {
        "array": x,
        "tuple": (x, np.arange(5)),
        "tuple of one": (x,),
        "pair without labels": ((x, np.arange(5)),),
        "pair with labels": ((x, np.arange(5)), np.arange(5)),
        "dict": {"a": x, "b": (np.arange(5), np.array(list("abcde")))},
        "none": (x, None),
        "optional": (x, tf.experimental.Optional.empty(None)),
        "ragged": (ragged, np.arange(5)),
        "sparse": (tf.sparse.from_dense(np.arange(15).reshape(5, 3)),),
    }


def _listed(structure):
    """Rows as lists, whatever they are kept in."""

    def leaf(x):
        if x is None or isinstance(x, tf.experimental.Optional):
            return None
        if isinstance(x, tf.RaggedTensor):
            return x.to_list()
        if isinstance(x, tf.SparseTensor):
            x = tf.sparse.to_dense(x)
        return np.asarray(x).tolist()

    return [leaf(x) for x in tf.nest.flatten(structure)]


def _joined(parts):
    """Rows of all parts, in order."""
    return [
        None if leaves[0] is None else list(itertools.chain(*leaves))
        for leaves in zip(*map(_listed, parts), strict=True)
    ]


@pytest.mark.parametrize("kind", _structures())
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_parts_of_a_batch_are_the_batch(kind, size):
    batch = _structures()[kind]
    parts = [split_batch(batch, rank, size) for rank in range(size)]
    assert _joined(parts) == _listed(batch)
    rows = [len(_listed(part)[0]) for part in parts]
    assert max(rows) - min(rows) <= 1


@pytest.mark.parametrize("kind", _structures())
@pytest.mark.parametrize("size", [2, 3, 8])
def test_parts_of_a_dataset_are_the_dataset(kind, size):
    batches = tf.data.Dataset.from_tensors(_structures()[kind]).repeat(2)
    parts = [
        distribution.split_batches(batches, rank, size) for rank in range(size)
    ]
    for whole, *each in zip(batches, *parts, strict=True):
        assert _joined(each) == _listed(whole)
    for part in parts:
        assert part.cardinality() == 2
        tf.nest.assert_same_structure(part.element_spec, batches.element_spec)
        for spec in tf.nest.flatten(part.element_spec):
            if getattr(spec, "shape", None) is not None:
                assert spec.shape[0] is None
                assert spec.shape.rank is not None


def test_the_last_batch_may_be_empty():
    batches = tf.data.Dataset.range(9).batch(4)
    parts = [distribution.split_batches(batches, rank, 2) for rank in range(2)]
    assert [_listed(list(p)) for p in parts] == [
        [[0, 1], [4, 5], []],
        [[2, 3], [6, 7], [8]],
    ]


@pytest.mark.parametrize(
    "dataset, error, match",
    [
        (tf.data.Dataset.range(4), ValueError, r"dataset\.batch"),
        ([1, 2], TypeError, "tf.data.Dataset"),
    ],
    ids=["scalars", "list"],
)
def test_what_has_no_rows_is_refused(dataset, error, match):
    with pytest.raises(error, match=match):
        distribution.split_batches(dataset, 0, 2)


def test_rows_that_do_not_match_are_refused():
    batch = (tf.zeros([4, 2]), tf.zeros([3]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="first dimension"):
        split_batch(batch, 0, 2)
    with pytest.raises(ValueError, match="scalar"):
        split_batch((np.zeros(4), 3.0), 0, 2)


# What ranks read, by real processes.


def _read(dataset, epochs=2):
    """Rows of each batch of this rank, in each epoch."""
    return [[_listed(batch)[0] for batch in dataset] for _ in range(epochs)]


@pytest.mark.parametrize(
    ("engine", "num_processes"), engines_and_sizes("native")
)
def test_every_example_is_read_once(cluster, engine, num_processes, tmp_path):
    cases = [
        (source, by)
        for source in SOURCES
        for by in (None, "batches")
        if not (by and source in ("files", "few_files", "filtered"))
    ]
    for num_files in (3, 4, 10):
        _write_text_files(tmp_path, num_files)
    by_rank = cluster(engine, num_processes).run(
        read_sources, cases, str(tmp_path)
    )
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        how = results[0]["how"]
        wanted = SOURCES[case[0]][1] if case[1] is None else "batches"
        assert (case, how) == (case, wanted)
        for epoch in range(2):
            steps = [result["epochs"][epoch] for result in results]
            num_steps = {len(step) for step in steps}
            assert len(num_steps) == 1, case
            rows = collections.Counter(
                itertools.chain(*itertools.chain(*steps))
            )
            expected = collections.Counter(
                itertools.chain(*results[0]["expected"])
            )
            assert rows == expected, case
            for batches in zip(*steps, strict=True):
                assert sum(map(len, batches)) <= 8, case


def _text_files(directory, num_files):
    return [
        str(pathlib.Path(directory) / f"{num_files}-{number:02}.txt")
        for number in range(num_files)
    ]


def _write_text_files(directory, num_files):
    for number, path in enumerate(_text_files(directory, num_files)):
        lines = [f"{number}:{i}" for i in range(3 + 5 * (number % 3))]
        pathlib.Path(path).write_text("\n".join(lines))


def _of_arrays(directory):
    x = np.arange(21)
    return tf.data.Dataset.from_tensor_slices((x, x * 2)).batch(8)


def _of_paths(directory):
    paths = _text_files(directory, 10)
    return (
        tf.data.Dataset.from_tensor_slices(paths)
        .shuffle(10)
        .map(lambda path: tf.strings.length(tf.io.read_file(path)))
        .batch(8)
        .prefetch(2)
    )


def _of_files(directory):
    return (
        tf.data.TextLineDataset(_text_files(directory, 4))
        .map(lambda line: tf.strings.join([line, "!"]))
        .shuffle(7)
        .batch(8)
    )


def _of_few_files(directory):
    return (
        tf.data.TextLineDataset(_text_files(directory, 3))
        .map(lambda line: tf.strings.join([line, "!"]))
        .batch(8)
    )


def _of_shuffled_maps(directory):
    return tf.data.Dataset.range(21).map(lambda x: x * 2).shuffle(21).batch(8)


def _filtered(directory):
    return (
        tf.data.Dataset.range(40)
        .filter(lambda x: x % 3 > 0)
        .map(lambda x: x * 2)
        .batch(8)
    )


def _dropped(directory):
    return (
        tf.data.Dataset.range(23)
        .map(lambda x: {"a": x, "b": tf.zeros([2])})
        .batch(8, drop_remainder=True)
    )


def _of_a_generator(directory):
    def generate():
        for i in range(3):
            yield np.arange(5) + 10 * i

    return tf.data.Dataset.from_generator(
        generate, output_signature=tf.TensorSpec([None], tf.int64)
    )


def _padded(directory):
    return tf.data.Dataset.range(1, 12).map(tf.range).padded_batch(8)


SOURCES = {
    "arrays": (_of_arrays, "batches"),
    "paths": (_of_paths, "elements"),
    "files": (_of_files, "files"),
    "few_files": (_of_few_files, "elements"),
    "shuffled_maps": (_of_shuffled_maps, "elements"),
    "filtered": (_filtered, "elements"),
    "dropped": (_dropped, "elements"),
    "generator": (_of_a_generator, "batches"),
}


def read_sources(cases, directory):
    communicator = collectives.current()
    results = []
    for source, by in cases:
        tf.random.set_seed(11)
        dataset = SOURCES[source][0](directory)
        expected = _read(dataset, epochs=1)[0]
        how = "batches"
        if by is None:
            try:
                graph = DatasetGraph(dataset)
                how = graph.best_split(communicator.size).by
            except CannotSplit:
                pass
        part = distribution.shard(dataset, communicator, by=by)
        results.append(
            {"expected": expected, "how": how, "epochs": _read(part)}
        )
    return results


def read_endless():
    communicator = collectives.current()
    tf.random.set_seed(12)
    dataset = tf.data.Dataset.range(20).map(lambda x: x * 3).repeat().batch(4)
    part = distribution.shard(dataset, communicator)
    return [_listed(batch)[0] for batch in part.take(12)], int(
        part.cardinality()
    )


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_endless_input_stays_endless(cluster, engine):
    by_rank = cluster(engine, 2).run(read_endless)
    assert {cardinality for _, cardinality in by_rank} == {-1}
    steps = list(zip(*(steps for steps, _ in by_rank), strict=True))
    first_epochs = sorted(itertools.chain(*itertools.chain(*steps[:10])))
    assert first_epochs == sorted([3 * x for x in range(20)] * 2)


def keeps_batches():
    communicator = collectives.current()
    tf.random.set_seed(13)

    def make():  # twice: the epochs of one shuffle count on
        numbers = tf.data.Dataset.range(21).shuffle(21, seed=1)
        return numbers.map(lambda x: x + 1).batch(8)

    return _read(distribution.shard(make(), communicator)), _read(make())


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_maps_before_batches_keep_what_comes_together(cluster, engine):
    by_rank = cluster(engine, 2).run(keeps_batches)
    for epoch in range(2):
        for step, whole in enumerate(by_rank[0][1][epoch]):
            parts = [result[0][epoch][step] for result in by_rank]
            assert sorted(itertools.chain(*parts)) == sorted(whole)
            assert abs(len(parts[0]) - len(parts[1])) <= 1


def recognises():
    communicator = collectives.current()
    dataset = tf.data.Dataset.range(8).map(lambda x: x).batch(4)
    part = distribution.shard(dataset, communicator)
    later = part.map(lambda x: x + 1).prefetch(2)
    again = distribution.distribute(later, communicator)
    unknown = distribution.shard(
        tf.data.Dataset.range(8)
        .filter(lambda x: x > 1)
        .map(lambda x: x)
        .batch(4),
        communicator,
    )
    try:
        distribution.distribute(unknown.prefetch(1), communicator)
    except ValueError as error:
        message = str(error)
    return (
        distribution.is_sharded(dataset),
        distribution.is_sharded(later),
        again is later,
        distribution.shard(later, communicator) is later,
        message,
    )


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_shard_is_not_split_again(cluster, engine):
    for *facts, message in cluster(engine, 2).run(recognises):
        assert facts == [False, True, True, True]
        assert "prefetches itself" in message


def asks_for(by, kind):
    communicator = collectives.current()
    dataset = {
        "generator": lambda _: (
            tf.data.Dataset.from_generator(
                lambda: iter(range(8)),
                output_signature=tf.TensorSpec([], tf.int32),
            )
            .map(lambda x: x + 1)
            .batch(8)
        ),
        "padded": _padded,
        "arrays": _of_arrays,
    }[kind](None)
    try:
        distribution.shard(dataset, communicator, by=by)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_impossible_splits_say_why(cluster, engine):
    run = cluster(engine, 2).run
    assert "Python" in run(asks_for, "elements", "generator")[1]
    assert "longest" in run(asks_for, "elements", "padded")[1]
    assert "list of files" in run(asks_for, "files", "arrays")[1]
    assert "`by` must be" in run(asks_for, "rows", "arrays")[1]


@pytest.mark.parametrize("kind", _structures())
def test_ranks_that_have_ended_get_batches_without_rows(kind):
    batch = _structures()[kind]
    part = tf.data.Dataset.from_tensors(batch)
    # What the pipeline does not know of the shapes must be found from data.
    part = tf.data.Dataset.from_tensors(0).flat_map(lambda _: part)
    steps = with_equal_steps(part, 3, None)
    assert steps.cardinality() == 3
    first, *rest = steps
    assert _listed(first) == _listed(next(iter(part)))
    for step in rest:
        for empty, leaf in zip(
            tf.nest.flatten(step), tf.nest.flatten(first), strict=True
        ):
            if hasattr(leaf, "shape"):
                assert empty.shape[0] == 0
                assert empty.shape[1:] == leaf.shape[1:]


class _Counted:
    """Counts the messages of a rank whose `fit` stops before its input ends."""

    is_server = False

    def __init__(self):
        self.num_sent = 0

    def all_reduce(self, tensors, op, name):
        def note(is_left):
            self.num_sent += 1
            return is_left

        sent = tf.numpy_function(note, tensors, tf.int32)
        return [tf.ensure_shape(sent, [])]


def test_nothing_is_read_ahead_of_messages():
    """Not by steps that TensorFlow adds or makes parallel, either."""
    part = tf.data.Dataset.range(100).batch(2)
    for end in (
        lambda ranks: with_equal_steps(
            part, tf.data.UNKNOWN_CARDINALITY, ranks
        ),
        lambda ranks: ending_together(part, ranks),
    ):
        ranks = _Counted()
        iterator = iter(end(ranks))
        assert [next(iterator).numpy().tolist() for _ in range(2)] == [
            [0, 1],
            [2, 3],
        ]
        time.sleep(0.3)  # what reads ahead would have sent more by now
        assert ranks.num_sent == 2


def test_shapes_unknown_beforehand_are_kept():
    part = (
        tf.data.Dataset.from_tensors("1,2,3")
        .map(lambda line: tf.strings.to_number(tf.strings.split(line, ",")))
        .batch(1)
    )
    assert part.element_spec.shape.as_list() == [None, None]
    steps = list(with_equal_steps(part, 2, None))
    assert [tuple(step.shape) for step in steps] == [(1, 3), (0, 3)]


# Input that differs.


def differing(kind):
    communicator = collectives.current()
    rng = np.random.default_rng(7 if kind == "same" else communicator.rank)

    def generate():
        for step in range(6):
            x = rng.integers(0, 100, 8)
            if kind == "late" and step < 4:
                x = np.arange(8)
            yield x

    dataset = tf.data.Dataset.from_generator(
        generate, output_signature=tf.TensorSpec([None], tf.int64)
    )
    if kind == "length":
        dataset = tf.data.Dataset.range(8 + communicator.rank).batch(1)
    try:
        part = distribution.distribute(dataset, communicator)
        steps = [_listed(batch)[0] for batch in part]
        fingerprints.check_inputs(communicator)
    except ValueError as error:
        return str(error)
    return len(steps)


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_differing_input_is_named_on_every_rank(cluster, engine):
    run = cluster(engine, 2).run
    assert run(differing, "same") == [6, 6]
    for message in run(differing, "at once"):
        assert "batch 0 " in message
        assert "rank 1: " in message
        assert "default_rng" in message
    for message in run(differing, "late"):
        assert "batch 4 " in message
    for message in run(differing, "length"):
        assert "'number of batches': 9" in message


def orders():
    """The orders in which Keras draws, with the ranks' common seed."""
    from keras.src.trainers.data_adapters import (
        array_data_adapter,
        py_dataset_adapter,
    )

    class Numbers(keras.utils.PyDataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return (np.array([index]),)

    keras.utils.set_random_seed(21)
    shuffled = tf.data.Dataset.range(12).shuffle(12).batch(4)
    datasets = {
        "array": array_data_adapter.ArrayDataAdapter(
            np.arange(12), batch_size=4, shuffle=True
        ).get_tf_dataset(),
        "tf.data": shuffled,
        "PyDataset": py_dataset_adapter.PyDatasetAdapter(
            Numbers(), shuffle=True
        ).get_tf_dataset(),
    }
    return {
        kind: [list(itertools.chain(*epoch)) for epoch in _read(dataset)]
        for kind, dataset in datasets.items()
    }


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_a_common_seed_gives_common_orders(cluster, engine):
    first, second = cluster(engine, 2).run(orders)
    assert first == second
    for kind in ("tf.data", "PyDataset"):
        assert first[kind][0] != first[kind][1]
    # TensorFlow restarts seeded operations in maps with each iteration:
    # stock Keras repeats the order of arrays in every epoch then.
    assert first["array"][0] == first["array"][1]


# Fingerprints.


@pytest.mark.parametrize(
    "other",
    [
        np.array([[0.0, 2.0], [1.0, 3.0]], "float32"),
        np.array([[1.0, 0.0], [2.0, 3.0]], "float32"),
        np.array([[0.0, 1.0, 2.0, 3.0]], "float32"),
        np.array([[0, 1], [2, 3]]),
        np.array([["0", "1"], ["2", "3"]]),
    ],
    ids=["values", "order", "shape", "dtype", "strings"],
)
def test_fingerprints_tell_apart(other):
    one = fingerprints.fingerprint(
        np.array([[0.0, 1.0], [2.0, 3.0]], "float32")
    )
    assert int(one) != int(fingerprints.fingerprint(other))


def test_fingerprints_of_large_batches_see_an_exchange():
    x = np.random.default_rng(0).random((64, 50_000), dtype="float32")
    one = fingerprints.fingerprint(x)
    x[[3, 4]] = x[[4, 3]]
    assert int(one) != int(fingerprints.fingerprint(x))
