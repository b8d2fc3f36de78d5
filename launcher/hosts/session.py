"""What one host is to run, what it has answered, and how much of that is kept."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from launcher.base import env
from launcher.base.errors import Diagnostic, LauncherError
from launcher.cluster.cluster import Host
from launcher.fleet.host_link import HostLink

MAX_OUTPUT_BYTES = 64 << 20  # of one host; what follows is dropped, and the result says so
MAX_HELD_BYTES = 512 << 20  # of all hosts together, as long as it was not shown
GRACE_S = 5.0  # between SIGTERM and SIGKILL
FOLDER_HINT = "run this from a folder that every host has, such as /"


@dataclass(frozen=True)
class Task:
    """What one host is to run."""

    host: Host
    command: tuple[str, ...]  # under a shell a program and its arguments; for agents what launcher.worker takes
    cwd: str


@dataclass
class HostResult:
    """What one host did; complete once the run has returned it."""

    host: Host
    transport: str = ""  # name of what reaches it
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    is_cut: bool = False  # it printed more than MAX_OUTPUT_BYTES, or than was left of MAX_HELD_BYTES
    exit_code: int | None = None  # as a shell shows it; None: it never ran, or its end is not known
    error: Diagnostic | None = None  # why there is no exit code
    is_late: bool = False  # it was stopped because it took too long
    connect_s: float | None = None  # until the process at the far end was started
    round_trip_s: float | None = None  # one question and its answer
    started_s: float | None = None  # wall clock of this machine when the program was asked to start ...
    answered_s: float | None = None  # ... and when its first output came
    port: int | None = None  # one that was free on the host

    @property
    def printed(self) -> str:
        """What it wrote to stdout, as text."""
        return self.stdout.decode("utf-8", "replace")


class Held:
    """How much output of all hosts is kept in memory. Safe from several threads."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._lock = threading.Lock()

    def take(self, wanted_bytes: int) -> int:
        """Return how many of `wanted_bytes` more may be kept, and count them."""
        with self._lock:
            granted_bytes = max(0, min(wanted_bytes, MAX_HELD_BYTES - self._num_bytes))
            self._num_bytes += granted_bytes
        return granted_bytes

    def drop(self, result: HostResult) -> None:
        """Forget the output of a host that has ended."""
        with self._lock:
            self._num_bytes -= len(result.stdout) + len(result.stderr)
        result.stdout.clear()
        result.stderr.clear()


class HostRun:
    """One host's part of a run: its task and the result that grows."""

    def __init__(self, number: int, task: Task, job_id: str, held: Held) -> None:
        """number: of the host, from 0. held: counts the output of all hosts."""
        self.number, self.task, self.job_id = number, task, job_id
        self.result = HostResult(task.host)
        self._held = held

    @property
    def variables(self) -> dict[str, str]:
        """What tells the program which of the hosts it runs on."""
        return {env.RANK.name: str(self.number), env.NODE_RANK.name: str(self.number)}

    def keep(self, data: bytes, stream: bytearray) -> None:
        """Add to what the host printed, up to the most that is kept."""
        result = self.result
        if result.answered_s is None:
            result.answered_s = time.time()
        room = MAX_OUTPUT_BYTES - len(result.stdout) - len(result.stderr)
        kept = self._held.take(max(0, min(len(data), room)))
        result.is_cut = result.is_cut or len(data) > kept
        stream += data[:kept]

    def fail(self, error: Exception | str) -> None:
        """Keep why this host has no exit code, unless it has one or the reason is known already."""
        if self.result.error is None and self.result.exit_code is None:
            found = error.diagnostics[0] if isinstance(error, LauncherError) else Diagnostic(str(error))
            self.result.error = Diagnostic(found.message, self.result.host.name, found.hint, found.shared)

    def conclude(self, link: HostLink) -> None:
        """Complete the result of a host that has ended."""
        self.result.transport = link.transport
        if link.channel is not None:
            self.result.connect_s = link.opened_s - link.start_s
