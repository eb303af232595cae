"""A rank that fails, or that the others cannot follow, ends all of them.

Each case has processes of its own, which run one of `watch_functions`; those
of one engine run some at a time, since they mostly wait.
"""

import concurrent.futures
import dataclasses
import re
import time

import pytest

from keras_sparsity.launch.functions import Job
from tests import forked, watch_functions
from tests.conftest import engines

_START_SECONDS = 150
_END_SECONDS = 30
_JOBS_AT_ONCE = 3


@dataclasses.dataclass
class Case:
    """One way to fail and what the ranks must make of it.

    Args:
        name: The function of `watch_functions`.
        args: Its arguments.
        message: What each rank's message holds, in this order.
        codes: The exit codes, by rank; None for any but 0.
        silent: Ranks that print no message: they are gone, or their own
            traceback tells it.
        engines: Those it is run on: one where the engine has no part in it.
        is_rare: Whether only `make test-all` runs it.
        num_servers: The number of dedicated servers beside the workers.
        num_workers: The number of workers.
    """

    name: str
    args: tuple = ()
    message: tuple = ()
    codes: tuple = (1, 1)
    silent: tuple = ()
    engines: tuple = ("native", "horovod")
    is_rare: bool = False
    num_servers: int = 0
    num_workers: int = 2

    def __str__(self):
        servers = [f"servers{self.num_servers}"] * bool(self.num_servers)
        workers = [f"workers{self.num_workers}"] * (self.num_workers != 2)
        return "-".join([self.name, *map(str, self.args), *servers, *workers])


