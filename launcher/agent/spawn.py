"""Start the ranks of one node, and read what each has left: its error record, its stacks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import marshal
import os
import subprocess

from launcher.agent.wire import JOURNAL, RESULT, STDERR, STDOUT, Spawn, SpawnFailed, Trace, is_sound_record
from launcher.base import env
from launcher.base.errors import LauncherError, UsageError
from launcher.base.private_files import write_private
from launcher.base.processes import allow_files, allow_tracing, die_with_parent, give_limit, original_limit
from launcher.base.progress import NO_PROGRESS, make_counter
from launcher.base.units import format_bytes
from launcher.cluster.devices import Devices, all_devices, rank_devices
from launcher.journal.trace_request import TraceRequest, pipe_of
from launcher.transport.command import own_argv, package_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from launcher.base.progress import RankProgress

WORKER_MODULE = "launcher.worker"
_MAX_VARIABLE_BYTES = 128 << 10  # MAX_ARG_STRLEN of Linux, for a variable or an argument; all together: ulimit -s
_FILES_A_RANK = 4  # its three pipes and its counter; one pipe more where it makes a function call, or is traced
_OWN_FILES = 24  # the agent's own, and those that are open while a rank is started
_PIPE_BYTES = 1 << 20  # what a rank can write before it waits for the agent
_MAX_LEFT_BYTES = 4 << 20  # of a file that a rank has left
_NUM_RECORDED = "2000"  # collectives in torch's flight recorder: its own default, since torch has one that is not 0
_USE_AGENT_STORE = (
    "TORCHELASTIC_USE_AGENT_STORE"  # with it rank 0 would connect to torchrun's store in place of starting one
)
_LIBRARY = os.path.dirname(os.__file__)
_FRAMES_OF = ("start.py", "worker.py", os.path.join("api", "rank.py"))  # lead to the user's code
OWN_THREADS = ("launcher/compat/collectives.py", "launcher/journal/rank.py")  # of a rank
_HINTS = {
    errno.EAGAIN: "the limit of processes is reached: see ulimit -u, and pids.max of the container or cgroup",
    errno.EMFILE: "the limit of open files is reached: see ulimit -n",
    errno.ENFILE: "the host's limit of open files is reached: see /proc/sys/fs/file-max",
    errno.ENOMEM: "the host has too little memory: start fewer ranks on it",
    errno.ENOSPC: "make room there, or let TMPDIR name a folder on another disk",
    errno.EROFS: "let TMPDIR name a folder that can be written to; containers often have none but a mounted one",
    errno.EFBIG: "the limit of the size of files is reached: see ulimit -f, or let TMPDIR name a folder without one",
    errno.EDQUOT: "make room there, or let TMPDIR name a folder on another disk",
}


class RankProcess:
    """One rank's process, its pipes and files, and what is known of its end."""

    def __init__(
        self,
        number: int,
        process: subprocess.Popen[bytes],
        streams: dict[int, str],
        files: dict[str, str],
        progress_fd: int,
    ) -> None:
        """streams: open descriptors -> what `Output.stream` calls them. files: by the variables that name them."""
        self.number, self.process, self.streams, self.progress_fd = number, process, streams, progress_fd
        self.error_file, self.stacks_file = files[env.ERROR_FILE.name], files[env.STACKS_FILE.name]
        self.torch_error_file = files[env.TORCHELASTIC_ERROR_FILE.name]
        self.engine_file = files[env.ENGINE_FILE.name]
        self.collectives_file = files[env.COLLECTIVES_FILE.name]
        self.trace_file = files[env.TRACE_FILE.name]
        self.crash_file, self.num_crash_bytes = files[env.CRASH_FILE.name], 0  # that were read from it
        self.progress: RankProgress = NO_PROGRESS  # as last sent
        self.is_program = False  # not Python, as far as is known
        self.reads_journal = False  # before the next heartbeat, too: there may be more in its pipe
        self.status: int | None = None  # exit code or minus the signal, None while it runs
        self.record: dict[str, Any] | None = None  # the error record its worker left, while it still runs perhaps
        self.ended_s = 0.0  # monotonic clock, set together with `status`
        self.max_rss_bytes = 0
        self.oom: str | None = None  # evidence of the kernel's out-of-memory killer

    @property
    def pid(self) -> int:
        return self.process.pid

    def close_stream(self, descriptor: int) -> None:
        """Close our end of a pipe."""
        pipe = {STDOUT: self.process.stdout, STDERR: self.process.stderr}.get(self.streams.pop(descriptor))
        if pipe is not None:
            pipe.close()
        else:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of the rank's counter; its pipes close when they are drained."""
        os.close(self.progress_fd)


