"""Runs a Python function in several fresh processes."""

import contextlib
import os
import pickle
import shutil
import sys
import tempfile
import time

from keras_sparsity._tf import checks
from keras_sparsity.launch import environment
from keras_sparsity.launch.hosts import local_hosts, places
from keras_sparsity.launch.listener import Listener
from keras_sparsity.launch.processes import ProcessGroup
from keras_sparsity.launch.rank_process import Follower, start_here


class LaunchError(RuntimeError):
    """Raised when a launched process fails; quotes each one's output.

    Example:

    >>> raise LaunchError("Rank 1 of 2 exited with code 1.")
    Traceback (most recent call last):
        ...
    keras_sparsity.launch.functions.LaunchError: Rank 1 of 2 exited with code 1.

    References:
        `torch.distributed.elastic`'s `ChildFailedError`.
    """


def run(
    function,
    num_processes,
    engine=None,
    args=(),
    kwargs=None,
    machines=1,
    timeout=None,
    env=None,
    num_servers=0,
):
    """Calls a function in `num_processes` fresh processes of this machine.

    The collectives have started when the function is called. The output of
    rank 0 is shown at once; the other ranks' is part of the error if one
    fails. A script calls it below `if __name__ == "__main__":`, as each
    process runs the script once more to find the function.

    Args:
        function: A function at the top level of a module or script (each
            process imports it by name).
        num_processes: Number of processes; without the servers.
        engine: `"native"`, `"horovod"` or `"local"`; by default `"native"`,
            for one process `"local"`.
        args: Its positional arguments, the same on every rank.
        kwargs: Its keyword arguments.
        machines: Number of machines to emulate, with as many processes each
            (for tests and measurements).
        timeout: Seconds after which all processes are ended.
        env: Dictionary of further environment variables.
        num_servers: Number of dedicated servers, which are further processes
            and own the rows of sharded tables; their ranks are the last ones.

    Returns:
        List of the function's results, by rank; None of a worker without which
        asynchronous training went on.

    Raises:
        LaunchError: If a process fails or the time is over; it contains
            every failing rank's traceback or last lines.
        ValueError: If an argument is invalid.

    Example:

    >>> import math
    >>> from keras_sparsity import launch
    >>> launch.run(math.hypot, 2, args=(3, 4))  # doctest: +SKIP
    [5.0, 5.0]

    References:
        Horovod's `horovod.run`.
    """
    environment.check_timeout(timeout)
    with Job(
        *(function, num_processes, engine, args, kwargs, machines, env),
        num_servers,
    ) as job:
        job.follow_main_rank()
        return job.wait(timeout)


