"""Scripts whose processes are forks of one that has imported torch: an import takes seconds of a processor.

For tests of what a script does once it runs. Tests of how ranks start, and of how a job ends, start them with `launch`.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from harness.launch.command import DEADLINE_S, ROOT, Result, code_of, slowness
from harness.ports import free_port
from harness.train.ranks import torch_forks

from launcher.base import processes

_GRACE_S = 2.0  # between the first failure and the end of the other ranks, as `launch` ends them
_INTERVAL_S = 0.02
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Target = Path | Callable[[], object]


@dataclass(frozen=True)
class _Job:
    folder: Path
    target: Target
    arguments: list[str]
    num_ranks: int
    env: dict[str, str]
    deadline_s: float

    @property
    def out(self) -> Path:
        return self.folder / "job.out"

    @property
    def err(self) -> Path:
        return self.folder / "job.err"


def run_ranks(
    folder: Path,
    num_ranks: int,
    target: Target,
    *arguments: str | Path,
    env: dict[str, str] | None = None,
    preload: str = "",
    deadline_s: float = DEADLINE_S,
) -> Result:
    """Run a script, or call a module's function, on that many ranks of one world; return what all have written.

    num_ranks: 0 for one process without the variables of ranks, as of plain python.
    folder: where they run. preload: a module that is imported once for all jobs with it, beside torch.

    The code is that of the rank that fails first, of a signal 128 more than its number; the others are ended then.
    """
    words = list(map(str, arguments))
    # ROOT: what a process of its own would find there.
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {}), "OMP_NUM_THREADS": "1"}
    job = _Job(folder, target, words, num_ranks, env, deadline_s)
    pipe = _server(preload)
    pipe.send(job)
    code = pipe.recv()
    out, err = (path.read_text(errors="replace") for path in (job.out, job.err))
    assert code is not None, f"the ranks hung:\n{out}\n{err}"
    return Result(code, out, err)


def start_fork(target: Callable[[], object], preload: str = "") -> None:
    """Call a module's function, or a partial of one, in a fork that lives as long as the process it is a fork of."""
    pipe = _server(preload)
    pipe.send(target)
    pipe.recv()


_servers: dict[str, Connection] = {}


def _server(preload: str) -> Connection:
    if preload not in _servers:
        _servers[preload] = _start(preload)
    return _servers[preload]


def _start(preload: str) -> Connection:
    context = torch_forks()
    ours, theirs = context.Pipe()
    context.Process(target=_serve, args=(theirs, preload), daemon=True).start()
    theirs.close()  # the end of the process is the end of the pipe then
    return ours  # type: ignore[no-any-return]


def _serve(jobs: Connection, preload: str) -> None:
    processes.die_with_parent(os.getppid())
    # Searches for garbage leave out what is imported: they would copy the pages that forks share.
    gc.disable()
    if preload:
        importlib.import_module(preload)
    gc.freeze()
    gc.enable()
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            os._exit(0)
        jobs.send(_run(job) if isinstance(job, _Job) else _fork(job))


def _fork(target: Callable[[], object]) -> None:
    our_pid = os.getpid()
    if os.fork() == 0:
        try:
            processes.die_with_parent(our_pid)
            target()
        finally:
            os._exit(1)


def _run(job: _Job) -> int | None:
    """Run a job to its end; return its code, None of one that hangs."""
    port, our_pid, ranks = free_port(), os.getpid(), {}
    for path in (job.out, job.err):
        path.write_bytes(b"")
    for rank in range(max(1, job.num_ranks)):
        pid = os.fork()
        if pid == 0:
            try:
                processes.die_with_parent(our_pid)
                _become(job, rank, port)
            finally:
                os._exit(1)
        ranks[rank] = pid
    first, ends_s, end_s = 0, None, time.monotonic() + job.deadline_s * slowness()
    while ranks:
        for rank, pid in list(ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del ranks[rank]
            code = os.waitstatus_to_exitcode(status)
            if code and not first:
                first, ends_s = code if code > 0 else 128 - code, time.monotonic() + _GRACE_S
        now_s = time.monotonic()
        is_hung = now_s > end_s
        if is_hung or (ends_s is not None and now_s > ends_s):
            for pid in ranks.values():
                os.kill(pid, signal.SIGABRT if is_hung else signal.SIGKILL)  # faulthandler writes the stacks
                os.waitpid(pid, 0)
            return None if is_hung else first
        time.sleep(_INTERVAL_S)
    return first


def _become(job: _Job, rank: int, port: int) -> None:
    """Turn this fork into a process that was started for the job, and end it as an interpreter ends."""
    os.chdir(job.folder)
    os.environ.clear()
    os.environ.update({name: value for name, value in job.env.items() if name not in _OF_RANKS or not job.num_ranks})
    if job.num_ranks:
        variables = (rank, job.num_ranks, rank, job.num_ranks, "127.0.0.1", port)
        os.environ.update(zip(_OF_RANKS, map(str, variables), strict=True))
    for number, path in enumerate((Path(os.devnull), job.out, job.err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    faulthandler.enable()
    sys.argv = [str(job.target), *job.arguments]
    sys.path[:0] = [path for path in job.env["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    end_as_interpreter(code_of(lambda: _call(job.target)))


def end_as_interpreter(code: int) -> NoReturn:
    """End this process as an interpreter ends."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _call(target: Target) -> None:
    if not isinstance(target, Path):
        target()
        return
    sys.path.insert(0, str(target.parent))
    main = types.ModuleType("__main__")
    vars(main)["__file__"] = str(target)
    sys.modules["__main__"] = main
    exec(compile(target.read_text(), target, "exec"), vars(main))