@functools.cache
def _devices_here() -> Devices:
    return all_devices()


def check_devices(spec: Spawn) -> None:
    """Check that this host has a GPU for every slot, or none at all. Raises: UsageError."""
    tokens = [
        token for rank_env in spec.rank_envs for token in rank_env.get(env.CUDA_VISIBLE_DEVICES.name, "").split(",")
    ]
    num_devices = len(_devices_here().tokens)
    missing = sorted({int(token) for token in tokens if token.isdigit() and int(token) >= num_devices})
    if missing and num_devices:
        raise UsageError(
            f"slot {missing[0]} has no GPU: this host has {num_devices}", hint="lower slots= in the hostfile"
        )


def check_files(num_ranks: int, *, has_call: bool = False) -> None:
    """Raise the limit of open files as far as that many ranks need it. Raises: LauncherError when it stays too low."""
    num_needed = _OWN_FILES + (_FILES_A_RANK + has_call) * num_ranks
    limit = allow_files(num_needed)
    if limit < num_needed:
        raise LauncherError(
            f"{num_ranks} ranks need {num_needed} open files on this host, and the hard limit there is {limit}",
            hint="start fewer ranks on the host, or have the limit raised (see ulimit -Hn): nofile in"
            " /etc/security/limits.conf, LimitNOFILE of a service, --ulimit nofile of a container",
        )


def rank_environment(
    spec: Spawn, rank_env: dict[str, str], own: dict[str, str], cores: list[int] | None
) -> dict[str, str]:
    """Return the whole environment of one rank: the agent's own, the launcher's, the job's, the rank's, ours.

    Later ones win, but for those of the agent that a setup has changed: they win over the launcher's.
    """
    own_rank_env = dict(rank_env)
    tokens = own_rank_env.pop(env.CUDA_VISIBLE_DEVICES.name, None)
    environment = _environment(spec) | own_rank_env
    if _USE_AGENT_STORE not in spec.env:  # torchrun's, around `launch`
        environment.pop(_USE_AGENT_STORE, None)
    if not _is_folder(environment.get("PWD"), spec.cwd):  # over SSH the agent was started elsewhere
        environment["PWD"] = spec.cwd
    # Without a GPU slots are numbers of ranks. What this process was given counts without device files, too.
    has_devices = bool(_devices_here().tokens or environment.get(env.CUDA_VISIBLE_DEVICES.name))
    if tokens == "" or (tokens and has_devices):  # in the variable of this host's vendor, and in no other
        environment.pop(env.CUDA_VISIBLE_DEVICES.name, None)
        environment |= rank_devices(tokens, int(rank_env.get(env.LOCAL_RANK.name, "0")), _devices_here())
    if env.OMP_NUM_THREADS.name not in environment:
        # Without it every rank would start a thread per core of the whole machine.
        num_shared = len(os.sched_getaffinity(0)) // len(spec.rank_envs)
        num_threads = max(1, num_shared if cores is None else len(cores))
        environment[env.OMP_NUM_THREADS.name] = str(num_threads)
    if env.NCCL_BUFFER_SIZE.name not in environment:
        environment.setdefault(env.FR_BUFFER_SIZE.name, _NUM_RECORDED)
    environment[env.JOB_ID.name] = spec.job_id
    environment["PYTHONUNBUFFERED"] = "1"
    return environment | own


def _environment(spec: Spawn) -> dict[str, str]:
    """Return the variables of all ranks of this node."""
    own = dict(os.environ)
    changed = own.pop(env.SETUP_CHANGED.name, "").split()
    forwarded = {name: value for name, value in spec.forwarded_env.items() if name not in changed}
    return {**own, **forwarded, **spec.env}


