"""PartitionSearch in `fit`: it changes how fast a model trains, and no more."""

import contextlib
import dataclasses
import functools
import io
import itertools
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.callbacks import partition_search, step_seconds
from tests import oracles
from tests.conftest import engines

ROWS, DIM, BATCH, NUM_BATCHES = 26, 4, 8, 8
FIRST_PARTITIONS = 3
ON_NATIVE = pytest.mark.parametrize("engine", engines(usually="native"))
ON_HOROVOD = pytest.mark.parametrize("engine", engines(usually="horovod"))


# A model and its training.


class TakesTime(keras.layers.Layer):
    """Waits as long as a function of a table's number of partitions says.

    That gives seconds, or a function that gives those of a step.
    """

    def __init__(self, embedding, seconds, sleep):
        super().__init__()
        self._embedding = [lambda: embedding]  # not a layer of this one
        self._seconds, self._sleep = seconds, sleep

    def call(self, inputs):
        table = self._embedding[0]().table
        if not table.is_sharded:
            return inputs
        seconds = self._seconds(table.layout.num_partitions)

        def wait(values):
            self._sleep(seconds() if callable(seconds) else seconds)
            return values

        # The same bits in another tensor.
        waited = tf.numpy_function(wait, [inputs], tf.float32)
        waited = tf.ensure_shape(waited, inputs.shape)
        return inputs + tf.stop_gradient(waited - inputs)


def built(
    seconds=None,
    groups=(None,),
    optimizer="adam",
    sleep=time.sleep,
    **compile_options,
):
    """A model with a table for each group, at least one."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), dtype="int32")
    layers = [
        ks.layers.ShardedEmbedding(
            ROWS,
            DIM,
            name=f"words_{index}",
            partition_group=group,
            num_partitions=FIRST_PARTITIONS,
        )
        for index, group in enumerate(groups)
    ]
    x = keras.layers.add([layer(inputs) for layer in layers] * 2)
    x = keras.layers.GlobalAveragePooling1D()(x)
    if seconds is not None:
        x = TakesTime(layers[0], seconds, sleep)(x)
    return compiled(
        keras.Model(inputs, keras.layers.Dense(1)(x)),
        optimizer,
        **compile_options,
    )


def without_tables():
    return compiled(
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), "sgd"
    )


def compiled(model, optimizer, **options):
    with ks.HybridStrategy(architecture="hybrid").scope():
        model.compile(optimizer, loss="mse", **options)
    return model


def examples(num_batches):
    rng = np.random.default_rng(2)
    x = oracles.zipf_ids(rng, ROWS, (num_batches * BATCH, 3))
    return x, rng.normal(size=(len(x), 1)).astype("float32")


def trained(model, *callbacks, epochs=4, **options):
    """Losses, weights and slots, of a `fit`."""
    x, y = examples(NUM_BATCHES)
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=list(callbacks),
        **options,
    )
    return {
        "history": history.history,
        "weights": model.get_weights(),
        "slots": model.optimizer.state(),
    }


def assert_same(left, right):
    """To the bit."""
    assert left["history"] == right["history"]
    for kind in ("weights", "slots"):
        for ours, theirs in zip(left[kind], right[kind], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def partitions_of(model):
    return [
        layer.table.layout.num_partitions
        for layer in model.layers
        if isinstance(layer, ks.layers.ShardedEmbedding)
    ]


def search(**options):
    """A search of short samples."""
    options = {"num_steps": 3, "num_warm_up_steps": 0, **options}
    return ks.callbacks.PartitionSearch(**options)


def sampled(choice):
    return [sample.num_partitions for sample in choice.samples]


@contextlib.contextmanager
def printed():
    """The lines that are printed meanwhile, in a list."""
    lines, output = [], io.StringIO()
    with contextlib.redirect_stdout(output):
        yield lines
    lines += output.getvalue().splitlines()


# A search with a file, the next run, and a run under other conditions.


def least_at_4(count):
    return 0.01 + 0.03 * abs(np.log2(count / 4))


def run_search(path):
    validation = {"validation_data": examples(2), "validation_freq": 2}
    undisturbed = trained(built(least_at_4, optimizer="adagrad"), **validation)
    model, callback = built(least_at_4, optimizer="adagrad"), search(path=path)
    with printed() as lines:
        searched = trained(model, callback, **validation)
    again, next_callback = built(optimizer="adagrad"), search(path=path)
    with printed() as next_lines:
        trained(again, next_callback, epochs=1)
    other, other_callback = built(run_eagerly=True), search(path=path)
    with printed() as other_lines:
        trained(other, other_callback, epochs=1, steps_per_epoch=1)
    return {
        "undisturbed": undisturbed,
        "searched": searched,
        "partitions": partitions_of(model),
        "choices": callback.result,
        "lines": lines,
        "next partitions": partitions_of(again),
        "next choices": next_callback.result,
        "next lines": next_lines,
        "other partitions": partitions_of(other),
        "other choices": other_callback.result,
        "other lines": other_lines,
    }


@pytest.fixture(scope="session")
def searches(cluster, tmp_path_factory):
    """`searches(engine)` gives each rank's results of `run_search`."""

    @functools.cache
    def searches(engine):
        folder = tmp_path_factory.mktemp(engine) / "a folder"
        return cluster(engine, 2).run(run_search, str(folder / "search.json"))

    return searches


