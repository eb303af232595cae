"""The tests' own worker clusters."""

import sys
import types

import numpy as np
import pytest

from tests import forked, launch_functions
from tests.cluster import Cluster, ClusterError
from tests.conftest import engines


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_processes_stay_between_calls(cluster, engine):
    workers = cluster(engine, 2)
    first = workers.run(launch_functions.describe)
    second = workers.run(launch_functions.describe, 1)
    assert [r["rank"] for r in second] == [0, 1]
    assert [r["process"] for r in first] == [r["process"] for r in second]
    # Each call begins with the same seeds.
    assert first[0]["random"] == second[1]["random"]
    (doubled, _) = workers.run(launch_functions.double, np.arange(3))
    np.testing.assert_array_equal(doubled, [0, 2, 4])


def test_a_rank_does_not_import_the_main_module(tmp_path, monkeypatch):
    """As `python -m tests.matrix` is one that uses TensorFlow."""
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "main.py")
    seen = tmp_path / "seen"
    (tmp_path / "main.py").write_text(f"open({str(seen)!r}, 'w')")
    monkeypatch.setitem(sys.modules, "__main__", main)
    workers = Cluster(1, "local")
    try:
        workers.run(launch_functions.describe)
    finally:
        workers.stop()
    assert not seen.exists()


def test_modules_that_are_imported_while_a_rank_starts_stay(monkeypatch):
    """Else another thread's imports would load them a second time."""
    name, start = "imported_meanwhile", forked._CONTEXT.Process.start

    def import_and_start(process):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        start(process)

    monkeypatch.setattr(forked._CONTEXT.Process, "start", import_and_start)
    workers = Cluster(1, "local")
    try:
        workers.run(launch_functions.describe)
    finally:
        workers.stop()
    assert name in sys.modules


def test_an_exception_on_every_rank_leaves_the_processes(cluster):
    workers = cluster("native", 2)
    before = workers.run(launch_functions.describe)
    with pytest.raises(ClusterError) as error:
        workers.run(launch_functions.fail_everywhere)
    for rank in range(2):
        assert f"ValueError: no luck on rank {rank}" in str(error.value)
    after = workers.run(launch_functions.describe)
    assert [r["process"] for r in before] == [r["process"] for r in after]


@pytest.mark.parametrize(
    ("function", "timeout", "said"),
    [
        (launch_functions.fail, 120, "ValueError: no luck on rank 1"),
        (launch_functions.die, 120, "rank 1 was killed by SIGKILL"),
        (launch_functions.crash, 120, "in _read_nothing"),
        # The time counts from before the rank has begun the call.
        (launch_functions.hang, 10, "time.sleep(600)"),
    ],
)
def test_a_broken_cluster_starts_anew(
    cluster, function, timeout, said, monkeypatch
):
    # The other rank waits for this one for ever.
    monkeypatch.setattr("tests.cluster._LAST_WORDS_SECONDS", 1)
    workers = cluster("native", 2)
    with pytest.raises(ClusterError) as error:
        workers.run(function, 1, timeout=timeout)
    assert said in str(error.value)
    assert not workers.is_running
    assert len(workers.run(launch_functions.describe)) == 2


def test_clusters_stay_unless_they_are_many_or_of_horovod(cluster):
    native, local = cluster("native", 2), cluster("local", 1)
    for each in (native, local):
        assert each.run(launch_functions.describe)[0]["engine"] == each.engine
    assert native.is_running and local.is_running
    cluster("horovod", 2)
    assert not native.is_running and local.is_running
    cluster("native", 16)
    assert not local.is_running


def test_two_workers_of_pytest_share_no_group_of_tests(request):
    if not request.config.getoption("loadgroup", False):
        pytest.skip("not in a worker of pytest -n 2 --dist loadgroup")
    # pytest-xdist gives the group to a test's name, unless pytest or the
    # order of hooks keeps it from that: no message says so.
    assert request.node.nodeid.endswith("@test_cluster.py")