def _is_folder(path: str | None, folder: str) -> bool:
    """Whether a path, maybe through links, leads to `folder`."""
    if path is None or path == folder:
        return path is not None
    with contextlib.suppress(OSError):
        return os.path.samefile(path, folder)
    return False


def spawn_rank(
    spec: Spawn, local_rank: int, scratch: str, cores: list[int] | None = None, call_fd: int | None = None
) -> RankProcess:
    """Start one rank as the leader of a session of its own, on `cores` where given. Raises: OSError.

    call_fd: holds the function call that the rank makes.
    """
    rank_env = spec.rank_envs[local_rank]
    number = int(rank_env[env.RANK.name])
    kind, target, *arguments = spec.commands[local_rank if len(spec.commands) > 1 else 0]
    files = {
        variable.name: os.path.join(scratch, f"{name}_{number}")
        for name, variable in (
            ("error", env.ERROR_FILE),
            ("crash", env.CRASH_FILE),
            ("stacks", env.STACKS_FILE),
            ("torch_error", env.TORCHELASTIC_ERROR_FILE),
            ("engine", env.ENGINE_FILE),
            ("progress", env.PROGRESS_FILE),
            ("collectives", env.COLLECTIVES_FILE),
            ("trace", env.TRACE_FILE),
        )
    }
    passed = {env.ARGUMENTS_FD.name: _memory_file(marshal.dumps(arguments))}  # variable -> descriptor
    more_streams: dict[int, str] = {}  # descriptors of ours that belong to the rank
    if spec.has_journal:
        journal_fd, passed[env.JOURNAL_FD.name] = os.pipe()
        more_streams[journal_fd] = JOURNAL
    if call_fd is not None:
        result_fd, passed[env.RESULT_FD.name] = os.pipe()
        more_streams[result_fd] = RESULT
        passed[env.CALL_FD.name] = os.dup(call_fd)
    kept = list(more_streams)
    input_fd, is_alone = _take_input(), rank_env.get(env.WORLD_SIZE.name) == "1"
    own_cores, agent_pid = os.sched_getaffinity(0), os.getpid()
    open_files = spec.open_files or original_limit()

    def prepare_child() -> None:
        """Runs in the child, and exec keeps it. The agent has one thread: no lock can be held forever there."""
        die_with_parent(agent_pid)
        give_limit(open_files)
        allow_tracing(agent_pid)

    try:
        with contextlib.suppress(OSError):  # a file system without pipes: the rank does not listen then
            os.mkfifo(files[env.COLLECTIVES_FILE.name] + env.REQUEST_SUFFIX, 0o600)
        progress_fd = make_counter(files[env.PROGRESS_FILE.name])
        kept.append(progress_fd)
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
            env=rank_environment(spec, rank_env, files | {name: str(fd) for name, fd in passed.items()}, cores),
            pass_fds=tuple(passed.values()),
            start_new_session=True,
            preexec_fn=prepare_child,
            bufsize=0,
        )
    except BaseException:
        for descriptor in kept:
            os.close(descriptor)
        raise
    finally:
        os.sched_setaffinity(0, own_cores)
        for descriptor in (*passed.values(), *([] if input_fd is None else [input_fd])):
            os.close(descriptor)
    if process.stdout is None or process.stderr is None:
        raise RuntimeError("Popen made no pipe")
    streams = {process.stdout.fileno(): STDOUT, process.stderr.fileno(): STDERR, **more_streams}
    for descriptor in streams:
        _make_ready(descriptor)
    rank = RankProcess(number, process, streams, files, progress_fd)
    rank.is_program = kind == "program"
    return rank


