"""Which failure was the first: the one that all others followed from.

When a rank dies, its peers fail too, often within milliseconds and with errors of their own about a lost connection.
The order in which such news reaches the controller says little, so every failure is kept, with the time of its death,
and the cause is chosen at the end. All times are our monotonic clock, which is never set; those of other hosts are
converted when they are compared: news of the first second come before it is well known how the clocks differ.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.agent.wire import Exited, Raised, SpawnFailed
from launcher.base.exit_codes import ExitCode, shell_code
from launcher.base.signals import term_is_notice
from launcher.fleet.agent_link import AgentLink
from launcher.job.collectives import Stuck
from launcher.job.events import Failure, FailureKind, describe_status, signal_name
from launcher.job.node import Node, Rank
from launcher.planner.ladder import DEVICE, HOST, EngineFacts

LAST_LINES = 15
# A rank that fails later than this after a failure did so because of it: clean-up code, lost peers.
_SLACK_S = 0.5
# How an error begins that says only that another rank has gone, never a cause if there is another failure: those of
# torch.distributed (NCCL, the store), and gloo's, which are RuntimeErrors that begin with a place in gloo's source:
# "[.../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:20916.". Only the lines
# of a traceback that name an exception count, the chained ones too: "connection refused" by a database is a cause, and
# so is any error of a project in a folder called gloo.
_LOST_PEER = re.compile(
    r"^(?:(?:torch\.distributed|torch\._C\._distributed_c10d)\.)?Dist(?:Backend|Network|Store)Error\b"
    r"|^RuntimeError: NCCL communicator was aborted"
    r"|^RuntimeError: \[\S*/gloo/(?:\w+/)*\w+\.(?:cc|h|cpp):\d+\] ",
    re.MULTILINE,
)
# What NCCL's watchdog writes before it aborts the process.
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout|what\(\):.*ProcessGroupNCCL")
# How an error that all ranks raise together names those on which it began: "rank 1: No space left on device".
_OF_RANK = re.compile(r"\brank (\d+): ")
# How an error begins that says that memory has ended: of a GPU, by torch or a library of the vendor; of the host, by
# torch's allocator, Python, numpy, the C++ library or the kernel (ENOMEM).
_DEVICE_MEMORY = re.compile(
    r"^(?:torch\.)?(?:cuda\.)?OutOfMemoryError\b"
    r"|^\w+(?:\.\w+)*: (?:CUDA|HIP|XPU|NPU) (?:error: )?out of memory"
    r"|^\w+(?:\.\w+)*: .*\bCU(?:BLAS|DNN|SPARSE)_STATUS_ALLOC_FAILED",
    re.MULTILINE,
)
_HOST_MEMORY = re.compile(
    r"^(?:[\w.]*\._)?(?:Array)?MemoryError\b"
    r"|^\w+(?:\.\w+)*: .*(?:DefaultCPUAllocator: (?:can't allocate|not enough) memory|\bstd::bad_alloc\b)"
    r"|^(?:OSError|RuntimeError): .*(?:\[Errno 12\] |\bCannot allocate memory\b)"  # not NCCL's, about ulimit -l
    r"|what\(\): +std::bad_alloc",
    re.MULTILINE,
)
# Exit codes of a rank that obeyed our SIGTERM, by itself or by a shell around it.
_STOPPED = (-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
_HINTS = {  # by the name of the exception
    "OutOfMemoryError": "the GPU's memory is full: a smaller micro-batch, activation checkpointing, a higher ZeRO stage"
    " or offload need less",
    "ModuleNotFoundError": "is it installed for the Python of that host's ranks, or its folder in PYTHONPATH?"
    " launch check compares the hosts",
}


@dataclass(frozen=True)
class Moment:
    """A time by the clock of a host, or by our monotonic one."""

    time_s: float
    host: AgentLink | None = None

    @property
    def ours_s(self) -> float:
        """By our clock, as far as is known now: what is known of a host's clock gets better with every heartbeat."""
        return self.time_s + (self.host.clock_offset_s if self.host is not None else 0.0)


@dataclass(frozen=True)
class Candidate:
    """A failure that may be the one which all others followed from."""

    is_lost_peer: bool  # it says of itself that another rank was gone before
    died: Moment
    failure: Failure
    of_ranks: frozenset[int] = frozenset()  # other ones that it names as those on which it began
    late_status: int | None = None  # how the rank ended, where that seemed to be our own doing


