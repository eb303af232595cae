"""Fixtures and options of all tests."""

import functools
import gc
import importlib.util
import inspect
import os
import pathlib
import re
import signal
import sys

import pytest

from tests.cluster import Cluster

# A shell's background job ignores SIGINT, and `nohup` has it ignore SIGHUP, and
# so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

HAS_HOROVOD = importlib.util.find_spec("horovod") is not None


def engines(*names, usually=None):
    """Parameters for `pytest.mark.parametrize("engine", engines())`.

    Both distributed engines unless named; Horovod's are visibly skipped where
    it is not installed.

    Args:
        usually: the one that `make test` takes, where both are left to
            `make test-all`: of what stands on collectives, which pass a
            suite of their own on both.
    """
    skip = pytest.mark.skipif(
        not HAS_HOROVOD, reason="Horovod is not installed"
    )
    return [
        pytest.param(
            name,
            marks=[skip] * (name == "horovod")
            + [pytest.mark.all_cells] * (usually not in (None, name)),
        )
        for name in names or ("native", "horovod")
    ]


def engines_and_sizes(usually):
    """Parameters for `parametrize(("engine", "num_processes"), ...)`.

    4 processes of the native engine, or 2 of Horovod: for what stands on
    collectives, which have a suite of their own.

    Args:
        usually: the engine that `make test` takes.
    """
    cells = [("native", 4), ("horovod", 2)]
    return covering(cells, [cell for cell in cells if cell[0] == usually])


def covering(every, usual):
    """Parameters of which `make test` takes some, `make test-all` all.

    Args:
        every: tuples of values, an engine first.
        usual: those of `make test`, which together hold each value.
    """
    every = list(every)
    assert all(cell in every for cell in usual)
    skips = {param.values[0]: param.marks for param in engines()}
    return [
        pytest.param(
            *cell,
            marks=[
                *skips.get(cell[0], ()),
                *[pytest.mark.all_cells] * (cell not in usual),
            ],
        )
        for cell in every
    ]


# Milliseconds; Horovod's own 1 takes a third of a core of each process.
_LESS_POLLING = {"HOROVOD_CYCLE_TIME": "5"}
_GROUPS = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


# A process holds 500 MB.
_MOST_PROCESSES = 16


class Clusters:
    """The running clusters; those used last stay, up to a number of processes.

    A process of Horovod's polls while it waits: of those there is one cluster
    at a time, and none of the native engine.
    """

    def __init__(self):
        self._clusters = {}

    def __call__(
        self,
        engine,
        num_processes,
        machines=1,
        has_groups=False,
        num_servers=0,
    ):
        """The cluster of this kind, started at its first `run`.

        With `has_groups`, Horovod can be divided into any groups of ranks.
        """
        has_groups &= engine == "horovod"  # the others always can
        key = (engine, num_processes, machines, has_groups, num_servers)
        found = self._clusters.pop(key, None) or Cluster(
            num_processes,
            engine,
            machines,
            _LESS_POLLING | (_GROUPS if has_groups else {}),
            num_servers,
        )
        num_running = found.num_processes
        for other in reversed(self._clusters.values()):
            num_running += other.num_processes * other.is_running
            engines = engine, other.engine
            if num_running > _MOST_PROCESSES or (
                "horovod" in engines and "local" not in engines
            ):
                other.stop()
        self._clusters[key] = found  # the last
        return found

    def stop(self, engine=None):
        for cluster in self._clusters.values():
            if engine in (None, cluster.engine):
                cluster.stop()


@pytest.fixture(scope="session")
def _clusters():
    clusters = Clusters()
    yield clusters
    clusters.stop()


@pytest.fixture(autouse=True)
def _no_idle_horovod(request, _clusters):
    if "cluster" not in request.fixturenames:
        _clusters.stop("horovod")


@pytest.fixture(scope="session")
def cluster(_clusters):
    """`cluster(engine, num_processes, ...)`, of `Clusters`, gives one."""
    return _clusters


@pytest.fixture(scope="session")
def logged(cluster, tmp_path_factory):
    """`logged(engine)` gives what ArchitectureLogger wrote of two processes.

    The folder, and each rank's result of `logger_functions.train`.
    """
    from tests.logger_functions import train  # imports Keras

    @functools.cache
    def logged(engine):
        log_dir = tmp_path_factory.mktemp(f"logs_{engine}")
        return log_dir, cluster(engine, 2).run(train, log_dir, True)

    return logged