class Job:
    """Processes that run one function; `run` in two steps.

    Leaving the `with` block ends the running processes. Arguments as for
    `run`.
    """

    def __init__(
        self,
        function,
        num_processes,
        engine=None,
        args=(),
        kwargs=None,
        machines=1,
        env=None,
        num_servers=0,
    ):
        of_ranks = places(local_hosts(num_processes, machines, num_servers))
        num_processes = len(of_ranks)
        engine = environment.resolve_engine(engine, num_processes)
        environment.check_memory(num_processes)
        _check_env(env)
        call = describe_call(function, args, {} if kwargs is None else kwargs)
        shared = environment.shared(
            # Lines of a killed rank are in its file.
            {"PYTHONUNBUFFERED": "1", **(env or {})}
        )
        self._followers = []
        with contextlib.ExitStack() as stack:
            self._folder = tempfile.mkdtemp(prefix="keras-sparsity-")
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            with open(self._path("call"), "wb") as file:
                pickle.dump(call, file)
            listener = stack.enter_context(Listener(of_ranks))
            shared.update(listener.variables())
            environments = stack.enter_context(
                environment.of_ranks(engine, of_ranks, shared)
            )
            self.processes = stack.enter_context(ProcessGroup(listener.lost))
            for rank, variables in enumerate(environments):
                self._start(rank, engine, variables)
            self._stack = stack.pop_all()

    def _start(self, rank, engine, variables):
        target = [self._path("call"), self._path("result", rank)]
        self.processes.append(
            start_here(
                rank,
                ["call", engine, *target],
                variables,
                stdout=self._path("err" if rank else "out", rank),
                stderr=self._path("err", rank),
            )
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def follow_main_rank(self):
        """Lets `wait` show rank 0's output."""
        self._followers = [
            Follower(self._path("out", 0), sys.stdout),
            Follower(self._path("err", 0), sys.stderr),
        ]

    def wait(self, timeout=None):
        """Waits for all ranks and returns their results, by rank."""
        start = time.monotonic()

        def on_poll():
            for follow in self._followers:
                follow()
            if timeout is not None and time.monotonic() - start > timeout:
                raise TimeoutError

        try:
            self.processes.wait(on_poll)
        except TimeoutError:
            if self.processes.running():
                raise self.timeout_error(timeout) from None
        if not self.processes.succeeded():
            raise self.failure()
        lost = self.processes.lost()
        return [
            None if process in lost else self._result(process.rank)[1]
            for process in self.processes.processes
        ]

    def timeout_error(self, timeout, after=""):
        """Ends all ranks; the error shows each rank's last position."""
        self.processes.dump_stacks()
        waiting = {p.rank for p in self.processes.running()}
        self.processes.kill()
        return LaunchError(
            f"Not done within {timeout} seconds{after}; all processes were "
            "ended. Their last lines, with where each thread was:\n"
            + "\n".join(
                f"--- rank {p.rank} "
                + ("was still running" if p.rank in waiting else "had ended")
                + "\n"
                + "\n".join(p.last_lines(60))
                for p in self.processes.processes
            )
        )

    def failure(self):
        """The error that describes each rank's end, the cause first."""
        failed = self.processes.causes()
        told = [p for p in self.processes.processes if p not in failed]
        lines = [
            f"Rank {failed[0].rank} of {len(self.processes.processes)} "
            f"{failed[0].describe_end()}."
        ]
        for process in failed + told:
            lines += [f"--- rank {process.rank} {process.describe_end()}"]
            done, text = self._result(process.rank)
            if done is False:
                lines += [text.rstrip()]
            elif process.returncode != 0:
                lines += process.last_lines(40)
        return LaunchError("\n".join(lines))

    def _result(self, rank):
        try:
            with open(self._path("result", rank), "rb") as file:
                return pickle.load(file)
        except FileNotFoundError:
            return None, None

    def _path(self, kind, rank=None):
        name = kind if rank is None else f"rank-{rank}.{kind}"
        return os.path.join(self._folder, name)


def _is_script_run_again():
    """Whether the script runs to define the functions that it called.

    By the name: multiprocessing gives the main module this alias, and notebooks
    replace that module.
    """
    script = sys.modules.get("__mp_main__")
    is_main = script is sys.modules["__main__"]
    return not is_main and getattr(script, "__name__", None) == "__mp_main__"


def describe_call(function, args, kwargs):
    """A dict from which a process finds a function and calls it."""
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", "")
    if _is_script_run_again():
        raise ValueError(
            "Each process runs the script once more to find `function`, and "
            "would start processes of its own. Received: a call of "
            f"`launch.run({qualname}, ...)` in such a process. Put the call "
            'below `if __name__ == "__main__":`.'
        )
    if not _is_importable(function, module, qualname):
        raise ValueError(
            "`function` must stand at the top level of a module or script, "
            "so that each process can import it by name. Received: "
            f"{function!r}. Move a lambda, a function inside another one or "
            "one typed into a notebook to a file of its own."
        )
    checks.check(
        isinstance(args, tuple | list), "args", args, "a tuple of arguments"
    )
    checks.check(
        isinstance(kwargs, dict) and all(isinstance(k, str) for k in kwargs),
        "kwargs",
        kwargs,
        "a dictionary from names of arguments",
    )
    try:
        arguments = pickle.dumps((tuple(args), dict(kwargs)))
    except Exception as error:  # whatever an object's own method raises
        raise ValueError(
            "`args` and `kwargs` are sent to the processes, so they must "
            f"pickle. Received: args={args!r}, kwargs={kwargs!r}. Create other "
            f"objects inside the function. Python says: {error}"
        ) from error
    main = None
    if module == "__main__" or b"__main__" in arguments:
        main = _main(args, kwargs)
    return {
        "module": module,
        "qualname": qualname,
        "arguments": arguments,
        "main": main,
        "sys_path": [os.path.abspath(p) for p in sys.path],
    }


def _main(args, kwargs):
    """`(name, path)` of the main module; a script has no name."""
    main = sys.modules["__main__"]
    if not hasattr(main, "__file__"):
        raise ValueError(
            "`args` and `kwargs` are sent to the processes, which cannot "
            "import a class that was typed into a notebook or a shell. "
            f"Received: args={args!r}, kwargs={kwargs!r}. Move it to a file of "
            "its own."
        )
    name = getattr(main.__spec__, "name", None)
    if name == "__main__":  # a folder or an archive that is run
        name = None
    return name, os.path.abspath(main.__file__)


def _check_env(env):
    checks.check(
        env is None
        or (
            isinstance(env, dict)
            and all(isinstance(x, str) for item in env.items() for x in item)
            and all(name and "=" not in name for name in env)
            and not any("\0" in x for item in env.items() for x in item)
        ),
        "env",
        env,
        "None or a dictionary of strings, from names to values, as an "
        "environment can hold them",
    )


def _is_importable(function, module, qualname):
    if not callable(function) or not isinstance(module, str):
        return False
    if not isinstance(qualname, str):
        return False
    found = sys.modules.get(module)
    if module == "__main__" and not hasattr(found, "__file__"):
        return False
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found is function
