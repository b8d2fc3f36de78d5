"""Ranks of `launch` whose scripts run in forks of one process that has imported torch, which takes seconds in each.

For tests of jobs that train. Launcher, agents and workers are the real ones; a test of how ranks start, or of how they
are ended, starts real ranks: here the script runs in a process beside them, see `rank_in_fork.py`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import json
import os
import select
import signal
import socket
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from harness.launch.command import code_of, wait_until
from harness.launch.rank_in_fork import SOCKET_NAME
from harness.train.forked import end_as_interpreter, start_fork

from launcher.base import processes

_RANK_IN_FORK = Path(__file__).with_name("rank_in_fork.py")
_INTERVAL_S = 0.02
_NUM_STREAMS = 3
_folders: dict[str, tempfile.TemporaryDirectory[str]] = {}  # by what is preloaded


def in_forks(*command: str | Path, preload: str = "") -> list[str | Path]:
    """Return the last words of a command of `launch` whose script runs in forks; starts the process that forks.

    command: script and arguments. preload: a module that is imported once for all, beside torch.
    """
    if preload not in _folders:
        _folders[preload] = tempfile.TemporaryDirectory(prefix="forks-")  # as long as this process
        start_fork(functools.partial(_serve, _socket_of(preload)), preload)
        wait_until(_socket_of(preload).exists, "the server of forks")
    return ["--env", f"{SOCKET_NAME}={_socket_of(preload)}", _RANK_IN_FORK, *command]


def _socket_of(preload: str) -> Path:
    return Path(_folders[preload].name, "socket")


def _serve(path: Path) -> None:
    ranks: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        bound = path.with_suffix(".bound")
        listener.bind(str(bound))
        listener.listen()
        bound.rename(path)
        while True:
            if select.select([listener], [], [], _INTERVAL_S)[0]:
                connection, _ = listener.accept()
                ranks[_start(connection)] = connection
            for pid, connection in list(ranks.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with contextlib.suppress(BrokenPipeError):  # the rank's process was killed
                        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                    ranks.pop(pid).close()
                elif select.select([connection], [], [], 0)[0]:  # the rank's process was killed
                    os.kill(pid, signal.SIGKILL)


def _start(connection: socket.socket) -> int:
    """Start the fork that a rank asks for; return its process id."""
    our_pid = os.getpid()
    text, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, _NUM_STREAMS)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
    pid = os.fork()
    if pid == 0:
        try:
            processes.die_with_parent(our_pid)
            os.setsid()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            _run(json.loads(text))
        finally:
            os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(b"%d\n" % pid)
    return pid


def _run(request: dict[str, Any]) -> None:
    """Do in this fork what the worker does in a process that was started for a rank."""
    from launcher import worker

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    script, *arguments = request["argv"]
    main = types.ModuleType("__main__")
    vars(main)["__loader__"] = importlib.machinery.SourceFileLoader("__main__", script)
    sys.modules["__main__"] = main
    sys.path[:0] = [path for path in request["environ"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = ["start.py", "script", script, *arguments]
    worker._RANK_PID = os.getpid()
    worker._forget_this_package = lambda: None  # to import it again takes a second
    end_as_interpreter(code_of(worker.main))
