"""What every rank starts as: run the user's script, module or program; leave an error record when it fails.

    python -u -m launcher.worker script  train.py
    python -u -m launcher.worker module  package.train
    python -u -m launcher.worker program ./train.sh

The arguments come through the descriptor named by LAUNCH_ARGUMENTS_FD: a command line is open to every user of the
machine, and arguments may hold a token. (A program is started with them; there is no other way.)

The script runs as `python train.py` would run it: it is `__main__`, its folder is `sys.path[0]`, its exit code is the
process's. Standard library only: torch is the script's business. Every rank of every job imports this file: what is
needed for one kind of command or for a failure only is imported there.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import io
import marshal
import os
import sys
import time
import types

from launcher.base import env, preemption
from launcher.base.signals import STACKS_SIGNAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_MAX_TRACEBACK_CHARS = 64_000
_RANK_PID = os.getpid()
_NOTEBOOK_RANK = os.path.join(os.path.dirname(__file__), "notebook", "rank.py")


def main() -> None:
    """Run the command in `sys.argv`; does not return when it fails."""
    with contextlib.suppress(ValueError, io.UnsupportedOperation):
        faulthandler.enable()  # a crash in native code leaves the Python stack in the log
    _dump_stacks_on_demand()
    preemption.listen()
    kind, target = sys.argv[1:3]
    sys.argv[:] = [target, *_take_arguments()]
    if kind == "program":
        _exec_program(target)
    try:
        if kind == "script":
            _run_script(target)
        else:
            _run_module(target)
    except SystemExit as error:
        if _exit_code(error) != 0:
            _leave_record(error, None)
        raise
    except BaseException as error:  # noqa: BLE001  # whatever ends a rank must leave a record
        trace = _user_traceback(error)
        sys.last_value = error  # as `python train.py` sets it: exit handlers can tell a failure from a normal end
        is_recorded = _leave_record(error, trace)
        if not is_recorded or sys.excepthook is not sys.__excepthook__:
            _call_hook(error, trace)
        sys.exit(_exit_code(error))


def _call_hook(error: BaseException, trace: TracebackType | None) -> None:
    """Show an error by the script's hook; what the hook itself raises is shown too, as python does."""
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except SystemExit:
        raise
    except BaseException as failure:  # noqa: BLE001  # a broken hook must not hide the error behind our frames
        below = failure.__traceback__.tb_next if failure.__traceback__ is not None else None
        sys.__excepthook__(type(failure), failure.with_traceback(below), below)


def _dump_stacks_on_demand() -> None:
    """Let STACKS_SIGNAL write all Python stacks into the file the agent named; also while native code hangs."""
    path = os.environ.pop(env.STACKS_FILE.name, None)
    if path is None:
        return
    with contextlib.suppress(OSError):
        file = open(path, "ab", buffering=0)  # noqa: SIM115  # as long as the process lives
        faulthandler.register(STACKS_SIGNAL, file, all_threads=True)


def _take_arguments() -> list[str]:
    descriptor = os.environ.pop(env.ARGUMENTS_FD.name, None)
    if descriptor is None:
        return sys.argv[3:]
    with open(int(descriptor), "rb") as file:
        arguments: list[str] = marshal.load(file)  # from the agent, which runs the same interpreter
    return arguments


def _run_module(name: str) -> None:
    import runpy

    _set_first_path(os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_script(path: str) -> None:
    _set_first_path(os.path.dirname(os.path.abspath(path)))
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        sys.exit(f"{path}: {error.strerror} (in {os.getcwd()})")
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec"), module.__dict__)


def _exec_program(path: str) -> None:
    preemption.ignore()
    try:
        os.execvp(path, sys.argv)
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
    except ValueError as error:  # "", a NUL or half a character from a job file: no program can be given these
        sys.exit(f"{path!r}: the program and its arguments cannot be passed on: {error}")


def _set_first_path(folder: str) -> None:
    """Put `folder` first, in place of the working directory that `python -m` has put there."""
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    sys.path.insert(0, folder)


def _user_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames of the launcher's own files and of runpy."""
    import runpy

    own_files = (__file__, runpy.__file__, "<frozen runpy>", _NOTEBOOK_RANK)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in own_files:
        trace = trace.tb_next
    return trace


def _leave_record(error: BaseException, trace: TracebackType | None) -> bool:
    """Leave the error for the agent, which passes it on: into this rank's log, and to the screen if it is the first.

    Printed here, the tracebacks of a thousand victims would bury the one that matters. Returns whether it was left.
    """
    path = os.environ.get(env.ERROR_FILE.name)
    if path is None or os.getpid() != _RANK_PID:  # a fork of the rank may fail: that is not yet the rank's end
        return False
    temporary = f"{path}.part"
    try:
        import json
        import signal

        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(_record(error, trace), file)
        os.replace(temporary, path)
    except Exception:  # noqa: BLE001  # neither a full disk nor what the script did to this process may hide its failure
        return False
    with contextlib.suppress(OSError):  # the agent shall look at once: exit handlers and threads may run on for long
        os.kill(os.getppid(), signal.SIGCHLD)
    return True


def _record(error: BaseException, trace: TracebackType | None) -> dict[str, object]:
    import traceback

    # SystemExit has no traceback to show. Others may have one without frames: a syntax error of the script itself.
    is_exit = isinstance(error, SystemExit)
    lines = [] if is_exit else traceback.format_exception(type(error), error, trace)
    return {
        "host": os.uname().nodename,
        "rank": int(os.environ.get(env.RANK.name, "-1")),
        "pid": os.getpid(),
        "time_s": time.monotonic(),
        "type": type(error).__name__,
        "exit_code": _exit_code(error),
        "message": _shortened(_text_of(error)),
        "traceback": _shortened("".join(lines)),
    }


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001  # a message that cannot be made is no reason to lose the record
        return f"<the message of {type(error).__name__} cannot be shown>"


def _shortened(text: str) -> str:
    """Leave the middle of a long text out: the beginning says where, the end says what."""
    half = _MAX_TRACEBACK_CHARS // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n[...]\n{text[-half:]}"


def _exit_code(error: BaseException) -> int:
    """Return what `python` exits with after this exception."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return (error.code if abs(error.code) < 1 << 63 else -1) & 0xFF  # python takes -1 for what fits no long
        return int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


if __name__ == "__main__":
    main()