# Parameters that tell clusters of one engine apart, where no call names them.
_SIZES = ("size", "num_processes", "num_workers", "machines", "replicas")


def pytest_collection_finish():
    # As in the workers, see `cluster.serve`.
    gc.collect()
    gc.freeze()


# First: xdist reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks and groups them."""
    _leave_out(items, config.args == config.getini("testpaths"))
    _group(items)


# Files of tests' ids, and the mark of those tests.
_LEFT_OUT = {
    "left_to_test_long.txt": pytest.mark.long,
    "left_to_test_all.txt": pytest.mark.all_cells,
}


def _leave_out(items, are_all):
    """Leaves the tests of two lists to `make test-long` and `make test-all`.

    Those of the first take 3 seconds or more where `make test` has another
    cell of their function, most of the others 14. Those of the second take
    long, too, and mostly other cells or tests run the same code, or it is a
    smoke test, which runs on the oldest and the newest versions all the same.

    Args:
        items: The collected tests.
        are_all: Whether all tests are collected.
    """
    for name, mark in _LEFT_OUT.items():
        path = pathlib.Path(__file__).with_name(name)
        left = set(path.read_text().splitlines())
        for item in items:
            if item.nodeid in left:
                item.add_marker(mark)
        unknown = left.difference(item.nodeid for item in items)
        if are_all and unknown:
            raise pytest.UsageError(
                f"{name} has tests that there are not: {sorted(unknown)}"
            )


# Files whose tests without a cluster take a minute or more.
_LONG = [
    "test_tutorials.py",
    "test_rules.py",
    "test_sharded_checkpoint.py",
    "test_kept_rows.py",
    "test_firewall.py",
    "test_average_sums.py",
    "test_site.py",
    "test_exporting.py",
    "test_startup.py",
]
# Files whose tests make network namespaces, or find those that are left.
_OF_NAMESPACES = {
    "asynchronous/test_hosts.py",
    "benchmarks/test_cluster.py",
    "machines/test_firewall.py",
    "planning/test_engine_cost.py",
}


def _group(items):
    """Groups the tests by engine, so that each engine's clusters start once.

    With `pytest -n 2 --dist loadgroup` each engine's clusters are in one
    worker; the tests without one go to either, module by module: long ones
    first, so that one worker does not end long after the other. Those of
    network namespaces are in one worker: some look at all of the machine.
    """
    order = {"native": 0, "horovod": 1, None: 2}

    def params_of(item):
        call = getattr(item, "callspec", None)
        return call.params if call else {}

    def engine_of(item):
        params = params_of(item)
        engine, *_ = params.get("ranks") or [params.get("engine")]
        if engine == "horovod":
            return engine
        is_native = engine == "native" or "cluster" in item.fixturenames
        return "native" if is_native else None

    def place_of(item):
        engine = engine_of(item)
        if engine is None:
            is_long = item.path.name in _LONG
            turn = _LONG.index(item.path.name) if is_long else len(_LONG)
            return order[engine], turn
        if engine == "native":
            return order[engine], ""
        # One cluster runs at a time: those of a kind, one after the other.
        source = inspect.getsource(item.function)
        params = params_of(item)
        kinds = [
            re.sub(r"\w+", lambda name: str(params.get(name[0], name[0])), kind)
            for kind in re.findall(r"(?<!\w)cluster\(([^()]*)\)", source)
        ]
        sizes = [str(params[name]) for name in _SIZES if name in params]
        return order[engine], " ".join(kinds) or ", ".join([engine, *sizes])

    items.sort(key=place_of)
    for item in items:
        has_cluster = "cluster" in item.fixturenames
        group = engine_of(item) if has_cluster else item.path.name
        if f"{item.path.parent.name}/{item.path.name}" in _OF_NAMESPACES:
            group = "namespaces"
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A `tests.browser.Browser`."""
    from tests.browser import browsing  # and with it TensorFlow

    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """The folder of the screenshots, which stay."""
    folder = os.environ.get("KERAS_SPARSITY_ARTIFACTS")
    if not folder:
        return tmp_path_factory.mktemp("screenshots")
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def counts():
    """The module `scripts/counts.py`."""
    path = pathlib.Path(__file__).parents[1] / "scripts" / "counts.py"
    spec = importlib.util.spec_from_file_location("counts", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