@ON_NATIVE
def test_a_search_leaves_training_as_it_is(searches, engine):
    for of_rank in searches(engine):
        assert_same(of_rank["undisturbed"], of_rank["searched"])


@ON_NATIVE
def test_samples_are_the_samplers_and_no_faster_than_steps(searches, engine):
    (choice,) = searches(engine)[0]["choices"].values()
    for sample in choice.samples:
        assert sample.seconds >= least_at_4(sample.num_partitions)
    # Whatever else the machine did meanwhile, this follows from the samples.
    sampler = ks.planning.PartitionSampler(
        size=2,
        allowed=lambda count: count <= ROWS,  # more would be empty
    )
    for sample in choice.samples:
        assert sampler.proposal() == sample.num_partitions
        sampler.record(**dataclasses.asdict(sample))
    assert sampler.proposal() is None
    assert choice.num_partitions == sampler.choice().num_partitions


@ON_NATIVE
def test_all_ranks_take_the_choice_and_the_next_run_too(searches, engine):
    results = searches(engine)
    (name, choice), *others = results[0]["choices"].items()
    assert (name, others) == ("tables", [])
    for of_rank in results:
        for run in ("", "next "):
            assert of_rank[f"{run}choices"] == {name: choice}
            assert of_rank[f"{run}partitions"] == [choice.num_partitions]


@ON_NATIVE
def test_a_fit_that_is_too_short_leaves_tables_as_they_are(searches, engine):
    for of_rank in searches(engine):
        assert of_rank["other choices"] == {}
        assert of_rank["other partitions"] == [FIRST_PARTITIONS]


@ON_NATIVE
def test_rank_0_prints_each_sample_and_the_choice(searches, engine):
    first, *others = searches(engine)
    (choice,) = first["choices"].values()
    lines = first["lines"]
    assert "search.json is not taken: there is no such file yet" in lines[0]
    assert "1 partitions for 'tables': " in lines[1]
    assert len(lines) == 1 + len(choice.samples) + 1
    assert f"'tables' gets {choice.explained()}" in lines[-1]
    (line,) = first["next lines"]
    count = choice.num_partitions
    assert f"{count} partitions for 'tables', as found before (in " in line
    refused, ended, stays = first["other lines"]
    assert "optimizer was Adagrad, exact and is Adam, exact" in refused
    assert "training ended before the search did" in ended
    assert "'tables' stays as it was" in stays
    for of_rank in others:
        for run in ("lines", "next lines", "other lines"):
            assert of_rank[run] == []


# Seconds of a step.

STEP_SECONDS = 0.1


