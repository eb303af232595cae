"""Each rank's program: starts the engine, then the user's program."""

import importlib
import os
import pickle
import runpy
import signal
import sys
import traceback

from keras_sparsity import collectives
from keras_sparsity.health import journal, watch
from keras_sparsity.launch._boot import SHOWN_ERROR_VARIABLE

# Path of the file to which rank 0 writes the error that it shows.
_shown_path = None


def main(arguments):
    """Runs a rank, or the check of a host before there is one.

    Args:
        arguments: List of strings: `"script"`, `"module"`, `"call"` or
            `"probe"`; the engine; and further arguments of that kind.
    """
    global _shown_path
    # Not for the program's child processes.
    _shown_path = os.environ.pop(SHOWN_ERROR_VARIABLE, None)
    kind, engine, *target = arguments
    if kind == "probe":
        from keras_sparsity.launch import _probe

        sys.exit(_probe.main(engine, *target))
    # Before the program's first line: TensorFlow's own collectives must be
    # configured before its first operation.
    try:
        collectives.start(engine)
    except collectives.CollectiveError as error:
        # Another rank failed: this one's traceback says nothing.
        sys.exit(_report(error.with_traceback(None)))
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if kind == "call":
        code = _run_call(*target)
    else:
        code = _run_program(kind, target)
    # Not `return`, so that threads and atexit functions end as usual.
    sys.exit(code)


def _run_program(kind, target):
    """Runs a script or a module as `python` does; returns the exit code."""
    num_sites = journal.current().num_sites
    sys.argv = list(target)
    try:
        if kind == "script":
            # As `python` does, so that `__file__` is right in any folder;
            # with it `sys.argv[0]`, which `python` leaves as typed.
            path = os.path.abspath(target[0])
            runpy.run_path(path, run_name="__main__")
        else:
            runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code not in (None, 0):
            # The other ranks must not wait for this one.
            watch.report_exception(end)
        else:
            _warn_if_without_messages(num_sites)
        raise
    except BaseException as error:
        return _report(error)
    _warn_if_without_messages(num_sites)
    return 0


def _warn_if_without_messages(num_sites):
    """Says so if no process of several has sent another one anything.

    A program may send messages by other libraries, which are not seen; before
    it there were `num_sites` calls of collectives.
    """
    known = collectives.current()
    has_sent = journal.current().num_sites > num_sites
    if has_sent or known.size == 1 or known.rank:
        return
    print(
        f"keras-sparsity: this program ended, and its {known.size} processes "
        "have sent each other nothing by this library: each trained alone, "
        "unless Horovod or tf.distribute joined them. To train one model "
        "together, compile it inside of `strategy.scope()`, with "
        "`strategy = ks.HybridStrategy()`.",
        file=sys.stderr,
    )


def _report(error):
    """Shows an exception without the frames of the launcher; exit code."""
    # By the hook, which `health/watch.py` and others may have set.
    frames = _users_frames(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(frames), frames)
    if _shown_path:
        text = "".join(traceback.format_exception_only(error))
        _write(_shown_path, text.encode(errors="replace"))
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 1


def _users_frames(frames):
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    position = frames
    while position and position.tb_frame.f_code.co_filename in ours:
        position = position.tb_next
    # A script that does not compile or exist has no frame.
    return position


def _run_call(call_path, result_path):
    """Runs the function of `launch.run`; returns the exit code."""
    try:
        with open(call_path, "rb") as file:
            call = pickle.load(file)
        if call["main"]:
            _load_main(*call["main"])
        function = importlib.import_module(call["module"])
        for name in call["qualname"].split("."):
            function = getattr(function, name)
        args, kwargs = pickle.loads(call["arguments"])
        result = pickle.dumps((True, function(*args, **kwargs)))
    except SystemExit as end:
        if end.code in (None, 0):
            _write(result_path, pickle.dumps((True, None)))
        else:
            watch.report_exception(end)
        raise
    except BaseException as error:
        frames = _users_frames(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, frames))
        _write(result_path, pickle.dumps((False, text)))
        return _report(error)
    _write(result_path, result)
    return 0


def _load_main(name, path):
    """Runs the launching script as `__mp_main__`, as multiprocessing does.

    So `if __name__ == "__main__":` is false in it. One that `python -m` has
    run by its name has relative imports.
    """
    if name is None:
        contents = runpy.run_path(path, run_name="__mp_main__")
    else:
        contents = runpy.run_module(name, run_name="__mp_main__")
    module = type(sys)("__mp_main__")
    module.__dict__.update(contents)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _write(path, content):
    with open(path + ".part", "wb") as file:
        file.write(content)
    os.replace(path + ".part", path)
