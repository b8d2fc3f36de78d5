"""The ranks of one node after their start: their output, their progress, their failures and their ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import sys
import termios
import time

from launcher.agent.oom import OomWatch
from launcher.agent.spawn import (
    ask_for_trace,
    read_object,
    read_record,
    spawn_rank,
    withdraw_trace,
    without_own_frames,
)
from launcher.agent.stacks import StackRequest
from launcher.agent.wire import (
    JOURNAL,
    MAX_READ_BYTES,
    STDERR,
    TRACE,
    Exited,
    Outbox,
    Progress,
    Raised,
    Spawn,
    Started,
    Trace,
)
from launcher.base.processes import handles
from launcher.base.progress import read_counter
from launcher.base.signals import NOTICE_SIGNAL
from launcher.journal.trace_request import AnswerHead

TYPE_CHECKING = False
if TYPE_CHECKING:
    from launcher.agent.spawn import RankProcess

_MAX_CRASH_BYTES = 1 << 20  # of stacks that are sent at once
# Journals are read with the heartbeats: each read wakes the launcher, too, which ranks on all processors would pay for.
# One with so much in its pipe, or half of what a smaller pipe holds, or more than there was room for, is read as it
# comes until it has less.
_FULL_JOURNAL_BYTES = 32 << 10
_DRAIN_S = 0.5  # how long a child that outlives a rank which exited with 0 may keep writing


class Ranks:
    """Owns the rank processes of one node and sends what becomes of them."""

    def __init__(self, outbox: Outbox, selector: selectors.BaseSelector) -> None:
        """selector: watches the ranks' pipes, each with its `RankProcess` as data, while the outbox has room."""
        self._outbox, self._selector = outbox, selector
        self._oom_watch = OomWatch()
        self._by_pid: dict[int, RankProcess] = {}
        self._is_read = True  # their pipes are in the selector
        self._progress_at_s, self._progress_interval_s = 0.0, float("inf")
        self._stack_request: StackRequest | None = None  # that was not answered yet
        self.all_exited_with_0 = True  # those that have exited
        self.has_descendants = False  # of the agent: ranks, their children, and orphans that it has adopted

    def __bool__(self) -> bool:
        """Whether a rank is left whose exit was not sent."""
        return bool(self._by_pid)

    # ---- start ----

    def start(
        self, spec: Spawn, local_rank: int, scratch: str, cores: list[int] | None = None, call_fd: int | None = None
    ) -> None:
        """Start a rank, as `spawn_rank` does. Raises: OSError."""
        self._progress_at_s, self._progress_interval_s = 0.0, spec.progress_interval_s
        rank = spawn_rank(spec, local_rank, scratch, cores, call_fd)
        self._by_pid[rank.pid] = rank
        self._watch_streams(rank)
        self._outbox.send(Started(rank.number, rank.pid))

    def forget(self) -> None:
        """Close the pipes of all ranks, and send nothing more of them."""
        for rank in self._by_pid.values():
            for descriptor in list(rank.streams):
                self._close_stream(rank, descriptor)
            rank.close()
        self._by_pid.clear()

    def notify(self) -> None:
        """Send the notice to every rank, not to its children. A program that does not handle it would die of it."""
        for rank in self._by_pid.values():
            if rank.status is None and (not rank.is_program or handles(rank.pid, NOTICE_SIGNAL)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.pid, NOTICE_SIGNAL)  # it is not reaped, so no other process has its pid

    # ---- output ----

    def watch(self) -> None:
        """Watch the pipes while the outbox has room for what is read."""
        has_room = self._outbox.room_bytes() > 0
        if has_room == self._is_read:  # there may be thousands of pipes
            return
        self._is_read = has_room
        for rank in self._by_pid.values():
            self._watch_streams(rank)

    def _watch_streams(self, rank: RankProcess) -> None:
        for descriptor, stream in rank.streams.items():
            is_awaited = stream != JOURNAL or rank.reads_journal or rank.status is not None  # then its end, too
            set_watched(self._selector, descriptor, self._is_read and is_awaited, rank)

    def read(self, descriptor: int, rank: RankProcess) -> int:
        """Read a pipe that has data or has ended; return how many bytes."""
        room_bytes = self._outbox.room_bytes()
        if room_bytes == 0:  # another pipe has taken it in this turn
            return 0
        try:
            data: bytes | None = os.read(descriptor, room_bytes)
        except BlockingIOError:
            data = None
        if data == b"":
            self._close_stream(rank, descriptor)
            return 0
        if data:
            self._outbox.send_output(rank.number, rank.streams[descriptor], data)
        num_bytes = len(data or b"")
        if rank.streams[descriptor] == JOURNAL and rank.status is None:
            full_bytes = min(_FULL_JOURNAL_BYTES, fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) // 2, room_bytes)
            rank.reads_journal = num_bytes >= full_bytes
            set_watched(self._selector, descriptor, self._is_read and rank.reads_journal, rank)
        return num_bytes

    def _read_journal(self, rank: RankProcess) -> None:
        for descriptor in [each for each, stream in rank.streams.items() if stream == JOURNAL]:
            rank.reads_journal = True
            if self._outbox.room_bytes():
                self.read(descriptor, rank)
            else:  # as soon as there is room
                set_watched(self._selector, descriptor, self._is_read, rank)

    def _drain(self, rank: RankProcess, descriptor: int) -> None:
        """Read what is there now; a child of the rank may hold the pipe open for ever, and write as fast as we read."""
        num_left = int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
        while num_left > 0:
            data = os.read(descriptor, min(num_left, MAX_READ_BYTES))
            num_left -= len(data)
            self._outbox.send_output(rank.number, rank.streams[descriptor], data)

    def _close_stream(self, rank: RankProcess, descriptor: int) -> None:
        set_watched(self._selector, descriptor, False)
        rank.close_stream(descriptor)

    def _send_crash(self, rank: RankProcess) -> None:
        """Send what a crash of the rank, or of a fork of it, has written as if it stood in the rank's output."""
        data = b""
        with contextlib.suppress(OSError), open(rank.crash_file, "rb") as file:
            file.seek(rank.num_crash_bytes)
            data = file.read(_MAX_CRASH_BYTES)
        if data:
            rank.num_crash_bytes += len(data)
            text = without_own_frames(data.decode("utf-8", "replace"))
            self._outbox.send_output(rank.number, STDERR, text.encode())

    def trace(self, order: Trace) -> None:
        """Ask ranks for a trace, in place of what they were asked for before. Their answers come through pipes."""
        for rank in self._by_pid.values():
            for descriptor in [each for each, stream in rank.streams.items() if stream == TRACE]:
                self._close_stream(rank, descriptor)
            withdraw_trace(rank)
            if rank.number not in order.ranks or rank.status is not None:
                continue
            self._outbox.send_output(rank.number, TRACE, b"")
            try:
                descriptor = ask_for_trace(rank, order)
            except OSError as error:
                head = AnswerHead(order.id, f"its host cannot pass the request on: {error.strerror}")
                self._outbox.send_output(rank.number, TRACE, head.encoded())
            else:
                rank.streams[descriptor] = TRACE
                set_watched(self._selector, descriptor, self._is_read, rank)

    # ---- progress ----

    def dump_stacks(self, *, native: bool) -> None:
        """Ask every rank what it is in; `send_progress` sends the answers as they come."""
        if self._stack_request is not None:
            self._stack_request.abandon()
        self._stack_request = StackRequest(self._by_pid.values(), native=native)

    def send_progress(self) -> None:
        """Send heartbeats that are new, and what ranks answer to a request for their stacks."""
        now_s = time.monotonic()
        if now_s >= self._progress_at_s:
            self._progress_at_s = now_s + self._progress_interval_s
            for rank in self._by_pid.values():
                progress = read_counter(rank.progress_fd)
                if progress != rank.progress:
                    rank.progress = progress
                    self._outbox.send(Progress(rank.number, *progress.as_dict().values()))
                if rank.status is None:
                    self._read_journal(rank)
                self._send_crash(rank)  # of a fork: the rank itself may run for long after it
        if self._stack_request is not None:
            for answer in self._stack_request.take_answers():
                self._outbox.send(answer)
            if self._stack_request.is_over:
                self._stack_request = None

    def send_raised(self) -> None:
        """Send at once which ranks have failed but not exited, behind what they wrote before."""
        for rank in self._by_pid.values():
            if rank.record is None and rank.status is None:
                rank.record = read_record(rank.error_file)
                if rank.record is not None:
                    for descriptor in rank.streams:
                        self._drain(rank, descriptor)
                    self._outbox.send(Raised(rank.number, rank.record))

    def longest_wait_s(self, longest_s: float, busy_s: float) -> float:
        """Return how long to wait for the next event: `busy_s` when an exit or stacks are to be sent soon."""
        if self._stack_request is not None or any(rank.status is not None for rank in self._by_pid.values()):
            return busy_s
        return min(longest_s, self._progress_interval_s)

    # ---- exit ----

    def reap(self) -> None:
        """Collect exited children, ranks and adopted orphans of ranks, and send the exits whose output is complete."""
        self.has_descendants = True
        killed: list[RankProcess] = []
        while True:
            try:
                pid, wait_status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.has_descendants = False  # as this process adopts orphans
                break
            if pid == 0:
                break
            rank = self._by_pid.get(pid)
            if rank is not None:
                rank.status = os.waitstatus_to_exitcode(wait_status)
                rank.process.returncode = rank.status  # Popen must not wait for it a second time
                rank.ended_s = time.monotonic()
                self.all_exited_with_0 = self.all_exited_with_0 and rank.status == 0
                rank.max_rss_bytes = usage.ru_maxrss * 1024
                rank.record = rank.record or read_record(rank.error_file)
                self._watch_streams(rank)
                killed += [rank] if rank.status == -signal.SIGKILL else []
        for rank in sorted(killed, key=lambda rank: -rank.max_rss_bytes):
            rank.oom = self._oom_watch.evidence()
        for rank in list(self._by_pid.values()):
            self._send_if_exited(rank)

    def _send_if_exited(self, rank: RankProcess) -> None:
        if rank.status is None:
            return
        is_recent = time.monotonic() - rank.ended_s < _DRAIN_S
        if rank.status == 0 and rank.streams and is_recent and self._outbox.is_connected:
            return  # a failure is sent at once: all it wrote is in the pipe already
        for descriptor in list(rank.streams):
            self._drain(rank, descriptor)
            self._close_stream(rank, descriptor)
        self._send_crash(rank)
        del self._by_pid[rank.pid]
        rank.close()
        left = [read_object(path) if rank.status != 0 else None for path in (rank.torch_error_file, rank.engine_file)]
        self._outbox.send(
            Exited(rank.number, rank.status, rank.ended_s, rank.record, rank.max_rss_bytes, rank.oom, *left)
        )


def set_watched(
    selector: selectors.BaseSelector,
    descriptor: int,
    wanted: bool,
    data: RankProcess | None = None,
    events: int = selectors.EVENT_READ,
) -> None:
    """Have a selector watch a descriptor, or no longer; nothing changes where it does so already."""
    watched = descriptor in selector.get_map()
    if wanted and not watched:
        selector.register(descriptor, events, data)
    elif watched and not wanted:
        selector.unregister(descriptor)