CASES = [
    # Longer than TensorFlow (10 s) or Gloo (30 s) would wait by itself.
    Case("agree", (3,), codes=(0, 0), silent=(0, 1)),
    Case("suspend", codes=(0, 0), silent=(0, 1), engines=("native",)),
    Case("collect_garbage", codes=(0, 0), silent=(0, 1), engines=("native",)),
    # Longer than TensorFlow, and Gloo, wait by themselves.
    *(
        Case(
            "agree",
            (seconds,),
            codes=(0, 0),
            silent=(0, 1),
            engines=(engine,),
            is_rare=True,
        )
        for engine, seconds in (("native", 14), ("horovod", 33))
    ),
    Case(
        "call_another_operation",
        message=(
            "the ranks call different operations",
            r'rank 0: waiting \d+ s in all_reduce sum "statistics" of float32 '
            r"with shape \[3\] \(.*watch_functions.py:\d+ in call_another",
            r'rank 1: waiting \d+ s in all_gather "statistics" of float32',
        ),
        engines=("native",),
    ),
    Case(
        "call_another_operation_traced",
        message=(
            "the ranks call different operations",
            r'rank 0: waiting \d+ s in all_reduce sum "statistics#0"',
            r'rank 1: waiting \d+ s in all_gather "statistics#0"',
        ),
    ),
    Case(
        "call_in_another_order_traced",
        message=(
            "the ranks call different collectives",
            'rank 0: waiting .* "second#0"',
            'rank 1: waiting .* "first#0"',
        ),
    ),
    Case(
        "send_another_shape",
        message=(
            "the same collective with different shapes",
            r'rank 0: waiting .* "statistics" of float32 with shape \[3\]',
            r'rank 1: waiting .* "statistics" of float32 with shape \[4\]',
        ),
        engines=("horovod",),
    ),
    Case(
        "send_another_shape_traced",
        message=(
            "the same collective with different shapes",
            r'rank 0: waiting .* "statistics#0" of float32 with shape \[3\]',
            r'rank 1: waiting .* "statistics#0" of float32 with shape \[4\]',
        ),
    ),
    Case(
        "send_another_dtype",
        message=(
            "the same collective with different dtypes",
            'rank 0: waiting .* "statistics" of float32',
            'rank 1: waiting .* "statistics" of float64',
        ),
        engines=("native",),
    ),
    Case(
        "call_alone",
        message=(
            "the ranks call different collectives",
            'rank 0: waiting .* "end of epoch"',
            'rank 1: waiting .* "alone"',
        ),
        engines=("horovod",),
    ),
    Case(
        "go_on_after_an_error",
        message=(
            "the ranks call different collectives",
            'rank 0: waiting .* "late#0"',
            'rank 1: waiting .* "next step".*before that, an error has ended',
        ),
        engines=("native",),
    ),
    Case(
        "end_early",
        message=(
            "the program of rank 1 has ended",
            'rank 0: waiting .* "late"',
            "rank 1: its program has ended",
        ),
        engines=("native",),
    ),
    Case(
        "end_early_by_exit",
        message=("the program of rank 1 has ended", 'rank 0: .* "late"'),
        engines=("horovod",),
    ),
    Case(
        "raise_while_others_compute",
        message=(
            "rank 1 raised ValueError: no such file: corpus.txt",
            "rank 0: in no collective",
        ),
        silent=(1,),
        engines=("native",),
    ),
    Case(
        "swallow_error",
        message=(r"rank 1 raised SystemExit, by sys.exit\(7\)",),
        codes=(1, 7),
        silent=(1,),
        engines=("horovod",),
    ),
    Case(
        "stop",
        (1,),
        message=(
            r"rank 1 has not been heard of for \d+ s: it is stopped",
            'rank 0: waiting .* "late"',
        ),
        codes=(1, None),
        silent=(1,),
    ),
    Case(
        "stop",
        (0,),
        message=(r"rank 0 has not been heard of for \d+ s: it is stopped",),
        codes=(None, 1),
        silent=(0,),
        engines=("native",),
    ),
    Case(
        "fail_in_fit",
        ("SIGKILL", 0),
        message=("the process of rank 0 is gone: it was killed",),
        codes=(-9, 1),
        silent=(0,),
        engines=("native",),
    ),
    Case(
        "fail_in_fit",
        ("SIGKILL", 1),
        message=("the process of rank 1 is gone: it was killed",),
        codes=(1, -9),
        silent=(1,),
        engines=("horovod",),
    ),
    Case(
        "fail_in_fit",
        ("SIGTERM", 1),
        message=("the process of rank 1 is gone: it was killed",),
        codes=(1, -15),
        silent=(1,),
        engines=("native",),
    ),
    Case(
        "fail_in_fit",
        ("SIGTERM", 0),
        message=("the process of rank 0 is gone: it was killed",),
        codes=(-15, 1),
        silent=(0,),
        engines=("horovod",),
    ),
    Case(
        "fail_in_fit",
        ("SIGKILL", 2),  # a server
        message=("the process of rank 2 is gone: it was killed",),
        codes=(1, 1, -9),
        silent=(2,),
        num_servers=1,
        engines=("native",),
    ),
    *(
        Case(
            "stand_still_in_fit",
            message=(
                r"a collective has waited for \d+ s, longer than the timeout",
                r'rank 0: waiting \d+ s in a wait for "other workers"',
                r"rank 1: in no collective \(.*watch_functions.py:\d+ in on_",
            ),
            codes=(1,) * (2 + num_servers),
            num_servers=num_servers,
            engines=("native",),
        )
        for num_servers in (0, 1)
    ),
    Case(
        "stand_still_in_fit",
        (0, 1),
        message=(
            r"a collective has waited for \d+ s, longer than the timeout",
            r"rank 0: in no collective \(.*watch_functions.py:\d+ in on_",
            r'rank 2: waiting \d+ s in a wait for "other workers"',
        ),
        codes=(1, 1, 1),
        num_servers=1,
        engines=("native",),
    ),
    Case(
        "catch_error_of_fit",
        message=("the program of rank 1 has ended", "rank 0: waiting"),
        engines=("native",),
    ),
    Case(
        "catch_error_of_fit",
        ("SystemExit",),
        message=("rank 1 left `fit` by SystemExit", "rank 0: waiting"),
        engines=("native",),
    ),
    *(
        # With a server, the others go on.
        Case(
            "catch_error_of_fit",
            (kind,),
            message=(f"go on without this: rank 1 left `fit` by {kind}",),
            codes=(0, code, 0),
            silent=(0, 2),
            num_servers=1,
            engines=("native",),
        )
        for kind, code in (("ValueError", 1), ("SystemExit", 7))
    ),
    Case(
        "catch_errors_of_all",
        codes=(0, 0, 0),
        silent=(0, 1, 2),
        num_servers=1,
        engines=("native",),
    ),
    Case(
        "fail_in_pipeline",
        ("SIGKILL", 1, "spectrain", True),
        message=("the process of rank 1 is gone: it was killed",),
        codes=(1, -9),
        silent=(1,),
        engines=("native",),
    ),
    Case(
        "fail_in_pipeline",
        ("SIGKILL", 1, None),
        message=("the process of rank 1 is gone: it was killed",),
        codes=(1, -9),
        silent=(1,),
        engines=("horovod",),
    ),
    Case(
        "fail_in_pipeline",
        ("SIGKILL", 0, "vanilla"),
        message=("the process of rank 0 is gone: it was killed",),
        codes=(-9, 1),
        silent=(0,),
        engines=("native",),
    ),
    Case(
        "fail_in_pipeline",
        ("SIGSTOP", 1, "stash"),
        message=(r"rank 1 has not been heard of for \d+ s: it is stopped",),
        codes=(1, None),
        silent=(1,),
        engines=("native",),
    ),
    Case(
        "fail_in_pipeline",
        ("callback", 1, "1f1b"),
        message=("rank 1 raised ValueError: no such file: corpus.txt",),
        silent=(1,),
        engines=("native",),
    ),
    Case(
        "fail_in_fit",
        ("array", 1),
        message=(r"rank 1 raised \w*MemoryError: Unable to allocate",),
        codes=(1, 1),
        silent=(1,),
        engines=("horovod",),
    ),
    Case(
        "fail_in_fit",
        ("tensor", 0),
        message=("rank 0 raised ResourceExhaustedError: .*OOM",),
        codes=(1, 1),
        silent=(0,),
        engines=("native",),
    ),
    Case(
        "fail_in_fit",
        ("callback", 1),
        message=("rank 1 raised ValueError: no such file: corpus.txt",),
        codes=(1, 1),
        silent=(1,),
        engines=("native",),
    ),
    Case(
        "fail_in_fit",
        ("generator", 1),
        message=(r"rank 1 raised \w+: .*no such file: corpus.txt",),
        codes=(1, 1),
        silent=(1,),
        engines=("horovod",),
    ),
    Case(
        "fail_in_fit",
        ("map", 0),
        message=(r"rank 0 raised \w+: .*no such file: corpus.txt",),
        codes=(1, 1),
        silent=(0,),
        engines=("native",),
        is_rare=True,
    ),
]
# Of rank 1: its code, and the others' message.
_ENDS = {
    "SIGKILL": (-9, "the process of rank 1 is gone: it was killed"),
    "SIGSTOP": (None, r"rank 1 has not been heard of for \d+ s: it is stopped"),
    "callback": (1, "rank 1 raised ValueError: no such file: corpus.txt"),
}
# Those of two stages that stand above.
_ABOVE = {
    ("SIGKILL", ("vanilla",)),
    ("SIGSTOP", ("stash",)),
    ("callback", ("1f1b",)),
    ("SIGKILL", ("spectrain", True)),
}
# Of three stages, a middle one; and of Horovod.
_USUAL = {
    ("SIGKILL", ("1f1b",), 3, "native"),
    ("callback", ("stash",), 2, "horovod"),
}
CASES += [
    Case(
        "fail_in_pipeline",
        (how, 1, *schedule),
        message=(message,),
        codes=(1, code, 1)[:num_workers],
        silent=(1,),
        engines=(engine,),
        is_rare=(how, schedule, num_workers, engine) not in _USUAL,
        num_workers=num_workers,
    )
    for engine, num_workers in [("native", 2), ("native", 3), ("horovod", 2)]
    for schedule in [
        *(("gpipe",), ("1f1b",), ("vanilla",), ("stash",), ("spectrain",)),
        ("spectrain", True),
        *[(None,)] * (num_workers == 2),  # layer placement
    ]
    for how, (code, message) in _ENDS.items()
    if (engine, num_workers) != ("native", 2) or (how, schedule) not in _ABOVE
    if (engine, how, schedule) != ("horovod", "SIGKILL", (None,))  # above
]


