"""Start the ranks of one node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from dataclasses import dataclass
from typing import Any

from launcher.agent.wire import Spawn
from launcher.base import env
from launcher.transport.command import agent_argv

WORKER_MODULE = "launcher.worker"
_PIPE_BYTES = 1 << 20  # what a rank can write before it waits for the agent


@dataclass
class Rank:
    """One rank's process and its pipes."""

    number: int
    process: subprocess.Popen[bytes]
    streams: dict[int, str]  # open descriptors -> "stdout" or "stderr"
    error_file: str
    status: int | None = None  # exit code or minus the signal, None while it runs
    record: dict[str, Any] | None = None  # the error record its worker left
    ended_s: float = 0.0  # monotonic clock, set together with `status`

    @property
    def pid(self) -> int:
        return self.process.pid


def rank_environment(spec: Spawn, rank_env: dict[str, str], error_file: str) -> dict[str, str]:
    """Return the whole environment of one rank: the agent's own, the job's, the rank's; later ones win."""
    environment = {**os.environ, **spec.env, **rank_env}
    if env.OMP_NUM_THREADS.name not in environment:
        # Without it every rank would start a thread per core of the whole machine.
        num_threads = max(1, len(os.sched_getaffinity(0)) // len(spec.rank_envs))
        environment[env.OMP_NUM_THREADS.name] = str(num_threads)
    environment[env.JOB_ID.name] = spec.job_id
    environment[env.ERROR_FILE.name] = error_file
    environment[env.AGENT_PID.name] = str(os.getpid())
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def spawn_rank(spec: Spawn, local_rank: int, scratch: str) -> Rank:
    """Start one rank as the leader of a session of its own. Raises: OSError."""
    rank_env = spec.rank_envs[local_rank]
    number = int(rank_env[env.RANK.name])
    error_file = os.path.join(scratch, f"error_{number}.json")
    process = subprocess.Popen(
        [*agent_argv(module=WORKER_MODULE), *spec.commands[local_rank]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=spec.cwd,
        env=rank_environment(spec, rank_env, error_file),
        start_new_session=True,
        bufsize=0,
    )
    streams = {}
    for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
        if stream is None:
            raise RuntimeError("Popen made no pipe")
        os.set_blocking(stream.fileno(), False)
        with contextlib.suppress(OSError):  # above the user's pipe limit the default size has to do
            fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        streams[stream.fileno()] = name
    return Rank(number, process, streams, error_file)