def _make_ready(descriptor: int) -> None:
    """Prepare our end of a rank's pipe for the loop that reads it."""
    os.set_blocking(descriptor, False)
    with contextlib.suppress(OSError):  # above the user's pipe limit the default size has to do
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def ask_for_trace(rank: RankProcess, order: Trace) -> int:
    """Leave a rank the request for a trace; return the descriptor that its answer comes from. Raises: OSError."""
    pipe = pipe_of(rank.trace_file)
    os.mkfifo(pipe, 0o600)
    # Not to wait for the rank, which may never open its end; the pipe has no end before it has done so.
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _make_ready(descriptor)
        request = TraceRequest(order.id, os.getpid(), [rank.number], order.num_steps, order.first_step)
        write_private(rank.trace_file, request.encoded())
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def withdraw_trace(rank: RankProcess) -> None:
    """Take back what `ask_for_trace` has left."""
    for path in (rank.trace_file, pipe_of(rank.trace_file)):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _take_input() -> int | None:
    """Return the descriptor of the launcher's standard input, None when it is not for a rank or has been given out."""
    descriptor = os.environ.pop(env.STDIN_FD.name, None)
    return None if descriptor is None else int(descriptor)


def spawn_failure(error: OSError | ValueError | LauncherError, spec: Spawn) -> SpawnFailed:
    """Return why the ranks could not be started, and what helps."""
    if isinstance(error, LauncherError):
        (finding,) = error.diagnostics
        return SpawnFailed(finding.message, finding.hint, isinstance(error, UsageError))
    reason = getattr(error, "strerror", None) or str(error)
    number, filename = getattr(error, "errno", None), getattr(error, "filename", None)
    if number == errno.E2BIG:
        variables = _environment(spec) | spec.rank_envs[0]
        name, size = max(((n, len(os.fsencode(v))) for n, v in variables.items()), key=lambda pair: pair[1])
        return SpawnFailed(
            f"environment and arguments are larger than the kernel passes on (the largest variable is {name},"
            f" {format_bytes(size)}; one may have {format_bytes(_MAX_VARIABLE_BYTES)})",
            "put long values into a file that the script reads",
        )
    if filename == spec.cwd:
        return SpawnFailed(
            f"working directory {filename}: {reason}",
            "create it on this host, or start from a folder that every host has, such as one on a shared disk",
        )
    return SpawnFailed(f"{filename}: {reason}" if filename else reason, _HINTS.get(number or 0))


def _memory_file(data: bytes) -> int:
    """Return a descriptor to read `data` from: a rank's arguments, which no process list may show."""
    descriptor = os.memfd_create("arguments")
    _write_all(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def append_to_call(descriptor: int | None, data: bytes) -> int:
    """Add a piece to the function call that ranks make; returns the descriptor that holds it. Raises: OSError."""
    descriptor = os.memfd_create("call") if descriptor is None else descriptor
    _write_all(descriptor, data)
    return descriptor


def _write_all(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)


# ---- What a rank has left. The paths stand in its environment: anything may be found there ----


def read_record(path: str) -> dict[str, Any] | None:
    """Return the record of a worker; None when none was left, or something that no worker wrote."""
    record = read_object(path)
    return record if record is not None and is_sound_record(record) else None


def read_object(path: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, such as torch's `@record` leaves; None where there is none."""
    try:
        # Not to wait for a writer, should a pipe stand there.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = json.loads(file.read(_MAX_LEFT_BYTES) or b"")
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def without_own_frames(text: str) -> str:
    """Return the stacks that faulthandler has written without the frames that have led to the user's code.

    They are the last of each thread: our own, and those of runpy between them and a module or folder. Threads of our
    own are left out, but for one that has crashed.
    """
    files = tuple(f'  File "{os.path.join(package_root(), path)}"' for path in OWN_THREADS)
    threads = text.split("\n\n")
    text = "\n\n".join(
        thread for thread in threads if thread.startswith("Current thread") or not any(file in thread for file in files)
    )
    own = [os.path.join(package_root(), "launcher", name) for name in _FRAMES_OF]
    starts = tuple(f'  File "{path}"' for path in (*own, "<frozen runpy>", os.path.join(_LIBRARY, "runpy.py")))
    kept: list[str] = []
    for line in reversed(text.splitlines(keepends=True)):
        is_last = not kept or not kept[-1].startswith("  File ")
        if not (is_last and line.startswith(starts)):
            kept.append(line)
    return "".join(reversed(kept))