class Clock:
    """In place of `time`: what is measured by it has no noise."""

    def __init__(self):
        self._now = 0.0

    def perf_counter(self):
        return self._now

    monotonic = perf_counter

    def sleep(self, seconds):
        self._now += seconds


class InTheWay(keras.callbacks.Callback):
    """Spends time around each step, as users' callbacks do."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def on_train_batch_begin(self, batch, logs=None):
        self._clock.sleep(3 * STEP_SECONDS)

    on_train_batch_end = on_train_batch_begin


def time_steps():
    """One sample: of steps that take longer on rank 1, two at a time."""
    is_slow, clock = ks.collectives.current().rank == 1, Clock()
    model = built(
        lambda count: STEP_SECONDS if is_slow else STEP_SECONDS / 10,
        optimizer="sgd",
        sleep=clock.sleep,
        steps_per_execution=2,
    )
    callback = search(start=FIRST_PARTITIONS, num_steps=6)
    with (
        mock.patch.object(partition_search, "time", clock),
        mock.patch.object(step_seconds, "time", clock),
    ):
        trained(model, callback, InTheWay(clock), epochs=1)
    return callback.result["tables"], partitions_of(model)


@ON_HOROVOD
def test_seconds_are_those_of_the_slowest_ranks_steps(cluster, engine):
    results = cluster(engine, 2).run(time_steps)
    for choice, partitions in results:
        assert choice == results[0][0]
        (sample,) = choice.samples
        assert sample.num_partitions == FIRST_PARTITIONS
        # Of one step, without what callbacks do.
        assert sample.seconds == pytest.approx(STEP_SECONDS)
        assert partitions == [FIRST_PARTITIONS]


def time_updates():
    """One sample, of steps of which each fourth is slow, as updates are.

    And the lines of a search whose time ends within such a cycle.
    """
    seconds = itertools.cycle([0.0, 0.0, 0.0, 4 * STEP_SECONDS])
    model = built(
        lambda count: seconds.__next__,
        optimizer=keras.optimizers.SGD(gradient_accumulation_steps=4),
    )
    callback = search(start=FIRST_PARTITIONS, num_steps=12)
    trained(model, callback, epochs=2)
    short = search(start=FIRST_PARTITIONS, max_seconds=3 * STEP_SECONDS)
    with printed() as lines:
        trained(model, short, epochs=1)
    return callback.result["tables"].samples[0], lines


@ON_HOROVOD
def test_accumulating_steps_count_with_their_update(cluster, engine):
    (first, lines), (other, _) = cluster(engine, 2).run(time_updates)
    assert first == other
    assert first.seconds >= STEP_SECONDS
    assert "seconds ended before the search did" in lines[0]
    assert "'tables' stays as it was" in lines[1]


# Two groups of tables, a limit of memory and interruptions, run eagerly:
# tracing takes longest.

# Of the 26 rows of each of two tables one process may have 18, with Adagrad's
# slots.
LIMIT = 2 * 18 * DIM * 4 * 2


class Interruption(Exception):
    pass


class InterruptAfter(keras.callbacks.Callback):
    """Ends a training in the middle, on every rank."""

    def __init__(self, num_steps):
        super().__init__()
        self._left = num_steps

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if not self._left:
            raise Interruption


class Watch(keras.callbacks.Callback):
    """What each step finds: partitions, and bytes of tables and slots."""

    def __init__(self):
        super().__init__()
        self.partitions, self.num_bytes = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.partitions.append(tuple(partitions_of(self.model)))
        pieces = [
            piece
            for table, pieces in self.model.optimizer.places()
            for piece in (pieces if table is not None else [])
        ]
        for layer in self.model.layers:
            if isinstance(layer, ks.layers.ShardedEmbedding):
                pieces += layer.table.partitions
        self.num_bytes.append(sum(4 * int(np.prod(p.shape)) for p in pieces))


def eager():
    return built(groups=("a", None), optimizer="adagrad", run_eagerly=True)


def run_eager(folder):
    """A search over two calls of `fit`, and an interrupted, resumed one."""
    plain = eager()
    undisturbed = [trained(plain, epochs=1), trained(plain, epochs=3)]

    model, watch = eager(), Watch()
    callback = search(memory_limit_bytes=LIMIT)
    searched = [trained(model, callback, watch, epochs=1)]
    first_result = {**callback.result}
    searched += [trained(model, callback, watch, epochs=3)]

    checkpoint = ks.callbacks.ShardedCheckpoint(folder, every_steps=3)
    with contextlib.suppress(Interruption):
        trained(eager(), search(), checkpoint, InterruptAfter(5), epochs=1)
    checkpoint = ks.callbacks.ShardedCheckpoint(folder)
    resumed_watch = Watch()
    resumed = trained(eager(), search(), checkpoint, resumed_watch, epochs=1)
    return {
        "undisturbed": undisturbed,
        "searched": searched,
        "first result": first_result,
        "result": callback.result,
        "num_bytes": watch.num_bytes,
        "tried": watch.partitions,
        "partitions": partitions_of(model),
        "resumed": resumed,
        "resumed steps": len(resumed_watch.partitions),
    }


@pytest.fixture(scope="session")
def eager_searches(cluster, tmp_path_factory):
    """`eager_searches(engine)` gives each rank's results of `run_eager`."""

    @functools.cache
    def eager_searches(engine):
        folder = tmp_path_factory.mktemp(engine)
        return cluster(engine, 2).run(run_eager, str(folder))

    return eager_searches


