"""What each rank runs first: the engine comes up, then the user's program."""

import argparse
import importlib
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback

from keras_sparsity import collectives
from keras_sparsity.collectives import watch
from keras_sparsity.launch.processes import DUMP_LETTER, LIFELINE_VARIABLE

_SIGNALS = {
    b"I": signal.SIGINT,
    b"T": signal.SIGTERM,
    b"H": signal.SIGHUP,
    b"K": signal.SIGKILL,
}
_ORPHAN_GRACE_SECONDS = 3.0


def main(argv=None):
    options = _parse(argv)
    _hold_lifeline()
    # Before the program's first line: TensorFlow's own collectives must be
    # configured before its first operation.
    try:
        collectives.start(options.engine)
    except collectives.CollectiveError as error:
        # Another rank failed meanwhile: where this one was says nothing.
        sys.exit(_report(error.with_traceback(None)))
    # TensorFlow's own collectives catch SIGTERM and go on (seen on 2.18 and
    # 2.21): as in any Python program it should end the rank, unless the
    # program itself sets a handler.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if options.kind == "call":
        code = _run_call(*options.target)
    else:
        code = _run_program(options.kind, options.target)
    # Not `return`: the interpreter's own end (atexit, threads) comes with it.
    sys.exit(code)


def _parse(argv):
    parser = argparse.ArgumentParser(prog="keras_sparsity.launch._child")
    parser.add_argument("--engine")
    parser.add_argument("kind", choices=("script", "module", "call"))
    parser.add_argument("target", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def _hold_lifeline():
    descriptor = os.environ.pop(LIFELINE_VARIABLE, None)
    if descriptor is None:
        return
    try:
        # Behind ssh this is not yet a group of its own.
        os.setpgid(0, 0)
    except PermissionError:
        pass  # It leads its session already.
    descriptor = int(descriptor)
    os.set_inheritable(descriptor, False)
    threading.Thread(
        target=_watch_lifeline,
        args=(descriptor,),
        name="keras_sparsity lifeline",
        daemon=True,
    ).start()


def _watch_lifeline(descriptor):
    """Does what the launcher asks for, and ends with it."""
    while letter := os.read(descriptor, 1):
        if letter == DUMP_LETTER:
            _print_stacks()
        elif letter in _SIGNALS:
            os.killpg(os.getpgrp(), _SIGNALS[letter])
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(_ORPHAN_GRACE_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _print_stacks():
    frames = sys._current_frames()
    for thread in threading.enumerate():
        # Our own threads wait, always at the same place.
        if not thread.name.startswith("keras_sparsity"):
            stack = traceback.format_stack(frames.get(thread.ident))
            print(f"{thread.name} is at:\n{''.join(stack)}", file=sys.stderr)
    sys.stderr.flush()


def _run_program(kind, target):
    """Runs a script or a module as `python` does; returns the exit code."""
    sys.argv = list(target)
    try:
        if kind == "script":
            if not getattr(sys.flags, "safe_path", False):
                folder = os.path.dirname(os.path.realpath(target[0]))
                sys.path[0] = folder
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
        sys.path[:] = call["sys_path"]
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


if __name__ == "__main__":
    main()
