"""A task of Slurm finds its step's tasks by the variables that srun sets."""

import contextlib
import itertools
import os
import pty

import pytest

from keras_sparsity.collectives import startup
from keras_sparsity.launch import environment
from keras_sparsity.machines import ports, settings, slurm
from tests import without_launcher

# As srun of Slurm 22.05 sets them, in the second of two tasks on two machines.
_STEP = {
    "SLURM_JOB_ID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "1",
}
_OTHERS = (
    *("TF_CONFIG", "HOROVOD_RANK", "SLURM_PTY_PORT"),
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
)


@pytest.fixture
def step(monkeypatch):
    """Sets the variables of a task, with some of them changed or removed."""

    def set_variables(**changes):
        for name, value in {**_STEP, **changes}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    for name in _OTHERS:
        monkeypatch.delenv(name, raising=False)
    return set_variables


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("a[1-3,07],b", ["a1", "a2", "a3", "a07", "b"]),
        ("r[0-1]n[01-02],x", ["r0n01", "r0n02", "r1n01", "r1n02", "x"]),
        ("n1-2,n[3-4].test", ["n1-2", "n3.test", "n4.test"]),
    ],
)
def test_machines_are_those_of_scontrol(text, hosts, step):
    step(
        SLURM_STEP_NODELIST=text, SLURM_STEP_TASKS_PER_NODE=f"1(x{len(hosts)})"
    )
    found = [address.partition(":")[0] for address in slurm.addresses()]
    assert found == hosts


@pytest.mark.parametrize(
    ("counts", "node", "local", "rank", "of_machines"),
    [
        ("1(x2)", 1, 0, 1, [1, 1]),
        # `--distribution=cyclic` makes it the task 1, too.
        ("2(x2)", 1, 0, 2, [2, 2]),
        ("3,1", 0, 2, 2, [3, 1]),
        ("3,1", 1, 0, 3, [3, 1]),
    ],
)
def test_ranks_go_machine_by_machine(
    counts, node, local, rank, of_machines, step
):
    step(
        SLURM_STEP_NUM_TASKS=str(sum(of_machines)),
        SLURM_STEP_TASKS_PER_NODE=counts,
        SLURM_NODEID=str(node),
        SLURM_LOCALID=str(local),
    )
    tasks = settings.cluster()
    assert startup._found_engine() == "native"
    assert settings.cluster_rank(tasks) == rank
    assert [task[:2] for task in tasks] == [
        ("worker", number) for number in range(sum(of_machines))
    ]
    hosts = [address.partition(":")[0] for *_, address in tasks]
    assert [hosts.count("node1"), hosts.count("node2")] == of_machines
    assert len({address for *_, address in tasks}) == len(tasks)


def test_steps_beside_each_other_have_ports_of_their_own(step):
    found = []
    for job, number in (("2", "0"), ("2", "1"), ("3", "0"), ("999999", "7")):
        step(
            SLURM_JOB_ID=job,
            SLURM_STEP_ID=number,
            SLURM_STEP_TASKS_PER_NODE="16(x2)",
        )
        found += [address.partition(":")[2] for address in slurm.addresses()]
    assert len({*found}) == 4 * 16
    assert all(15000 <= int(port) < 32000 for port in found)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        # A program of the job itself, beside srun.
        {"SLURM_STEP_NUM_TASKS": None},
        # Each of two helpers of mpirun has started two ranks.
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_SIZE": "4"},
    ],
)
def test_a_process_that_is_no_task_of_several(changes, step):
    step(**changes)
    assert startup._found_engine() == "local"
    assert settings.cluster() == []


# The child of a process with threads asks and ends.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("has_terminal", "is_task"), [(True, 0), (False, 1)])
def test_a_shell_of_srun_is_no_task_and_its_sruns_are(
    has_terminal, is_task, step
):
    step(SLURM_PTY_PORT="33421")
    child, terminal = pty.fork() if has_terminal else (os.fork(), None)
    if child == 0:
        if not has_terminal:
            os.setsid()
        os._exit(slurm.is_task())
    _, status = os.waitpid(child, 0)
    if has_terminal:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == is_task