@ON_HOROVOD
def test_a_search_of_two_fits_leaves_both_as_they_are(eager_searches, engine):
    for of_rank in eager_searches(engine):
        for left, right in zip(
            of_rank["undisturbed"], of_rank["searched"], strict=True
        ):
            assert_same(left, right)


@ON_HOROVOD
def test_an_interrupted_search_resumes_with_the_training(
    eager_searches, engine
):
    for of_rank in eager_searches(engine):
        assert of_rank["resumed steps"] == NUM_BATCHES - 3
        assert_same(of_rank["undisturbed"][0], of_rank["resumed"])


@ON_HOROVOD
def test_the_second_fit_continues_the_search(eager_searches, engine):
    for of_rank in eager_searches(engine):
        first = of_rank["first result"]["a"].samples
        assert of_rank["result"]["a"].samples[: len(first)] == first


@ON_HOROVOD
def test_no_step_exceeds_the_memory_limit(eager_searches, engine):
    for of_rank in eager_searches(engine):
        assert max(of_rank["num_bytes"]) <= LIMIT
        for choice in of_rank["result"].values():
            # One partition would be too much for its owner.
            assert choice.samples[0].num_partitions == 2
            assert 1 not in sampled(choice)


@ON_HOROVOD
def test_groups_are_searched_one_after_the_other(eager_searches, engine):
    results = eager_searches(engine)
    for of_rank in results:
        choices, tried = of_rank["result"], of_rank["tried"]
        assert choices == results[0]["result"]
        assert list(choices) == ["a", "tables"]
        counts = [choice.num_partitions for choice in choices.values()]
        assert of_rank["partitions"] == counts
        begin = next(i for i, p in enumerate(tried) if p[1] != FIRST_PARTITIONS)
        assert {p[0] for p in tried[:begin]} >= set(sampled(choices["a"]))
        assert {p[0] for p in tried[begin:]} == {counts[0]}


def search_for_two_optimizers():
    """Choices of a search's first `fit`, and of the next by another rule."""
    model, callback = eager(), search()
    trained(model, callback, epochs=1)
    first = {**callback.result}
    trained(compiled(model, "adam", run_eagerly=True), callback, epochs=1)
    return first, callback.result


@ON_NATIVE
def test_another_optimizer_begins_a_search_anew(cluster, engine):
    for first, second in cluster(engine, 2).run(search_for_two_optimizers):
        # Eight steps are two samples.
        assert sampled(first["a"]) == sampled(second["a"]) == [1, 2]
        assert first["a"].samples != second["a"].samples


