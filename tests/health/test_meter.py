"""What collectives send and how long they take, counted inside the step."""

import gc
import time

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity.health import journal
from keras_sparsity.health.meter import Meter, Totals
from tests.conftest import engines

SPLITS = np.array([[2, 3], [4, 0]])
DIM = 5
STEPS = 3
PAUSE_SECONDS = 0.5


def step_of_each():
    """Totals by name of some steps; rank 1 comes late to each."""
    ranks = collectives.current()
    rows = tf.ones([SPLITS[ranks.rank].sum(), DIM])
    splits = tf.constant(SPLITS[ranks.rank], tf.int32)

    def pause():
        time.sleep(PAUSE_SECONDS * ranks.rank)
        return np.float32(0)

    @tf.function
    def step():
        late = tf.numpy_function(pause, [], tf.float32)
        late.set_shape([])
        (total,) = ranks.all_reduce([tf.ones([400]) + late], name="all")
        with tf.control_dependencies([total]):
            received, route = ranks.all_to_all(rows, splits, name="to")
        ranks.all_to_all_back(received, route, name="back")
        return ranks.all_gather(rows, name="gather")

    notes = journal.current()
    notes.measures = True
    try:
        step()  # one rank may trace it longer than the other
        before = notes.totals()
        for _ in range(STEPS):
            step()
    finally:
        notes.measures = False
    # What other tests have traced in these processes may still be there.
    return {
        key[0]: (totals - before[key]).to_list()
        for key, totals in notes.totals().items()
        if key[0] in ("all", "to", "back", "gather")
    }


@pytest.mark.parametrize("engine", engines())
def test_bytes_and_times_by_role(engine, cluster):
    results = cluster(engine, 2).run(step_of_each)
    num_bytes = {}
    for rank, totals in enumerate(results):
        assert len(totals) == 4
        for name, (calls, seconds, sent, received) in totals.items():
            assert calls == STEPS
            assert 0 <= seconds < 20
            num_bytes[name, rank] = sent / STEPS, received / STEPS
    ring = 2 * 400 * 4 / 2
    row = DIM * 4
    if engine == "horovod":  # the counts, as Horovod sends them, left out
        to, gathered = [(3, 4), (4, 3)], [(5, 4), (4, 5)]
        counts = 0
    else:  # 4 rows of 5 are 20 elements, 5 rows 25, padded to 26
        to, gathered = [(4, 4)] * 2, [(26 / 5, 26 / 5)] * 2
        counts = 1
    for rank in range(2):
        assert num_bytes["all", rank] == (ring, ring)
        expected = [n * row + counts * 2 * 4 for n in to[rank]]
        np.testing.assert_allclose(num_bytes["to", rank], expected)
        back = to[rank] if counts else to[rank][::-1]
        expected = [n * row for n in back]
        np.testing.assert_allclose(num_bytes["back", rank], expected)
        # With the shape of each rank's rows.
        expected = [n * row + counts * 2 * 4 for n in gathered[rank]]
        np.testing.assert_allclose(num_bytes["gather", rank], expected)
    waited, late = (totals["all"][1] for totals in results)
    # On a busy machine rank 0 may itself be late, and wait less.
    assert waited > PAUSE_SECONDS / 2
    assert waited > late


def test_nothing_is_counted_unless_asked_for(cluster):
    assert cluster("native", 2).run(uncounted) == [{}, {}]


def uncounted():
    ranks = collectives.current()
    step = tf.function(lambda: ranks.all_reduce([tf.ones([4])], name="un"))
    step()
    return {
        name: totals.to_list()
        for (name, _), totals in journal.current().totals().items()
        if name == "un"
    }


def test_the_update_is_measured_and_forgotten_with_its_function():
    notes = journal.Journal()
    notes.measures = True
    variable = tf.Variable(tf.zeros([1000]))

    def sleep():
        time.sleep(0.05)
        return np.float32(1)

    @tf.function
    def step(x):
        with notes.measured("update", [x]):
            variable.assign_add(x * tf.numpy_function(sleep, [], tf.float32))

    for _ in range(STEPS):
        step(tf.ones([1000]))
    ((name, _), totals) = next(iter(notes.totals().items()))
    assert (name, totals.calls) == ("update", STEPS)
    assert STEPS * 0.05 <= totals.seconds < 5
    del step
    gc.collect()
    assert not notes.totals()


def test_one_meter_adds_up():
    meter = Meter()
    run = tf.function(lambda: meter.measured(lambda: tf.zeros([2])))
    run()
    before = meter.totals()
    run()
    assert (meter.totals() - before).calls == 1
    assert before + Totals() == before