@pytest.mark.parametrize(
    ("num_tasks", "in_step", "is_told"),
    [
        ("4", False, True),
        ("4", True, False),
        ("1", False, False),
        (None, False, False),
    ],
)
def test_a_batch_script_without_srun_is_told(
    num_tasks, in_step, is_told, step, caplog
):
    step(
        SLURM_NTASKS=num_tasks,
        SLURM_STEP_NUM_TASKS="1" if in_step else None,
    )
    assert startup._found_engine() == "local"
    assert ("a job of Slurm that has 4 tasks" in caplog.text) is is_told


def test_srun_itself_may_bring_mpi(step):
    step(PMI_SIZE="2")
    assert startup._found_engine() == "native"


def test_tf_config_and_launchers_take_precedence(step, monkeypatch):
    step()
    assert not {slurm.STEP_VARIABLE} & {*environment.shared({})}
    monkeypatch.setenv("TF_CONFIG", "{}")
    assert startup._found_engine() == "local"
    monkeypatch.delenv("TF_CONFIG")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert startup._found_engine() == "horovod"


def test_a_child_of_a_task_is_no_task(step, monkeypatch):
    step()
    monkeypatch.setenv("KERAS_SPARSITY_STARTED", "")
    settings.mark_started()
    assert not settings.is_of_child()
    monkeypatch.setattr("os.getpid", lambda: 0)
    assert settings.is_of_child()
    step(SLURM_STEP_ID="1")  # srun, called by a task
    assert not settings.is_of_child()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_STEP_NODELIST": "a["}, "SLURM_STEP_NODELIST .* 'a\\['"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST .* ''"),
        ({"SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST .* None"),
        ({"SLURM_STEP_NODELIST": "a,b,c"}, "Expected: 2 machines"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "TASKS_PER_NODE .* 'two'"),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID .* 'x'"),
        ({"SLURM_NODEID": None}, "SLURM_NODEID .* None"),
    ],
)
def test_variables_that_do_not_say_where_tasks_are(changes, message, step):
    step(**changes)
    with pytest.raises(ValueError, match=message) as error:
        settings.cluster_rank(settings.cluster())
    assert "set TF_CONFIG" in str(error.value)


_PROGRAM = """
import keras_sparsity as ks
strategy = ks.HybridStrategy()
ranks = strategy.collectives.gather_objects(strategy.rank, "ranks")
print("RANKS", strategy.rank, ranks, strategy.collectives.engine, flush=True)
"""


@contextlib.contextmanager
def _reserved(addresses, monkeypatch):
    """Holds the ports of addresses; gives whether all of them are free."""
    asked = [int(address.rpartition(":")[2]) for address in addresses]
    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as patched:
            patched.setattr(ports, "RANGE", asked)
            try:
                stack.enter_context(ports.reserved(len(asked)))
            except ValueError:
                asked = []
        yield bool(asked)


@pytest.fixture
def free_step(step, monkeypatch):
    """Variables of two tasks here, whose ports no other program has."""
    for job in itertools.count(os.getpid()):
        step(
            SLURM_JOB_ID=str(job),
            SLURM_STEP_NODELIST="localhost",
            SLURM_STEP_TASKS_PER_NODE="2",
            SLURM_NODEID="0",
        )
        with _reserved(slurm.addresses(), monkeypatch) as are_free:
            if are_free:
                yield
                return


@pytest.mark.usefixtures("free_step")
def test_tasks_train_together():
    places = [
        dict.fromkeys(("SLURM_LOCALID", "SLURM_PROCID"), str(local))
        for local in range(2)
    ]
    said = without_launcher.outputs(["-c", _PROGRAM], places)
    for rank, text in enumerate(said):
        assert f"RANKS {rank} [0, 1] native\n" in text
