"""Start the ranks of one node."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import marshal
import os
import subprocess

from launcher.agent.wire import Spawn
from launcher.base import env
from launcher.base.processes import die_with_parent
from launcher.base.progress import NOTHING, make_counter
from launcher.base.units import format_bytes
from launcher.cluster.devices import local_device_tokens
from launcher.transport.command import own_argv

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from launcher.base.progress import Told

WORKER_MODULE = "launcher.worker"
_MAX_VARIABLE_BYTES = 128 << 10  # MAX_ARG_STRLEN of Linux, for a variable or an argument; all together: ulimit -s
_PIPE_BYTES = 1 << 20  # what a rank can write before it waits for the agent


class Rank:
    """One rank's process, its pipes and files, and what is known of its end."""

    def __init__(
        self,
        number: int,
        process: subprocess.Popen[bytes],
        streams: dict[int, str],
        error_file: str,
        stacks_file: str,
        progress_fd: int,
    ) -> None:
        """streams: open descriptors -> "stdout" or "stderr"."""
        self.number, self.process, self.streams = number, process, streams
        self.error_file, self.stacks_file, self.progress_fd = error_file, stacks_file, progress_fd
        self.progress: Told = NOTHING  # as last sent
        self.status: int | None = None  # exit code or minus the signal, None while it runs
        self.record: dict[str, Any] | None = None  # the error record its worker left, while it still runs perhaps
        self.ended_s = 0.0  # monotonic clock, set together with `status`
        self.max_rss_bytes = 0
        self.oom: str | None = None  # evidence of the kernel's out-of-memory killer

    @property
    def pid(self) -> int:
        return self.process.pid

    def close(self) -> None:
        """Let go of the rank's counter; its pipes close when they are drained."""
        os.close(self.progress_fd)


def missing_devices(spec: Spawn) -> str | None:
    """Say which slots this host has no GPU for; None when all are there, or when the host has no GPU at all."""
    tokens = [
        token for rank_env in spec.rank_envs for token in rank_env.get(env.CUDA_VISIBLE_DEVICES.name, "").split(",")
    ]
    num_devices = len(local_device_tokens({}))
    missing = sorted({int(token) for token in tokens if token.isdigit() and int(token) >= num_devices})
    if not missing or num_devices == 0:
        return None
    return f"slot {missing[0]} has no GPU: this host has {num_devices}; lower slots= in the hostfile"


def rank_environment(
    spec: Spawn, rank_env: dict[str, str], own: dict[str, str], cores: list[int] | None
) -> dict[str, str]:
    """Return the whole environment of one rank: the agent's own, the job's, the rank's, ours; later ones win."""
    environment = {**os.environ, **spec.env, **rank_env}
    if cores is not None:
        environment[env.OMP_NUM_THREADS.name] = str(len(cores))
    elif env.OMP_NUM_THREADS.name not in environment:
        # Without it every rank would start a thread per core of the whole machine.
        num_threads = max(1, len(os.sched_getaffinity(0)) // len(spec.rank_envs))
        environment[env.OMP_NUM_THREADS.name] = str(num_threads)
    environment[env.JOB_ID.name] = spec.job_id
    environment["PYTHONUNBUFFERED"] = "1"
    return environment | own


def spawn_rank(spec: Spawn, local_rank: int, scratch: str, cores: list[int] | None = None) -> Rank:
    """Start one rank as the leader of a session of its own, on `cores` where given. Raises: OSError."""
    rank_env = spec.rank_envs[local_rank]
    number = int(rank_env[env.RANK.name])
    error_file, stacks_file, progress_file = (
        os.path.join(scratch, f"{name}_{number}") for name in ("error", "stacks", "progress")
    )
    kind, target, *arguments = spec.commands[local_rank if len(spec.commands) > 1 else 0]
    arguments_fd = _memory_file(marshal.dumps(arguments))
    own = {
        env.ERROR_FILE.name: error_file,
        env.STACKS_FILE.name: stacks_file,
        env.PROGRESS_FILE.name: progress_file,
        env.ARGUMENTS_FD.name: str(arguments_fd),
    }
    input_fd, is_alone = _take_input(), rank_env.get(env.WORLD_SIZE.name) == "1"
    own_cores, agent_pid = os.sched_getaffinity(0), os.getpid()
    try:
        if cores is not None:
            os.sched_setaffinity(0, cores)  # a child starts with its parent's
        process = subprocess.Popen(
            [*own_argv(WORKER_MODULE), kind, target],
            # Of several ranks, each would read a part of what is typed. A terminal that controls another session,
            # as the user's does here, can be read.
            stdin=input_fd if input_fd is not None and is_alone else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=spec.cwd,
            env=rank_environment(spec, rank_env, own, cores),
            pass_fds=(arguments_fd,),
            start_new_session=True,
            # Runs in the child, and exec keeps it. The agent has one thread: no lock can be held for ever there.
            preexec_fn=lambda: die_with_parent(agent_pid),
            bufsize=0,
        )
    finally:
        os.sched_setaffinity(0, own_cores)
        os.close(arguments_fd)
        if input_fd is not None:
            os.close(input_fd)
    streams = {}
    for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
        if stream is None:
            raise RuntimeError("Popen made no pipe")
        os.set_blocking(stream.fileno(), False)
        with contextlib.suppress(OSError):  # above the user's pipe limit the default size has to do
            fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        streams[stream.fileno()] = name
    return Rank(number, process, streams, error_file, stacks_file, make_counter(progress_file))


def _take_input() -> int | None:
    """Return the descriptor of the launcher's standard input, None when it is not for a rank or has been given out."""
    descriptor = os.environ.pop(env.STDIN_FD.name, None)
    return None if descriptor is None else int(descriptor)


def why_not_started(error: OSError | ValueError, spec: Spawn) -> str:
    """Say why the ranks could not be started, and what helps where the kernel's own words do not."""
    if isinstance(error, OSError) and error.errno == errno.E2BIG:
        variables = {**os.environ, **spec.env, **spec.rank_envs[0]}
        name, size = max(((n, len(os.fsencode(v))) for n, v in variables.items()), key=lambda pair: pair[1])
        return (
            f"environment and arguments are larger than the kernel passes on (its largest variable is {name},"
            f" {format_bytes(size)}; one may have {format_bytes(_MAX_VARIABLE_BYTES)}): put long values into a file"
            " that the script reads"
        )
    reason = getattr(error, "strerror", None) or str(error)
    filename = getattr(error, "filename", None)
    return f"{filename}: {reason}" if filename else reason


def _memory_file(data: bytes) -> int:
    """Return a descriptor to read `data` from: a rank's arguments, which no process list may show."""
    descriptor = os.memfd_create("arguments")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
