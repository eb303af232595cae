"""What each rank runs: the engine comes up, then the user's program."""

import importlib
import os
import pickle
import runpy
import signal
import sys
import traceback

from keras_sparsity import collectives
from keras_sparsity.collectives import watch
from keras_sparsity.launch._boot import SHOWN_ERROR_VARIABLE

# Where rank 0 keeps the error that it shows on the terminal.
_shown_path = None


def main(arguments):
    """Runs a rank, or the check of a host before there is one.

    Args:
        arguments: List of strings: `"script"`, `"module"`, `"call"` or
            `"probe"`; the engine; and what that takes.
    """
    global _shown_path
    # Not for what the program starts.
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
        # Another rank failed meanwhile: where this one was says nothing.
        sys.exit(_report(error.with_traceback(None)))
    # TensorFlow's own collectives catch SIGTERM and go on (seen on 2.18 and
    # 2.21): as in any Python program it should end the rank, unless the
    # program itself sets a handler.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if kind == "call":
        code = _run_call(*target)
    else:
        code = _run_program(kind, target)
    # Not `return`: the interpreter's own end (atexit, threads) comes with it.
    sys.exit(code)


def _run_program(kind, target):
    """Runs a script or a module as `python` does; returns the exit code."""
    sys.argv = list(target)
    try:
        if kind == "script":
            runpy.run_path(target[0], run_name="__main__")
        else:
            runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code not in (None, 0):
            # The other ranks must not wait for one that gave up.
            watch.report_exception(end)
        raise
    except BaseException as error:
        return _report(error)
    return 0


def _report(error):
    """Shows an exception without the frames of the launcher; exit code."""
    # Through the hook, which the failure watch and others may have set.
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
    # A script that does not compile or exist has no frame of its own.
    return position


def _run_call(call_path, result_path):
    """Runs the function that `launch.run` was given; returns the exit code."""
    try:
        with open(call_path, "rb") as file:
            call = pickle.load(file)
        if call["main"]:
            _load_main(call["main"])
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


def _load_main(path):
    """Runs the launching script under another name than `__main__`.

    In the manner of multiprocessing, and under its name, which is the one
    that people know from "if __name__ == ...".
    """
    contents = runpy.run_path(path, run_name="__mp_main__")
    module = type(sys)("__mp_main__")
    module.__dict__.update(contents)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _write(path, content):
    with open(path + ".part", "wb") as file:
        file.write(content)
    os.replace(path + ".part", path)