@dataclasses.dataclass
class End:
    """How a rank ended: exit code (None: it had not), output, time."""

    code: int | None
    output: str
    time_seconds: float

    @property
    def seconds(self):
        """From the rank's own BEGIN."""
        begun = re.findall(r"^BEGIN ([\d.]+)$", self.output, re.MULTILINE)
        return self.time_seconds - float(begun[-1])


def run(engine, case):
    """Runs a case and returns the `End` of each rank.

    Waits for each by itself: the launcher would end the others of a rank that
    failed.
    """
    function = getattr(watch_functions, case.name)
    arguments = {"args": case.args, "num_servers": case.num_servers}
    with Job(function, case.num_workers, engine, **arguments) as job:
        waiting = {p.rank: p for p in job.processes.processes}
        ends = {}
        deadline = time.monotonic() + _START_SECONDS
        while waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            for rank, process in list(waiting.items()):
                if process.poll() is not None:
                    ends[rank] = process.returncode, time.time()
                    del waiting[rank]
            if set(waiting) <= {
                r for r, code in enumerate(case.codes) if code is None
            }:
                break
        for rank in waiting:
            ends[rank] = None, time.time()
        return [
            End(ends[p.rank][0], _read(p.log_path), ends[p.rank][1])
            for p in job.processes.processes
        ]


