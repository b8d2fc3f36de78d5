"""Make this process rank 0 of a world of 1, and take it back."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from types import TracebackType

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.cluster.cluster import Cluster, Host, place
from launcher.plan.variables import rank_variables

_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, eq=False)
class _Before:
    """What `restore` brings back."""

    variables: dict[str, str | None]  # None: was not set
    had_process_group: bool


_active: _Before | None = None


class Emulation:
    """The environment of a job of one rank, from `emulate()` until `restore()` or the end of its `with` block."""

    def __init__(self, before: _Before, *, is_owner: bool) -> None:
        self._before = before
        self._is_owner = is_owner

    def restore(self) -> None:
        """Put the environment back as it was, and end a process group that was started since. Idempotent."""
        global _active
        if _active is not self._before:
            return
        _active = None
        if not self._before.had_process_group:
            _end_process_group()
        for name, value in self._before.variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def __enter__(self) -> Emulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_owner:  # a block inside another emulation leaves that one alone
            self.restore()


def emulate(num_gpus: int = 1) -> Emulation:
    """Make this process a job of one rank: set RANK, WORLD_SIZE, MASTER_PORT (a free one) and their like.

    Undone by `restore()` of what it returns, or at the end of a `with emulate():` block. A second call while
    one is in force changes nothing and returns another handle to it.

    Raises: UsageError for `num_gpus` other than 1, and in a rank of a real job.
    """
    global _active
    if num_gpus != 1:
        raise UsageError(
            f"emulate() cannot make {num_gpus} ranks: a notebook is one process, and a rank needs a process of its own",
            hint=f"launcher.notebook.run(fn, num_gpus={max(num_gpus, 2)}) runs a function on ranks,"
            " %%launch a whole cell",
        )
    if env.JOB_ID.name in os.environ and os.environ.get(env.WORLD_SIZE.name, "1") != "1":
        raise UsageError(
            f"this process is rank {os.environ.get(env.RANK.name)} of a job of {os.environ[env.WORLD_SIZE.name]}",
            hint="leave emulate() out of scripts that `launch` starts: they have their environment",
        )
    if _active is not None:
        return Emulation(_active, is_owner=False)
    placement = place(Cluster((Host("localhost", (0,)),)))
    (variables,) = rank_variables(placement, placement.nodes[0], (_ADDRESS, _free_port()), ())
    del variables[env.CUDA_VISIBLE_DEVICES.name]  # torch may have read it already, and which GPU is the user's choice
    _active = _Before({name: os.environ.get(name) for name in variables}, _has_process_group())
    os.environ.update(variables)
    return Emulation(_active, is_owner=True)


def _has_process_group() -> bool:
    # Whoever has a process group has imported torch; this side of the package never does.
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _end_process_group() -> None:
    if _has_process_group():
        sys.modules["torch.distributed"].destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_ADDRESS, 0))
        port: int = probe.getsockname()[1]
    return port
