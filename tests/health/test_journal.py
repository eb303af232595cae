"""The journal knows which calls are open, and costs a traced function no
Python."""

import gc

import pytest
import tensorflow as tf

from keras_sparsity.health.journal import Journal


def noted(journal, x, name, collective=tf.identity):
    site = journal.site(
        "all_reduce", name, x.dtype.name, tuple(x.shape), dynamic=True
    )
    return journal.run(site, [x], lambda: collective(x))


def fail(x):
    with tf.control_dependencies([tf.debugging.Assert(False, ["broken"])]):
        return tf.identity(x)


def names(sites):
    return [site.call.name for site in sites]


def test_eager_calls_are_counted():
    journal = Journal()
    for _ in range(3):
        noted(journal, tf.ones([2]), "a")
    (site,) = journal.sites()
    assert site.counts() == (3, 3)
    assert not journal.open_sites()


def test_traced_calls_are_counted_each_time_they_run():
    journal = Journal()

    @tf.function
    def step(x):
        for _ in tf.range(5):
            x = noted(journal, x, "loop")
        return noted(journal, x, "after")

    step(tf.ones([2]))
    step(tf.ones([2]))
    counts = {site.call.name: site.counts() for site in journal.sites()}
    assert counts == {"loop": (10, 10), "after": (2, 2)}


def test_a_call_whose_result_nobody_uses_is_left():
    journal = Journal()

    @tf.function
    def step(x):
        noted(journal, x, "a")
        return x

    step(tf.ones([2]))
    assert [site.counts() for site in journal.sites()] == [(1, 1)]


@pytest.mark.parametrize("run", [lambda f: f, tf.function])
def test_a_call_that_fails_stays_open_until_forgotten(run):
    journal = Journal()
    step = run(lambda x: noted(journal, x, "a", fail))
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.ones([2]))
    assert names(journal.open_sites()) == ["a"]
    (call,) = journal.forget_open()
    assert call.name == "a"
    assert not journal.open_sites()


def test_sites_of_a_deleted_function_are_dropped():
    journal = Journal()
    step = tf.function(lambda x: noted(journal, x, "a"))
    step(tf.ones([2]))
    assert len(journal.sites()) == 1
    del step
    gc.collect()
    assert not journal.sites()


def test_counts_are_of_all_functions_also_of_those_that_are_gone():
    journal = Journal()
    for length in (2, 3):
        step = tf.function(lambda x: noted(journal, x, "a"))
        for _ in range(length):
            step(tf.ones([length]))
        (call,) = {site.call for site in journal.sites()}
        del step
        gc.collect()
        assert not journal.sites()
    noted(journal, tf.ones([4]), "b")
    assert journal.counts([call]) == [(5, 5)]


def test_a_call_that_failed_is_over_once_it_begins_again():
    journal = Journal()
    noted(journal, tf.ones([2]), "a")
    with pytest.raises(ZeroDivisionError):
        noted(journal, tf.ones([2]), "a", lambda x: 1 / 0)
    (call,) = (site.call for site in journal.sites())
    for _ in range(2):
        assert journal.counts([call]) == [(2, 1)]
        journal.forget_open()
    assert journal.has_failed()
    noted(journal, tf.ones([2]), "a")
    assert journal.counts([call]) == [(3, 3)]
    assert not journal.has_failed()


def test_failed_calls_of_functions_that_are_gone_have_not_ended():
    journal = Journal()
    for _ in range(2):
        step = tf.function(lambda x: noted(journal, x, "a", fail))
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(tf.ones([2]))
        (site,) = journal.open_sites()
        call = site.call
        journal.forget_open()
        del step, site
        gc.collect()
    assert not journal.sites()
    # The first failure is over since the second call began.
    assert journal.counts([call]) == [(2, 1)]


def test_shapes_known_at_run_time_only_are_recorded():
    journal = Journal()

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(x):
        return noted(journal, x, "a", fail)

    for rows in (3, 5):
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(tf.ones([rows, 2]))
        (site,) = journal.open_sites()
        assert site.current_call().shape == (rows, 2)


def test_a_shape_is_unknown_until_the_call_has_run():
    journal = Journal()

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(x):
        return noted(journal, x, "a")

    step.get_concrete_function()
    (site,) = journal.sites()
    assert site.current_call().shape == (None, 2)
    step(tf.ones([3, 2]))
    assert site.current_call().shape == (3, 2)


def test_upcoming_calls_are_those_of_the_same_function_not_yet_run():
    journal = Journal()

    @tf.function
    def step(x):
        x = noted(journal, x, "first")
        x = noted(journal, x, "second", fail)
        return noted(journal, x, "third")

    @tf.function
    def other(x):
        return noted(journal, x, "other")

    other.get_concrete_function(tf.ones([2]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.ones([2]))
    upcoming = journal.upcoming(journal.open_sites())
    assert [call.name for call in upcoming] == ["third"]


def test_moves_are_noticed():
    journal = Journal()
    step = tf.function(lambda x: noted(journal, x, "a"))
    noted(journal, tf.ones([2]), "b")
    step(tf.ones([2]))
    assert journal.has_moved()
    assert not journal.has_moved()
    step(tf.ones([2]))
    assert journal.has_moved()
    assert not journal.has_moved()


def test_independent_calls_are_not_chained():
    """Neither call waits for the other's variables."""
    journal = Journal()

    @tf.function
    def step(x):
        return noted(journal, x, "a"), noted(journal, x, "b")

    graph = step.get_concrete_function(tf.ones([2])).graph
    writes = [op for op in graph.get_operations() if "Assign" in op.type]
    assert len(writes) == 4
    by_resource = {}
    for op in writes:
        by_resource.setdefault(op.inputs[0].ref(), set()).add(op)
    for operations in by_resource.values():
        before = set().union(*(ancestors(op) for op in operations))
        assert before & set(writes) <= operations


def ancestors(operation):
    found, todo = set(), [operation]
    while todo:
        op = todo.pop()
        for earlier in [t.op for t in op.inputs] + list(op.control_inputs):
            if earlier not in found:
                found.add(earlier)
                todo.append(earlier)
    return found