class RootCause:
    """Collects what failed, and decides which failure was first."""

    def __init__(self, start_s: float) -> None:
        """start_s: the start of the run."""
        self._start_s = start_s
        self._candidates: dict[Node | Rank, Candidate] = {}  # of hosts themselves, and of ranks
        self._hang: Candidate | None = None
        self._done: dict[Rank, Moment] = {}  # when ranks ended with 0
        self._stop_s: float | None = None
        self._slack_s = 0.0
        # The ranks know that the job will be preempted; where SIGTERM says so, Slurm notifies them, maybe before us.
        self.was_warned = term_is_notice()
        self.wants_requeue = False  # and one of them has ended because of it

    @property
    def cause(self) -> Failure | None:
        """The failure that the others followed from, None when nothing failed."""
        every = (self._hang, *self._candidates.values())
        counting = [candidate for candidate in every if candidate is not None and self._counts(candidate)]
        if not counting:
            return None
        failed = {candidate.failure.rank for candidate in counting}
        first = min(counting, key=lambda each: (each.is_lost_peer or bool(each.of_ranks & failed), each.died.ours_s))
        limit_s = first.died.ours_s + _SLACK_S
        early = sorted(rank.number for rank, done in self._done.items() if done.ours_s <= limit_s)
        if not (first.is_lost_peer and early):
            return first.failure
        return dataclasses.replace(
            first.failure,
            hint=f"{_named(early)} had exited with 0 before: do all ranks take the same number of steps, and get as"
            " many batches?",
        )

    def stopping(self, *, by_user: bool) -> None:
        """Record that the ranks are being stopped: deaths from now on are our own doing. The first call counts."""
        if self._stop_s is None:
            self._stop_s = time.monotonic()
            self._slack_s = 0.0 if by_user else _SLACK_S

    def add_exit(self, node: Node, rank: Rank, message: Exited) -> Failure | None:
        """Keep the end of a rank if it can be a cause; returns it then."""
        # One that had saved may be killed while its interpreter ends, where SIGTERM has its default action again.
        on_way_out = (message.record or {}).get("exit_code") if message.status < 0 else None
        if self.was_warned and ExitCode.REQUEUE in (message.status, on_way_out):
            self.wants_requeue = True  # the others may still be saving: none is stopped for it
            return None
        if message.status == 0 and self._stop_s is None:
            self._candidates.pop(rank, None)  # it had raised, but what ended it says that all is well
        died = Moment(float((message.record or {}).get("time_s", message.time_s)), node)
        if message.status == 0:
            self._done[rank] = died
            return None
        failure = rank_failure(node, rank, message, max(0.0, died.ours_s - self._start_s))
        candidate = Candidate(_is_about_lost_peer(message, failure), died, failure, _other_ranks(message))
        if self._may_be_cause(message.status, died.ours_s):
            self._candidates[rank] = candidate
            return failure
        earlier = self._candidates.get(rank)
        if earlier is None or earlier.late_status is not None:
            self._candidates[rank] = dataclasses.replace(candidate, late_status=message.status)
        return None

    def add_raised(self, node: Node, rank: Rank, message: Raised) -> None:
        """Keep what a rank has raised that has not ended yet; what is known at its end takes this one's place."""
        code, time_s = int(message.record["exit_code"]), float(message.record["time_s"])
        if not (self.was_warned and code == ExitCode.REQUEUE):  # its end is what asks for a requeue
            self.add_exit(node, rank, Exited(message.rank, code, time_s, message.record, 0, None))

    def add_host(self, node: Node, reason: str) -> None:
        """Keep the loss of a whole host."""
        self._add_host_failure(node, FailureKind.HOST_LOST, ExitCode.UNREACHABLE, reason)

    def add_not_started(self, node: Node, message: SpawnFailed) -> None:
        """Keep that a host could not start its ranks."""
        exit_code = ExitCode.USAGE if message.is_usage else ExitCode.FAILURE
        self._add_host_failure(node, FailureKind.NOT_STARTED, exit_code, message.reason, hint=message.hint)

    def add_absence(self, node: Node, away_s: float) -> None:
        """Keep that a host ended its ranks because the launcher was suspended for so long."""
        reason = f"launch was suspended for {away_s:.0f} s"
        self._add_host_failure(node, FailureKind.HOST_LOST, ExitCode.UNREACHABLE, reason, away_s=away_s)

    def add_hang(self, node: Node, rank: Rank, reason: str, stuck: Stuck | None = None) -> None:
        """Keep a rank that makes no progress; its stack is shown in place of a traceback.

        stuck: the collective that others wait in for it.
        """
        now_s = time.monotonic()
        failure = _failure_of(
            node,
            rank,
            exit_code=ExitCode.HANG,
            after_s=now_s - self._start_s,
            reason=reason,
            traceback=rank.stack or "",
            kind=FailureKind.RANK_HANGS,
            stuck=stuck,
        )
        self._hang = Candidate(False, Moment(now_s), failure)

    def _add_host_failure(self, node: Node, kind: FailureKind, exit_code: ExitCode, reason: str, **more: Any) -> None:
        if node not in self._candidates:  # its first failure counts
            now_s = time.monotonic()
            lines = node.channel.stderr_tail().splitlines() if node.channel is not None else []
            failure = Failure(
                host=node.name,
                exit_code=exit_code,
                after_s=now_s - self._start_s,
                reason=reason,
                last_lines=tuple(lines[-LAST_LINES:]),
                kind=kind,
                **more,
            )
            self._candidates[node] = Candidate(False, Moment(now_s), failure)

    def _counts(self, candidate: Candidate) -> bool:
        status = candidate.late_status
        return status is None or self._may_be_cause(status, candidate.died.ours_s)

    def _may_be_cause(self, status: int, died_s: float) -> bool:
        if self._stop_s is None:
            return True
        by_us = status in _STOPPED  # or by another process, a moment before
        return died_s <= self._stop_s + (0.0 if by_us else self._slack_s)


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _is_about_lost_peer(message: Exited, failure: Failure) -> bool:
    """Return whether a failure says of itself that another rank was gone before."""
    record = message.error
    if _LOST_PEER.search(f"{record.get('type')}: {record.get('message')}\n{failure.traceback}"):
        return True
    return message.status == -signal.SIGABRT and any(map(_WATCHDOG.search, failure.last_lines))