def _read(path):
    with open(path) as file:
        return file.read()


@pytest.fixture(scope="module")
def outcome(request):
    """`outcome(engine, case)` gives the ends of the ranks.

    The first one asked for starts all selected cases of its engine.
    """
    started = {}
    selected = [
        item.callspec.params
        for item in request.session.items
        if getattr(item, "function", None) is test_case
    ]
    pool = concurrent.futures.ThreadPoolExecutor(_JOBS_AT_ONCE)
    with forked.ranks():

        def find(engine, case):
            if (engine, str(case)) not in started:
                for params in selected:
                    if params["engine"] == engine:
                        started[engine, str(params["case"])] = pool.submit(
                            run, engine, params["case"]
                        )
            return started[engine, str(case)].result()

        yield find
        for future in started.values():
            future.cancel()
        concurrent.futures.wait(started.values())
        # The end of an idle thread was once not seen for minutes.
        pool.shutdown(wait=False)


@pytest.mark.timeout(2 * _START_SECONDS)
@pytest.mark.parametrize(
    ("engine", "case"),
    [
        pytest.param(
            *engine.values,
            case,
            marks=[*engine.marks, *[pytest.mark.all_cells] * case.is_rare],
            id=f"{engine.values[0]}-{case}",
        )
        for engine in engines()
        for case in CASES
        if engine.values[0] in case.engines
    ],
)
def test_case(outcome, engine, case):
    for rank, end in enumerate(outcome(engine, case)):
        if case.codes[rank] == end.code is None:
            continue  # stopped
        assert end.code == case.codes[rank], end.output
        assert end.seconds < _END_SECONDS, end.output
        messages = end.output.count("\nkeras_sparsity: ")
        assert messages == (rank not in case.silent), end.output
        if messages:
            expected = r"(.|\n)*".join(case.message)
            assert re.search(expected, end.output), end.output
