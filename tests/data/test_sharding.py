"""Input that is split before it is read, by real processes."""

import collections
import itertools
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity.data import distribution, marks, sharding
from keras_sparsity.data.dataset_graph import CannotSplit, DatasetGraph
from tests.conftest import engines, engines_and_sizes
from tests.data.batch_structures import listed, read


@pytest.mark.parametrize(
    ("engine", "num_processes"), engines_and_sizes("native")
)
def test_every_example_is_read_once(cluster, engine, num_processes, tmp_path):
    cases = [
        (source, by)
        for source in SOURCES
        for by in (None, "batches")
        if not (by and source in ("files", "few_files", *UNKNOWN))
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
        mixes = case[1] is None and case[0] in ("files", "shuffled_maps")
        mixed_by = wanted if mixes and num_processes > 1 else None
        assert {result["reordered"] for result in results} == {mixed_by}, case
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


def _lines(directory, num_files):
    lines = tf.data.TextLineDataset(_text_files(directory, num_files))
    return lines.map(lambda line: tf.strings.join([line, "!"]))


def _of_files(directory):
    return _lines(directory, 4).shuffle(7).batch(8)


def _of_few_files(directory):
    return _lines(directory, 3).batch(8)


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


def _dropped_of_unknown(directory):
    """Of 15 elements the first rank has more than the others."""
    return (
        tf.data.Dataset.range(16)
        .filter(lambda x: x > 0)
        .map(lambda x: x)
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
    "dropped_of_unknown": (_dropped_of_unknown, "elements"),
    "generator": (_of_a_generator, "batches"),
}
UNKNOWN = "filtered", "dropped_of_unknown"


def read_sources(cases, directory):
    communicator = collectives.current()
    results = []
    for source, by in cases:
        tf.random.set_seed(11)
        dataset = SOURCES[source][0](directory)
        expected = read(dataset, epochs=1)[0]
        how = "batches"
        if by is None:
            try:
                graph = DatasetGraph(dataset)
                how = graph.best_split(communicator.size).by
            except CannotSplit:
                pass
        part = sharding.shard(dataset, communicator, by=by)
        reordered = marks.reordered_by(part.prefetch(1))
        results.append(
            {"expected": expected, "how": how, "epochs": read(part)}
            | {"reordered": reordered}
        )
    return results


def read_endless():
    communicator = collectives.current()
    tf.random.set_seed(12)
    dataset = tf.data.Dataset.range(20).map(lambda x: x * 3).repeat().batch(4)
    part = sharding.shard(dataset, communicator)
    return [listed(batch)[0] for batch in part.take(12)], int(
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

    return read(sharding.shard(make(), communicator)), read(make())


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_maps_before_batches_keep_what_comes_together(cluster, engine):
    by_rank = cluster(engine, 2).run(keeps_batches)
    for epoch in range(2):
        for step, whole in enumerate(by_rank[0][1][epoch]):
            parts = [result[0][epoch][step] for result in by_rank]
            assert sorted(itertools.chain(*parts)) == sorted(whole)
            assert abs(len(parts[0]) - len(parts[1])) <= 1


def in_an_order_that_varies():
    options = tf.data.Options()
    options.deterministic = False
    dataset = tf.data.Dataset.range(8).with_options(options)
    dataset = dataset.map(lambda x: x).batch(4)
    part = sharding.shard(dataset, collectives.current())
    return dataset.options().deterministic, part.options().deterministic


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_elements_are_dealt_out_in_one_order(cluster, engine):
    """Whatever the options say: each rank reads all, and keeps its own."""
    found = cluster(engine, 2).run(in_an_order_that_varies)
    assert found == [(False, True)] * 2


def recognises():
    communicator = collectives.current()
    dataset = tf.data.Dataset.range(8).map(lambda x: x).batch(4)
    part = sharding.shard(dataset, communicator)
    later = part.map(lambda x: x + 1).prefetch(2)
    again = distribution.distribute(later, communicator)
    unknown = sharding.shard(
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
        marks.is_sharded(dataset),
        marks.is_sharded(later),
        again is later,
        sharding.shard(later, communicator) is later,
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
        sharding.shard(dataset, communicator, by=by)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_impossible_splits_say_why(cluster, engine):
    run = cluster(engine, 2).run
    assert "Python" in run(asks_for, "elements", "generator")[1]
    assert "longest" in run(asks_for, "elements", "padded")[1]
    assert "list of files" in run(asks_for, "files", "arrays")[1]
    assert "`by` must be" in run(asks_for, "rows", "arrays")[1]