def _other_ranks(message: Exited) -> frozenset[int]:
    """Return the ranks that an error names as those on which it began, where this one is not among them."""
    named = frozenset(map(int, _OF_RANK.findall(str(message.error.get("message", "")))))
    return named if message.rank not in named else frozenset()


def memory_of(message: Exited, last_lines: Sequence[str] = ()) -> str | None:
    """Return whose memory has ended a rank, "device" or "host"; None where nothing says so.

    What it raised counts, also where another exception was raised from it, and the kernel's evidence of a kill.
    """
    if message.oom is not None:
        return HOST
    record = message.error
    text = f"{record.get('type')}: {record.get('message')}\n{record.get('traceback', '')}"
    if message.status != 0 and not record:  # one of a thread of C++ leaves none, nor does Python without any memory
        text = "\n".join(last_lines)
    if _DEVICE_MEMORY.search(text):
        return DEVICE
    return HOST if _HOST_MEMORY.search(text) else None


def rank_failure(node: Node, rank: Rank, message: Exited, after_s: float) -> Failure:
    """Put together what is known about the end of a rank."""
    record, status = message.error, message.status
    if status < 0 and "exit_code" in record:  # it had failed already, and was killed while it was on its way out
        status = int(record["exit_code"])
    return _failure_of(
        node,
        rank,
        exit_code=shell_code(status),
        signal_name=signal_name(status),
        after_s=after_s,
        reason=describe_status(status, record, message.oom),
        traceback=str(record.get("traceback", "")),
        max_rss_bytes=message.max_rss_bytes,
        oom=message.oom,
        hint=_HINTS.get(str(record.get("type"))),
        memory=memory_of(message, rank.log.last_lines(LAST_LINES)),
        engine=EngineFacts.from_json(message.engine),
    )


def _failure_of(node: Node, rank: Rank, **facts: Any) -> Failure:
    lines, log = rank.log.last_lines(LAST_LINES), str(rank.log.path)
    return Failure(host=node.name, rank=rank.number, pid=rank.pid, last_lines=lines, log=log, **facts)
