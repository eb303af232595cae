"""What each rank reads."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity import collectives
from keras_sparsity.data import distribution, fingerprints
from keras_sparsity.data.batches import split_batch
from tests.conftest import engines
from tests.data.batch_structures import listed, read, structures

# Cutting batches, in one process.


def _joined(parts):
    """Rows of all parts, in order."""
    return [
        None if leaves[0] is None else list(itertools.chain(*leaves))
        for leaves in zip(*map(listed, parts), strict=True)
    ]


@pytest.mark.parametrize("kind", structures())
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_parts_of_a_batch_are_the_batch(kind, size):
    batch = structures()[kind]
    parts = [split_batch(batch, rank, size) for rank in range(size)]
    assert _joined(parts) == listed(batch)
    rows = [len(listed(part)[0]) for part in parts]
    assert max(rows) - min(rows) <= 1


@pytest.mark.parametrize("kind", structures())
@pytest.mark.parametrize("size", [2, 3, 8])
def test_parts_of_a_dataset_are_the_dataset(kind, size):
    batches = tf.data.Dataset.from_tensors(structures()[kind]).repeat(2)
    parts = [
        distribution.split_batches(batches, rank, size) for rank in range(size)
    ]
    for whole, *each in zip(batches, *parts, strict=True):
        assert _joined(each) == listed(whole)
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
    assert [listed(list(p)) for p in parts] == [
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


# By real processes: input that differs.


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
        steps = [listed(batch)[0] for batch in part]
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
        kind: [list(itertools.chain(*epoch)) for epoch in read(dataset)]
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


# Of two ranks, whose parts have unequally many batches: the examples of each
# step.
UNEVEN = {
    "own": [[0, 2, 1, 3], [4, 6, 5, 7], [8]],
    "own, filtered": [[0, 2, 1, 3], [4, 6, 5, 7], [8]],
    "batched anew": [[0, 1], [3, 2], [6, 4], [5], [7], [8]],
}


def losses_of_uneven_parts(kind):
    keras.utils.set_random_seed(0)
    strategy = ks.HybridStrategy()
    x = np.random.default_rng(0).normal(size=(9, 3)).astype("float32")
    examples = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))

    def own_part(context):
        part = examples.shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        if "filtered" in kind:
            part = part.filter(lambda x, y: True)
        return part.batch(2)

    if strategy.size == 1:
        dataset = tf.data.Dataset.from_tensor_slices(
            tf.ragged.constant(UNEVEN[kind])
        ).map(lambda rows: (tf.gather(x, rows), tf.gather(x[:, :1], rows)))
    elif kind == "batched anew":
        dataset = strategy.shard(examples.batch(3)).unbatch().batch(1)
    else:
        dataset = strategy.distribute_datasets_from_function(own_part)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with strategy.scope():
        model.compile("sgd", "mse")
    options = {"validation_data": dataset, "shuffle": False, "verbose": 0}
    history = model.fit(dataset, epochs=2, **options)
    return list(history.history.values())


@pytest.mark.parametrize("kind", UNEVEN)
def test_parts_of_unequally_many_batches_end_together(cluster, kind):
    expected = losses_of_uneven_parts(kind)
    for found in cluster("native", 2).run(losses_of_uneven_parts, kind):
        np.testing.assert_allclose(found, expected, 1e-5)
