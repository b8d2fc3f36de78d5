"""What every rank starts as: run the user's script, module or program; leave an error record when it fails.

    start.py FOLDER launcher.worker script   train.py
    start.py FOLDER launcher.worker module   package.train
    start.py FOLDER launcher.worker program  ./train.sh
    start.py FOLDER launcher.worker internal launcher.agent.probe

The arguments come through the descriptor named by LAUNCH_ARGUMENTS_FD: a command line is open to every user of the
machine, and arguments may hold a token. (A program is started with them; there is no other way.)

A script runs exactly as `python train.py` runs it, and a module as `python -m`: the process was started like that, with
`start.py` in the script's place, so that `__main__` and `sys.path` need a few changes only. This package leaves
`sys.modules` before, as a script may have a launcher.py of its own; therefore everything that is needed until the end
is imported at the top. Standard library only: torch is the script's business. Every rank of every job imports this
file: what is needed for one kind of command or for a failure only is imported there.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import io
import marshal
import os
import sys
import time

from launcher.base import env, preemption
from launcher.base.private_files import write_private
from launcher.base.progress import update_progress
from launcher.base.signals import STACKS_SIGNAL
from launcher.compat import install

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, NoReturn

_MAX_TRACEBACK_CHARS = 64_000
_RANK_PID = os.getpid()
_PACKAGE = os.path.dirname(__file__)
_OWN_NAMES = ("start.py", "api/rank.py", "rehearse/main.py", "rehearse/trial.py")
_OWN_FILES = (__file__, *(os.path.join(_PACKAGE, path) for path in _OWN_NAMES))
_CHANGES_FILE = os.path.join(_PACKAGE, "compat", "changes.py")
_RUNPY_FILES = ("<frozen runpy>", os.path.join(os.path.dirname(os.__file__), "runpy.py"))
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_NO_INPUT = (
    "ranks have no standard input, except the only one of a job on this machine that runs in the foreground: try"
    " --num-gpus 1, or see with `launch stacks` where ranks stand"
)


def main() -> None:
    """Run the command in `sys.argv`; does not return when it fails."""
    _keep_journal()
    update_progress(phase="")  # python has started; what the script does, it may say itself
    _dump_stacks()
    kind, target = sys.argv[1:3]
    has_agent = env.ARGUMENTS_FD.name in os.environ
    sys.argv[:] = [target, *_take_arguments()]
    if kind == "program":
        _exec_program(target, has_agent=has_agent)
    preemption.listen()
    _explain_missing_input()
    try:
        install()  # `import deepspeed` of the script finds the engine
        if kind == "internal":
            _run_module(target)
        else:
            _forget_this_package()
            run_target(kind, target)
    except SystemExit as error:
        if _exit_code(error) != 0:
            _leave_record(error, None)
        raise
    except BaseException as error:  # noqa: BLE001  # whatever ends a rank must leave a record
        trace = user_traceback(error)
        sys.last_value = error  # as `python train.py` sets it: exit handlers can tell a failure from a normal end
        is_recorded = _leave_record(error, trace)
        if not is_recorded or sys.excepthook is not sys.__excepthook__:
            _call_hook(error, trace)
        sys.exit(_exit_code(error))
    finally:
        if os.getpid() == _RANK_PID:  # and no fork of it that has come back here
            update_progress(phase="exiting")  # exit handlers and threads may take long


def run_target(kind: str, target: str) -> None:
    """Run a script or a module as python does. kind: `script` or `module`."""
    if kind == "module":
        _put_first_on_path(os.getcwd())
        _run_module(target)
    else:
        _run_script(target)


def _forget_this_package() -> None:
    """Let the script's `import launcher` find what it finds under `python`: its own file of that name, or us again."""
    for name in [name for name in sys.modules if name == "launcher" or name.startswith("launcher.")]:
        del sys.modules[name]
    namespace = vars(sys.modules["__main__"])
    for name in [name for name in namespace if not name.startswith("__")]:  # what start.py has left there
        del namespace[name]
    namespace["__doc__"] = None


def _call_hook(error: BaseException, trace: TracebackType | None) -> None:
    """Show an error by the script's hook; what the hook itself raises is shown too, as python does."""
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except SystemExit:
        raise
    except BaseException as failure:  # noqa: BLE001  # a broken hook must not hide the error behind our frames
        below = failure.__traceback__.tb_next if failure.__traceback__ is not None else None
        sys.__excepthook__(type(failure), failure.with_traceback(below), below)


def _dump_stacks() -> None:
    """Let a crash in native code, and STACKS_SIGNAL, write the Python stacks into the files that the agent named.

    It leaves our frames out of what a crash has written, and adds the rest to the rank's output.
    """
    crashes, stacks = (os.environ.pop(name.name, None) for name in (env.CRASH_FILE, env.STACKS_FILE))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with contextlib.suppress(OSError):  # the files are open as long as the process lives
        if crashes is not None:
            faulthandler.enable(os.open(crashes, flags, 0o600))
        if stacks is not None:
            faulthandler.register(STACKS_SIGNAL, os.open(stacks, flags, 0o600), all_threads=True)


def _keep_journal() -> None:
    """Make the journal's descriptor this process's own: no child may write there."""
    descriptor = os.environ.get(env.JOURNAL_FD.name, "")
    if descriptor.isdigit():
        os.set_inheritable(int(descriptor), False)
        os.environ[env.JOURNAL_FD.name] = f"{_RANK_PID}:{descriptor}"


