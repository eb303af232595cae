"""Fixtures and options of all tests."""

import importlib.util

import pytest

from tests.cluster import Cluster

HAS_HOROVOD = importlib.util.find_spec("horovod") is not None


def engines(*names):
    """Parameters for `pytest.mark.parametrize("engine", engines())`.

    Both distributed engines unless named; Horovod's are visibly skipped where
    it is not installed.
    """
    skip = pytest.mark.skipif(
        not HAS_HOROVOD, reason="Horovod is not installed"
    )
    return [
        pytest.param(name, marks=skip if name == "horovod" else ())
        for name in names or ("native", "horovod")
    ]


class Clusters:
    """The running clusters; only those of one engine at a time.

    A process holds 500 MB and Horovod's background threads never sleep, so
    clusters that are not in use must go.
    """

    def __init__(self):
        self._clusters = {}

    def __call__(self, engine, num_processes, machines=1):
        """The cluster of this kind, started at its first `run`."""
        for cluster in self._clusters.values():
            if cluster.engine != engine and cluster.is_running:
                cluster.stop()
        key = (engine, num_processes, machines)
        if key not in self._clusters:
            self._clusters[key] = Cluster(num_processes, engine, machines)
        return self._clusters[key]

    def stop(self):
        for cluster in self._clusters.values():
            cluster.stop()


@pytest.fixture(scope="session")
def cluster():
    """`cluster(engine, num_processes, machines=1)` gives a running Cluster."""
    clusters = Clusters()
    yield clusters
    clusters.stop()


def pytest_collection_modifyitems(items):
    """Groups the tests by engine, so that each engine's start only once."""

    def engine_of(item):
        call = getattr(item, "callspec", None)
        engine = call.params.get("engine") if call else None
        return (
            ("native", "horovod").index(engine) + 1
            if engine
            in (
                "native",
                "horovod",
            )
            else 0
        )

    items.sort(key=engine_of)
