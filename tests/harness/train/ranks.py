"""Run a function on real gloo ranks. Processes live as long as the test session, and torch is imported once for all.

A body that takes longer than its deadline makes every rank dump its stacks, and only that test fails.
"""

from __future__ import annotations

import atexit
import copy
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import pytest
from harness.launch.command import DEADLINE_S, ROOT, slowness
from harness.ports import free_port

from launcher.base import processes

NUM_THREADS = int(os.environ.get("TEST_RANK_THREADS", "1"))  # of a rank, and of what `one_thread` compares with it
Body = Callable[..., Any]


class RankPool:
    """`world_size` processes in one gloo group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = torch_forks()
        port = free_port()
        self._stacks = tempfile.NamedTemporaryFile(prefix="stacks-", suffix=".txt")  # noqa: SIM115  # as long as the pool
        self._ranks: list[tuple[Any, Connection]] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world_size, port, self._stacks.name)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._ranks.append((process, ours))

    def run(self, body: Body, *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
        """Call `body(rank, world_size, *args)` on every rank and return the results in rank order."""
        for _, pipe in self._ranks:
            pipe.send((body, args))
        results, end_s = [], time.monotonic() + deadline_s * slowness()
        for rank, (_, pipe) in enumerate(self._ranks):
            if not pipe.poll(max(0.0, end_s - time.monotonic())):
                raise AssertionError(f"rank {rank} hung:\n{self._dump_and_close()}")
            ok, value = pipe.recv()
            if not ok:
                self.close()
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results.append(value)
        return results

    def run_to_the_end(self, body: Body, *args: Any, deadline_s: float = DEADLINE_S) -> list[int | None]:
        """Call a body that ends its process; return the exit codes, None of a rank that hangs. Closes the pool."""
        for _, pipe in self._ranks:
            pipe.send((body, args))
        end_s = time.monotonic() + deadline_s * slowness()
        for process, _ in self._ranks:
            process.join(max(0.0, end_s - time.monotonic()))
        codes = [process.exitcode for process, _ in self._ranks]
        self.close()
        return codes

    def close(self) -> None:
        """End the processes."""
        if _pools.get(self.world_size) is self:
            del _pools[self.world_size]
        for process, _ in self._ranks:
            process.kill()
            process.join()

    def _dump_and_close(self) -> str:
        for process, _ in self._ranks:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        self._stacks.seek(0)
        text = self._stacks.read().decode(errors="replace")
        self.close()
        return text


def torch_forks() -> Any:
    """Return what starts processes from a server that has imported torch: a rank takes a moment in place of seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.train.torch_imports"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # read when torch is loaded
        # Before Python 3.13 the server searches its own path alone.
        patch.setenv("PYTHONPATH", f"{ROOT / 'tests'}{os.pathsep}{ROOT}", prepend=os.pathsep)
        forkserver.ensure_running()
    return context


_pools: dict[int, RankPool] = {}


def run_on_ranks(world_size: int, body: Body, *args: Any) -> list[Any]:
    """Call a module-level function on `world_size` ranks; see `RankPool.run`."""
    if world_size not in _pools:
        _pools[world_size] = RankPool(world_size)
    return _pools[world_size].run(body, *args)


_results: dict[tuple[Any, ...], list[Any]] = {}


def run_once_on_ranks(world_size: int, body: Body, *args: Any) -> list[Any]:
    """Do as `run_on_ranks`, once for each body and arguments: for the run that several others are compared with.

    Arguments are compared by their `repr`. Callers must not change the results.
    """
    key = (world_size, body.__module__, body.__qualname__, repr(args))
    if key not in _results:
        # Tensors that came from another process hold a file descriptor each as long as they live; copies do not.
        _results[key] = copy.deepcopy(run_on_ranks(world_size, body, *args))
    return _results[key]


@atexit.register
def _close_all() -> None:
    for pool in list(_pools.values()):
        pool.close()


def _serve(pipe: Connection, rank: int, world_size: int, port: int, stacks_path: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS=str(NUM_THREADS),
    )
    processes.die_with_parent(os.getppid())  # a test run that is killed leaves no rank behind
    stacks = open(stacks_path, "a")  # noqa: SIM115  # faulthandler needs it as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    import torch

    import launcher

    torch.set_num_threads(NUM_THREADS)
    launcher.init_distributed()
    gc.freeze()  # searches for garbage leave out what was imported: each would go through, and copy, what forks share
    while True:
        try:
            body, args = pipe.recv()
        except EOFError:
            sys.exit(0)
        try:
            pipe.send((True, body(rank, world_size, *args)))
        except BaseException:  # noqa: BLE001  # the test that asked gets it as text
            pipe.send((False, traceback.format_exc()))