def _take_arguments() -> list[str]:
    descriptor = os.environ.pop(env.ARGUMENTS_FD.name, None)
    if descriptor is None:
        return sys.argv[3:]
    with open(int(descriptor), "rb") as file:
        arguments: list[str] = marshal.load(file)  # from the agent, which runs the same interpreter
    return arguments


def _run_module(name: str) -> None:
    """Do what `python -m NAME` does once the interpreter is up."""
    _run_as_main(name, is_option=True)


def _run_as_main(name: str, *, is_option: bool) -> None:
    """Run a module in `__main__`'s own namespace. is_option: for `python -m`, not for a folder or archive."""
    import runpy

    # Private, and what the interpreter itself calls. The public functions run a module in a namespace that is gone when
    # threads and exit handlers still need it, and that spawned children look for in vain.
    run: Callable[[str, bool], object] = vars(runpy)["_run_module_as_main"]
    run(name, is_option)


def _run_script(path: str) -> None:
    """Do what `python PATH` does once the interpreter is up, for source, a .pyc file, a folder or an archive."""
    absolute = os.path.join(os.getcwd(), path)  # what python makes of it: "..", "./" and links stay
    if _is_importable_from(absolute):
        sys.path.insert(0, absolute)
        _run_as_main("__main__", is_option=False)
        return
    _put_first_on_path(os.path.dirname(os.path.realpath(path)))
    namespace = vars(sys.modules["__main__"])
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        sys.exit(f"{path}: {error.strerror} (in {os.getcwd()})")
    if path.endswith(".pyc"):
        from importlib.machinery import SourcelessFileLoader

        loader: Any = SourcelessFileLoader("__main__", absolute)
        code = loader.get_code("__main__")
    else:
        loader = type(namespace["__loader__"])("__main__", absolute)  # that of source files: start.py is one
        code = compile(source, absolute, "exec", dont_inherit=True)
    namespace.update(__file__=absolute, __loader__=loader)
    exec(code, namespace)


def _is_importable_from(path: str) -> bool:
    """Whether `path` is a folder or an archive of modules, as python finds it out."""
    for hook in sys.path_hooks:
        with contextlib.suppress(ImportError):
            hook(path)
            return True
    return False


def _put_first_on_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # python -P, PYTHONSAFEPATH
        sys.path.insert(0, folder)


def _exec_program(path: str, *, has_agent: bool) -> None:
    preemption.leave_to_program(is_asked_for=has_agent)
    try:
        os.execvp(path, sys.argv)
    except OSError as error:  # the codes of a shell
        sys.stderr.write(f"{path}: {error.strerror}\n")
        sys.exit(_NOT_FOUND if error.errno in (errno.ENOENT, errno.ENOTDIR) else _NOT_EXECUTABLE)
    except ValueError as error:  # "", a NUL or half a character from a job file: no program can be given these
        sys.exit(f"{path!r}: the program and its arguments cannot be passed on: {error}")


def _explain_missing_input() -> None:
    """Let `breakpoint()` say why it cannot stop here; a debugger of the user's own choice is left alone."""
    if not _has_input() and os.environ.get("PYTHONBREAKPOINT") in (None, "", "pdb.set_trace"):
        sys.breakpointhook = _refuse_to_stop


def _has_input() -> bool:
    """Whether the agent has given this rank the standard input of `launch`, and not /dev/null."""
    try:
        return os.fstat(0).st_rdev != os.makedev(1, 3)
    except OSError:
        return False


def _refuse_to_stop(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(f"breakpoint(): {_NO_INPUT}")


def user_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback without the launcher's own frames and those of runpy around the user's."""
    trace = error.__traceback__
    while trace is not None and _is_own(trace):
        trace = trace.tb_next
    below = trace
    while below is not None and below.tb_next is not None:
        if below.tb_next.tb_next is None and _is_own(below.tb_next):
            below.tb_next = None  # `_refuse_to_stop`
            break
        below = below.tb_next
    return _without_loader(trace)


def _without_loader(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback of an import without our loader's frame and python's, which python leaves out of its own."""
    traces = []
    while trace is not None:
        traces.append(trace)
        trace = trace.tb_next
    files = [trace.tb_frame.f_code.co_filename for trace in traces]
    if _CHANGES_FILE in files:
        is_shown = [name != _CHANGES_FILE and not name.startswith("<frozen importlib.") for name in files]
        traces = [trace for trace, shown in zip(traces, is_shown, strict=True) if shown]
        for trace, below in zip(traces, [*traces[1:], None], strict=True):
            trace.tb_next = below
    return traces[0] if traces else None


def _is_own(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename in (*_OWN_FILES, *_RUNPY_FILES)


def _leave_record(error: BaseException, trace: TracebackType | None) -> bool:
    """Leave the error for the agent, which passes it on: into this rank's log, and to the screen if it is the first.

    Printed here, the tracebacks of a thousand victims would bury the one that matters. Returns whether it was left.
    """
    path = os.environ.get(env.ERROR_FILE.name)
    if path is None or os.getpid() != _RANK_PID:  # a fork of the rank may fail: that is not yet the rank's end
        return False
    try:
        import json
        import signal

        write_private(path, json.dumps(_record(error, trace)).encode("utf-8", "backslashreplace"))
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
    if _lacks_input(error):
        lines.append(f"{_NO_INPUT}\n")
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


def _lacks_input(error: BaseException) -> bool:
    """Whether `input()` or a debugger has found the end of a standard input that was never there."""
    is_about_input = isinstance(error, EOFError) and _text_of(error) == "EOF when reading a line"
    return (is_about_input or type(error).__name__ == "BdbQuit") and not _has_input()


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001  # without the message the record is still wanted
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
