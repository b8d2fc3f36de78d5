"""Which failure was the first: the one that all others followed from.

When a rank dies, its peers fail too, often within milliseconds and with errors of their own about a lost connection.
The order in which such news reaches the controller says little, so every failure is kept with the time of its death,
and the cause is chosen at the end. All times are our monotonic clock, which nobody sets; those of other hosts are
converted.
"""

from __future__ import annotations

import re
import signal
import time
from typing import Any

from launcher.agent.wire import Exited, Raised, SpawnFailed
from launcher.base.exit_codes import ExitCode
from launcher.job.logs import RankLog
from launcher.job.node import Node
from launcher.job.outcome import Failure, FailureKind, describe_status, shell_code, signal_name

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
# Exit codes of a rank that obeyed our SIGTERM, by itself or by a shell around it.
_STOPPED = (-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
_HINTS = {  # by the name of the exception
    "OutOfMemoryError": "the GPU's memory is full: a smaller micro-batch, activation checkpointing, a higher ZeRO stage"
    " or offload need less",
    "ModuleNotFoundError": "is it installed for the Python of that host's ranks, or its folder in PYTHONPATH?"
    " launch check compares the hosts",
}


class FailureBook:
    """Collects what failed, and decides which was first."""

    def __init__(self, start_s: float) -> None:
        """start_s: the start of the run."""
        self._start_s = start_s
        self._stop_s: float | None = None
        self._slack_s = 0.0
        self.was_noticed = False  # the ranks were told that the job will be preempted
        self.wants_requeue = False  # and one of them has ended because of it
        # By rank, host or "hang": is about a lost peer, time of death, what is known.
        self._failures: dict[int | str, tuple[bool, float, Failure]] = {}

    def stop_ordered(self, *, by_user: bool) -> None:
        """Remember that the ranks were told to end: deaths from now on are our own doing. The first call counts."""
        if self._stop_s is None:
            self._stop_s = time.monotonic()
            self._slack_s = 0.0 if by_user else _SLACK_S

    def add_exit(self, node: Node, message: Exited, log: RankLog) -> Failure | None:
        """Keep the end of a rank if it can be a cause; returns it then."""
        if self.was_noticed and message.status == ExitCode.REQUEUE:
            self.wants_requeue = True  # the others may still be saving: nobody is stopped for it
            return None
        if message.status == 0 and self._stop_s is None:
            self._failures.pop(message.rank, None)  # it had raised, but what ended it says that all is well
        died_s = float((message.record or {}).get("time_s", message.time_s)) + node.clock_offset_s
        if message.status == 0 or not self._may_be_cause(message.status, died_s):
            return None
        failure = rank_failure(node, message, log, max(0.0, died_s - self._start_s))
        self._failures[message.rank] = (_is_about_lost_peer(message, failure), died_s, failure)
        return failure

    def add_raised(self, node: Node, message: Raised, log: RankLog) -> None:
        """Keep what a rank has raised that has not ended yet; what is known at its end takes this one's place."""
        code, time_s = int(message.record["exit_code"]), float(message.record["time_s"])
        if not (self.was_noticed and code == ExitCode.REQUEUE):  # its end is what asks for a requeue
            self.add_exit(node, Exited(message.rank, code, time_s, message.record, 0, None), log)

    def add_host(self, node: Node, reason: str) -> None:
        """Keep the loss of a whole host."""
        self._add_host_failure(node, FailureKind.HOST_LOST, reason, None, ExitCode.UNREACHABLE)

    def add_not_started(self, node: Node, message: SpawnFailed) -> None:
        """Keep that a host could not start its ranks."""
        exit_code = ExitCode.USAGE if message.is_usage else ExitCode.FAILURE
        self._add_host_failure(node, FailureKind.NOT_STARTED, message.reason, message.hint, exit_code)

    def _add_host_failure(
        self, node: Node, kind: FailureKind, reason: str, hint: str | None, exit_code: ExitCode
    ) -> None:
        now_s = time.monotonic()
        failure = Failure(
            host=node.name,
            rank=None,
            pid=None,
            exit_code=exit_code,
            signal_name=None,
            after_s=now_s - self._start_s,
            reason=reason,
            traceback="",
            last_lines=tuple(node.channel.stderr_tail().splitlines()[-LAST_LINES:]),
            log=None,
            kind=kind,
            hint=hint,
        )
        self._failures.setdefault(f"host {node.name}", (False, now_s, failure))  # its first failure counts

    def add_absence(self, node: Node, away_s: float) -> None:
        """Keep that a host ended its ranks because the launcher was suspended for so long."""
        now_s = time.monotonic()
        failure = Failure(
            host=node.name,
            rank=None,
            pid=None,
            exit_code=ExitCode.UNREACHABLE,
            signal_name=None,
            after_s=now_s - self._start_s,
            reason=f"launch was suspended for {away_s:.0f} s",
            traceback="",
            last_lines=(),
            log=None,
            away_s=away_s,
            kind=FailureKind.HOST_LOST,
        )
        self._failures.setdefault(f"host {node.name}", (False, now_s, failure))

    def add_hang(self, node: Node, rank: int, reason: str, stack: str, log: RankLog) -> None:
        """Keep a rank that makes no progress; its stack is shown in place of a traceback."""
        now_s = time.monotonic()
        failure = Failure(
            host=node.name,
            rank=rank,
            pid=node.pids.get(rank),
            exit_code=ExitCode.HANG,
            signal_name=None,
            after_s=now_s - self._start_s,
            reason=reason,
            traceback=stack,
            last_lines=log.last_lines(LAST_LINES),
            log=str(log.path),
            kind=FailureKind.RANK_HANGS,
        )
        self._failures["hang"] = (False, now_s, failure)

    @property
    def cause(self) -> Failure | None:
        """The failure that the others followed from, None when nothing failed."""
        if not self._failures:
            return None
        return min(self._failures.values(), key=lambda entry: entry[:2])[2]

    def _may_be_cause(self, status: int, died_s: float) -> bool:
        if self._stop_s is None:
            return True
        by_us = status in _STOPPED  # or by somebody else, a moment before
        return died_s <= self._stop_s + (0.0 if by_us else self._slack_s)


def _is_about_lost_peer(message: Exited, failure: Failure) -> bool:
    """Tell whether a failure says of itself that another rank was gone before."""
    record = message.record or {}
    if _LOST_PEER.search(f"{record.get('type')}: {record.get('message')}\n{failure.traceback}"):
        return True
    return message.status == -signal.SIGABRT and any(map(_WATCHDOG.search, failure.last_lines))


def rank_failure(node: Node, message: Exited, log: RankLog, after_s: float) -> Failure:
    """Put together what is known about the end of a rank."""
    record: dict[str, Any] = message.record or {}
    status = message.status
    if status < 0 and "exit_code" in record:  # it had failed already, and was killed while it was on its way out
        status = int(record["exit_code"])
    return Failure(
        host=node.name,
        rank=message.rank,
        pid=node.pids.get(message.rank),
        exit_code=shell_code(status),
        signal_name=signal_name(status),
        after_s=after_s,
        reason=describe_status(status, record, message.oom),
        traceback=str(record.get("traceback", "")),
        last_lines=log.last_lines(LAST_LINES),
        log=str(log.path),
        max_rss_bytes=message.max_rss_bytes,
        oom=message.oom,
        hint=_HINTS.get(str(record.get("type"))),
    )