# Four processes on two machines: a search starts with two partitions.


class TimeIsOver(keras.callbacks.Callback):
    """Leaves a search no time once there are so many samples."""

    def __init__(self, search, num_samples):
        super().__init__()
        self._search, self._num_samples = search, num_samples

    def on_train_batch_end(self, batch, logs=None):
        sampler = self._search._groups[0].sampler
        if len(sampler.samples) == self._num_samples:
            self._search.max_seconds = 1e-6


def search_on_machines(kind):
    """Training with one kind of search."""
    callback, callbacks, options = search(), [], {}
    if kind == "per table":
        callback = search(per_table=True)
    elif kind == "no time":
        callback = search(max_seconds=1e-6)
        options = {"steps_per_epoch": 1}
    elif kind == "time of one sample":
        callbacks = [TimeIsOver(callback, 1)]
    model = eager()
    with printed() as lines:
        searched = trained(model, *callbacks, callback, epochs=1, **options)
    return searched, callback.result, partitions_of(model), lines


def train_undisturbed():
    return trained(eager(), epochs=1)


@pytest.mark.all_cells
def test_a_search_per_table_on_machines(cluster):
    processes = cluster("native", 4, machines=2)
    undisturbed = processes.run(train_undisturbed)
    results = processes.run(search_on_machines, "per table")
    for expected, (searched, choices, partitions, _) in zip(
        undisturbed, results, strict=True
    ):
        assert_same(expected, searched)
        assert choices == results[0][1]
        # Eight steps are two samples.
        assert list(choices) == ["a"]
        assert sampled(choices["a"]) == [2, 4]
        assert partitions == [choices["a"].num_partitions, FIRST_PARTITIONS]


@pytest.mark.all_cells
def test_a_search_without_time_leaves_tables_as_they_are(cluster):
    processes = cluster("native", 4, machines=2)
    results = processes.run(search_on_machines, "no time")
    for rank, (_, choices, partitions, lines) in enumerate(results):
        assert choices == {}
        assert partitions == [FIRST_PARTITIONS] * 2
        if rank == 0:
            assert "1e-06 seconds ended before the search did" in lines[0]
            assert "'a' stays as it was" in lines[1]
        else:
            assert lines == []


@pytest.mark.all_cells
def test_a_search_whose_time_ends_keeps_the_best_so_far(cluster):
    processes = cluster("native", 4, machines=2)
    undisturbed = processes.run(train_undisturbed)
    results = processes.run(search_on_machines, "time of one sample")
    for expected, (searched, choices, partitions, _) in zip(
        undisturbed, results, strict=True
    ):
        assert_same(expected, searched)
        # The first sample, of two partitions, and what came while the second
        # one ended.
        assert list(choices) == ["a"]
        assert sampled(choices["a"])[0] == 2
        assert len(choices["a"].samples) <= 2
        assert partitions == [choices["a"].num_partitions, FIRST_PARTITIONS]
    lines = results[0][-1]
    assert any("seconds ended before the search" in line for line in lines)
    assert "'tables' stays as it was" in lines[-1]


# Nothing to search.


def search_nothing(make):
    callback = search()
    with printed() as lines:
        trained(make(), callback, epochs=1)
    return lines, callback.result


def test_nothing_to_search_in_one_process():
    line = (
        "PartitionSearch: nothing to search, the model trains in one process."
    )
    assert search_nothing(built) == ([line], {})


def test_nothing_to_search_without_tables(cluster):
    line = "PartitionSearch: nothing to search, the model has no sharded table."
    results = cluster("native", 2).run(search_nothing, without_tables)
    assert results == [([line], {}), ([], {})]


def test_nothing_to_search_without_a_strategy(capsys):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0, callbacks=[search()])
    assert "not compiled in `strategy.scope()`" in capsys.readouterr().out


def test_one_search_at_a_time():
    with pytest.raises(ValueError, match="Give `fit` one PartitionSearch"):
        trained(built(), search(), search())
