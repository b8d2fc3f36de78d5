"""The agent's loop: one thread, one selector, one state.

Every wait has an end: reading never blocks, writing is buffered, and when the controller reads too slowly the
ranks' pipes are left unread, so that ranks wait instead of memory growing or output being lost. Over a network every
state has its lease: a controller that says nothing is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import selectors
import signal
import socket
import sys
import termios
import time
from enum import Enum, auto

from launcher.agent import scratch
from launcher.agent.oom import OomWatch
from launcher.agent.spawn import (
    RankProcess,
    append_to_call,
    check_devices,
    check_files,
    read_object,
    read_record,
    spawn_failure,
    spawn_rank,
    without_own_frames,
)
from launcher.agent.wire import (
    MAGIC,
    PROTOCOL_VERSION,
    STDERR,
    Bye,
    Call,
    Decoder,
    DumpStacks,
    Exited,
    Handled,
    Hello,
    Lease,
    LeftBehind,
    MasterTried,
    Message,
    Notify,
    Output,
    PickPort,
    Ping,
    Pong,
    PortPicked,
    Progress,
    Raised,
    Spawn,
    Stacks,
    Started,
    Stop,
    Sweep,
    TryMaster,
    encode,
)
from launcher.base.errors import LauncherError, ProtocolError
from launcher.base.processes import descendants, name_of, signal_descendants, state_of, sweep_job
from launcher.base.progress import read_counter
from launcher.base.signals import NOTICE_SIGNAL, STACKS_SIGNAL, term_is_notice
from launcher.base.timeouts import timeouts
from launcher.cluster.devices import given_devices

_READ_BYTES = 1 << 16
_MAX_CRASH_BYTES = 1 << 20  # of stacks that are passed on at once
_MAX_UNSENT_BYTES = 4 << 20  # above it the ranks' pipes are left unread
_IDLE_WAIT_S = 1.0  # the longest sleep; deadlines shorten it
_STOP_POLL_S = 0.05
_SCAN_SHARE = 9  # times as long as a look at all processes took, until the next one
_STACKS_WAIT_S = 0.3  # faulthandler writes within milliseconds, on a busy machine a little later
_WITHOUT_STACK = {  # by the state of the process
    "T": "  (stopped by a signal: state T in /proc; kill -CONT {} continues it)\n",
    "t": "  (stopped by a debugger: state t in /proc)\n",
    "D": "  (waits for a device or a file system: state D in /proc)\n",
}
_DRAIN_S = 0.5  # how long a child that outlives a rank which ended well may keep writing
_LEFTOVER_WAIT_S = 0.5  # for children to end by themselves, after ranks which ended well
_LEFTOVER_GRACE_S = 2.0  # for children that outlive ranks which ended well
# The lease of an agent that has no ranks yet: the controller waits for all hosts before it starts any rank.
_WAITING_LEASE_S = 600.0
# Below the range from which Linux takes ports for outgoing connections: ranks bind the port only seconds later, after
# `import torch`, and no connection may hold it by chance then.
_FIRST_PORT, _NUM_PORTS = 12_000, 20_000
_PORT_TRIES = 100
_MASTER_S = 5.0  # for an answer from the master, before there are ranks


class _State(Enum):
    """WAITING -> RUNNING -> STOPPING -> GONE; a node without ranks goes straight to GONE."""

    WAITING = auto()  # connected, no ranks yet
    RUNNING = auto()  # ranks were started and none was asked to end
    STOPPING = auto()  # SIGTERM was sent, or all ranks have ended; descendants are being waited for
    GONE = auto()  # no rank and no descendant is left


class Supervisor:
    """Owns the ranks of one node."""

    def __init__(
        self, command_fd: int, output_fd: int, lifeline: int | None = None, *, is_in_step: bool = False
    ) -> None:
        """lifeline, is_in_step: see `main.serve`."""
        self._lifeline, self._is_in_step = lifeline, is_in_step
        self._command_fd = command_fd
        self._output_fd = output_fd
        self._decoder = Decoder(expect_magic=False)
        self._selector = selectors.DefaultSelector()
        self._unsent = bytearray(MAGIC)
        self._unhandled_bytes = 0  # of output: sent, or to be sent, and not yet handled by the controller
        self._connected = True
        self._state = _State.WAITING
        self._ranks: dict[int, RankProcess] = {}  # by pid
        self._spec: Spawn | None = None
        self._lease_s: float | None = _WAITING_LEASE_S  # None: the stream's end is enough
        self._last_message_s = time.monotonic()
        self._kill_at_s: float | None = None
        self._give_up_at_s: float | None = None
        self._tell_progress_at_s, self._progress_interval_s = 0.0, _IDLE_WAIT_S
        self._stacks_at_s: float | None = None  # when the stacks that were asked for are read
        self._call_fd: int | None = None  # holds the function call that ranks make
        self._scratch: scratch.Scratch | None = None  # there as soon as ranks are
        self._reads_ranks = True  # their pipes are in the selector
        self._ending_signal: int | None = None  # that this process got, until the loop obeys it
        self._wake_read, self._wake_write = os.pipe()
        self._oom_watch = OomWatch()
        self._has_descendants = False
        self._have_ended_well = True  # every rank that has ended
        self._leftovers_until_s: float | None = None  # until then children of ended ranks may end by themselves
        self._may_have_raised = False  # a rank that has left its record sends SIGCHLD

    def run(self) -> None:
        """Serve commands until the ranks are gone and the controller has been told."""
        os.set_blocking(self._output_fd, False)
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        signal.set_wakeup_fd(self._wake_write)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._selector.register(self._command_fd, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        if self._lifeline is not None:
            self._selector.register(self._lifeline, selectors.EVENT_READ)
        self._send(Hello(PROTOCOL_VERSION, os.getpid(), sys.executable, time.monotonic(), given_devices(os.environ)))
        try:
            while self._state is not _State.GONE or self._unsent:
                self._turn()
        finally:
            if self._scratch is not None:
                self._scratch.remove()

    # ---- the loop ----

    def _turn(self) -> None:
        self._watch_streams()
        for key, events in self._selector.select(self._wait_s()):
            if key.fd == self._command_fd:
                self._read_commands()
            elif key.fd == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, _READ_BYTES)
                self._may_have_raised = True
            elif key.fd == self._output_fd:
                self._write()
            elif key.fd == self._lifeline:
                self._selector.unregister(key.fd)
                self._lose_controller(0.0)  # the guard was killed, and nothing else sees to what comes after us
            elif events:
                self._read_rank(key.fd, key.data)
        self._obey_signal()
        self._tell_progress()
        self._reap()
        self._tell_raised()
        self._check_deadlines()

    def _wait_s(self) -> float:
        is_urgent = self._state is _State.STOPPING or any(rank.status is not None for rank in self._ranks.values())
        is_urgent = is_urgent or self._stacks_at_s is not None or self._leftovers_until_s is not None
        return _STOP_POLL_S if is_urgent else min(_IDLE_WAIT_S, self._progress_interval_s)

    def _watch_streams(self) -> None:
        """Register what can make progress now: writing when there is something, reading when there is room."""
        self._set_watched(self._output_fd, selectors.EVENT_WRITE, bool(self._unsent) and self._connected, None)
        has_room = len(self._unsent) < _MAX_UNSENT_BYTES and self._room_bytes() > 0
        if has_room == self._reads_ranks:  # there may be thousands of pipes
            return
        self._reads_ranks = has_room
        for rank in self._ranks.values():
            for descriptor in rank.streams:
                self._set_watched(descriptor, selectors.EVENT_READ, has_room, rank)

    def _room_bytes(self) -> int:
        """Return how much of a rank's output may be read at once; 0 until a quarter of the window is free."""
        window_bytes = self._spec.window_bytes if self._spec is not None and self._connected else None
        if window_bytes is None:
            return _READ_BYTES
        free_bytes = window_bytes - self._unhandled_bytes
        return min(free_bytes, _READ_BYTES) if free_bytes >= window_bytes // 4 else 0

    def _set_watched(self, descriptor: int, events: int, wanted: bool, data: RankProcess | None) -> None:
        watched = descriptor in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(descriptor, events, data)
        elif watched and not wanted:
            self._selector.unregister(descriptor)

    def _on_signal(self, number: int, _frame: object) -> None:
        """Only remember it: the loop may be in the middle of anything, a start of ranks above all."""
        if number != signal.SIGCHLD:
            self._ending_signal = number

    def _obey_signal(self) -> None:
        number, self._ending_signal = self._ending_signal, None
        if number is None:
            return
        if number == signal.SIGTERM and term_is_notice():
            return  # Slurm's, to all processes: the launcher got it, too, and says what it means
        if self._state is _State.WAITING:
            sys.stderr.write(f"the agent got {signal.Signals(number).name} before it had started any rank\n")
        # Slurm signals every process of a step: the ranks have got it.
        self._stop(self._spec.grace_s if self._spec else 0.0, is_known=self._is_in_step and number == signal.SIGTERM)

    # ---- controller ----

    def _send(self, message: Message) -> None:
        if self._connected:
            self._unsent += encode(message)

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._output_fd, memoryview(self._unsent)[: 1 << 20])]
        except BlockingIOError:
            return
        except OSError:
            self._lose_controller()

    def _lose_controller(self, grace_s: float = math.inf) -> None:
        """The launcher has ended: drop what is unsent and end the ranks, with their own grace at most."""
        self._set_watched(self._output_fd, selectors.EVENT_WRITE, False, None)
        self._connected = False
        self._unsent.clear()
        self._stop(min(grace_s, self._spec.grace_s) if self._spec else 0.0)

    def _read_commands(self) -> None:
        data = os.read(self._command_fd, _READ_BYTES)
        self._last_message_s = time.monotonic()
        if not data:
            self._selector.unregister(self._command_fd)
            self._lose_controller()
            return
        try:
            for message in self._decoder.feed(data):
                self._handle(message)
        except ProtocolError as error:
            sys.stderr.write(f"{error}\n")
            self._selector.unregister(self._command_fd)
            self._lose_controller()

    def _has_message_waiting(self) -> bool:
        return any(key.fd == self._command_fd for key, _ in self._selector.select(0))

    def _handle(self, message: Message) -> None:
        if self._state is _State.GONE:
            return
        if isinstance(message, PickPort):
            self._send(PortPicked(_free_port(message.port)))
        elif isinstance(message, TryMaster):
            self._send(MasterTried(_problem_of_master(message.address, message.port)))
        elif isinstance(message, Call):
            self._call_fd = append_to_call(self._call_fd, message.data)
            self._send(Pong(time.monotonic()))
        elif isinstance(message, Spawn):
            self._spawn(message)
        elif isinstance(message, Stop):
            self._stop(message.grace_s)
        elif isinstance(message, Handled):
            self._unhandled_bytes -= message.num_bytes
        elif isinstance(message, Ping):
            self._send(Pong(time.monotonic()))
        elif isinstance(message, Lease):
            self._lease_s = message.lease_s
            self._send(Pong(time.monotonic()))
        elif isinstance(message, DumpStacks):
            self._signal_ranks(STACKS_SIGNAL)
            self._stacks_at_s = time.monotonic() + _STACKS_WAIT_S
        elif isinstance(message, Notify):
            self._signal_ranks(NOTICE_SIGNAL)
        elif isinstance(message, Sweep):
            left = sweep_job(message.job_id, scratch.agents_of(message.job_id))
            scratch.remove_left(message.job_id)
            self._state = _State.GONE
            self._send(Bye(sorted(left)))

    # ---- ranks ----

    def _spawn(self, spec: Spawn) -> None:
        self._spec = spec
        self._lease_s = spec.lease_s
        self._tell_progress_at_s, self._progress_interval_s = 0.0, spec.progress_interval_s
        self._state = _State.RUNNING
        num_ranks = len(spec.rank_envs)
        try:
            check_devices(spec)
            check_files(num_ranks, has_call=self._call_fd is not None)
            cores = _cores_of_ranks(spec)
            self._scratch = scratch.Scratch(spec.job_id)
            for local_rank in range(num_ranks):
                own_cores = cores[local_rank] if cores else None
                rank = spawn_rank(spec, local_rank, self._scratch.path, own_cores, self._call_fd)
                self._ranks[rank.pid] = rank
                for descriptor in rank.streams:
                    self._set_watched(descriptor, selectors.EVENT_READ, self._reads_ranks, rank)
                self._send(Started(rank.number, rank.pid))
                self._write()  # to the launcher, silence would mean that this host is lost
                if self._state is not _State.RUNNING:
                    break
            self._last_message_s = time.monotonic()  # nobody has listened meanwhile
        except (OSError, ValueError, LauncherError) as error:  # ValueError: what no argument or variable may hold
            self._forget_ranks()  # they are ended like all descendants, and are not to be taken for the cause
            self._send(spawn_failure(error, spec))
            self._stop(0.0)

    def _signal_ranks(self, number: int) -> None:
        for rank in self._ranks.values():
            if rank.status is None:  # it is not reaped, so no other process has its pid
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.pid, number)

    def _forget_ranks(self) -> None:
        for rank in self._ranks.values():
            for descriptor in list(rank.streams):
                self._close_stream(rank, descriptor)
            rank.close()
        self._ranks.clear()

    def _read_rank(self, descriptor: int, rank: RankProcess) -> None:
        room_bytes = self._room_bytes()
        if room_bytes == 0:  # another stream has taken it in this turn
            return
        try:
            data = os.read(descriptor, room_bytes)
        except BlockingIOError:
            return
        if data:
            self._send_output(rank, rank.streams[descriptor], data)
        else:
            self._close_stream(rank, descriptor)

    def _send_output(self, rank: RankProcess, stream: str, data: bytes) -> None:
        message = Output(rank.number, stream, data)
        self._unhandled_bytes += message.cost_bytes
        self._send(message)

    def _close_stream(self, rank: RankProcess, descriptor: int) -> None:
        self._set_watched(descriptor, selectors.EVENT_READ, False, None)
        rank.close_stream(descriptor)

    def _reap(self) -> None:
        """Collect ended children: ranks, and orphans of ranks that this agent has adopted."""
        self._has_descendants = True
        killed: list[RankProcess] = []
        while True:
            try:
                pid, wait_status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self._has_descendants = False  # as this process adopts orphans
                break
            if pid == 0:
                break
            rank = self._ranks.get(pid)
            if rank is not None:
                rank.status = os.waitstatus_to_exitcode(wait_status)
                rank.process.returncode = rank.status  # Popen must not wait for it a second time
                rank.ended_s = time.monotonic()
                self._have_ended_well = self._have_ended_well and rank.status == 0
                rank.max_rss_bytes = usage.ru_maxrss * 1024
                rank.record = rank.record or read_record(rank.error_file)
                killed += [rank] if rank.status == -signal.SIGKILL else []
        for rank in sorted(killed, key=lambda rank: -rank.max_rss_bytes):
            rank.oom = self._oom_watch.evidence()
        for rank in list(self._ranks.values()):
            self._report_if_over(rank)
        if not self._ranks and self._state is _State.RUNNING:
            self._end_leftovers()

    def _end_leftovers(self) -> None:
        """End what the ranks have left running: a moment later when all ended well, as most children end with them."""
        now_s = time.monotonic()
        self._leftovers_until_s = self._leftovers_until_s or now_s + _LEFTOVER_WAIT_S
        if self._have_ended_well and self._has_descendants and now_s < self._leftovers_until_s:
            return
        left = sorted(descendants(os.getpid())) if self._have_ended_well and self._has_descendants else []
        if left:
            self._send(LeftBehind(left, [name_of(pid) for pid in left]))
        self._stop(_LEFTOVER_GRACE_S)

    def _report_if_over(self, rank: RankProcess) -> None:
        if rank.status is None:
            return
        is_recent = time.monotonic() - rank.ended_s < _DRAIN_S
        if rank.status == 0 and rank.streams and is_recent and self._connected:
            return  # a failure is told at once: all it wrote is in the pipe already
        for descriptor in list(rank.streams):
            self._drain(rank, descriptor)
            self._close_stream(rank, descriptor)
        self._pass_on_crash(rank)
        del self._ranks[rank.pid]
        rank.close()
        torch_error = read_object(rank.torch_error_file) if rank.status != 0 else None
        self._send(
            Exited(rank.number, rank.status, rank.ended_s, rank.record, rank.max_rss_bytes, rank.oom, torch_error)
        )

    def _drain(self, rank: RankProcess, descriptor: int) -> None:
        """Read what is there now; a child of the rank may hold the pipe open for ever, and write as fast as we read."""
        num_left = int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
        while num_left > 0:
            data = os.read(descriptor, min(num_left, _READ_BYTES))
            num_left -= len(data)
            self._send_output(rank, rank.streams[descriptor], data)

    def _pass_on_crash(self, rank: RankProcess) -> None:
        """Send what a crash of the rank, or of a fork of it, has written as if it stood in the rank's output."""
        data = b""
        with contextlib.suppress(OSError), open(rank.crash_file, "rb") as file:
            file.seek(rank.num_crash_bytes)
            data = file.read(_MAX_CRASH_BYTES)
        if data:
            rank.num_crash_bytes += len(data)
            self._send_output(rank, STDERR, without_own_frames(data.decode("utf-8", "replace")).encode())

    def _tell_raised(self) -> None:
        """Tell at once which ranks have failed but not ended, behind what they wrote before."""
        if not self._may_have_raised:
            return
        self._may_have_raised = False
        for rank in self._ranks.values():
            if rank.record is None and rank.status is None:
                rank.record = read_record(rank.error_file)
                if rank.record is not None:
                    for descriptor in rank.streams:
                        self._drain(rank, descriptor)
                    self._send(Raised(rank.number, rank.record))

    def _tell_progress(self) -> None:
        """Send heartbeats that are new, and stacks that were asked for, when their time has come."""
        now_s = time.monotonic()
        if now_s >= self._tell_progress_at_s:
            self._tell_progress_at_s = now_s + self._progress_interval_s
            for rank in self._ranks.values():
                told = read_counter(rank.progress_fd)
                if told != rank.progress:
                    rank.progress = told
                    self._send(Progress(rank.number, *told.as_dict().values()))
                self._pass_on_crash(rank)  # of a fork: the rank itself may run on for long
        if self._stacks_at_s is not None and now_s >= self._stacks_at_s:
            self._stacks_at_s = None
            for rank in self._ranks.values():
                text = without_own_frames(_take_text(rank.stacks_file))
                self._send(Stacks(rank.number, text or _WITHOUT_STACK.get(state_of(rank.pid), "").format(rank.pid)))

    # ---- ending ----

    def _stop(self, grace_s: float, *, is_known: bool = False) -> None:
        """Send SIGTERM to every descendant, once; SIGKILL follows after the grace. A shorter grace wins.

        is_known: they have got it from elsewhere.
        """
        kill_at_s = time.monotonic() + grace_s
        if self._state is _State.WAITING:
            self._state = _State.GONE
        elif self._state is _State.RUNNING:
            self._state = _State.STOPPING
            self._kill_at_s = kill_at_s
            if self._scratch is not None and term_is_notice():
                self._scratch.say_stopping()
            if not is_known:
                signal_descendants(os.getpid(), signal.SIGTERM)
        elif self._state is _State.STOPPING and self._kill_at_s is not None:
            self._kill_at_s = min(self._kill_at_s, kill_at_s)

    def _check_deadlines(self) -> None:
        now_s = time.monotonic()
        is_silent = self._lease_s is not None and now_s - self._last_message_s > self._lease_s
        # On a busy machine, or one that was suspended, a message may have come since the last look.
        if self._connected and is_silent and not self._has_message_waiting():
            self._lose_controller()
        if self._state is not _State.STOPPING:
            return
        if self._has_descendants and self._kill_at_s is not None and now_s >= self._kill_at_s:
            signal_descendants(os.getpid(), signal.SIGKILL)
            # Again for those that were just forked. On a host with thousands of processes to find them takes its time.
            end_s = time.monotonic()
            self._kill_at_s = end_s + max(_STOP_POLL_S, _SCAN_SHARE * (end_s - now_s))
            self._give_up_at_s = self._give_up_at_s or now_s + timeouts().kill_s
        gave_up = self._give_up_at_s is not None and now_s > self._give_up_at_s
        if (not self._has_descendants and not self._ranks) or gave_up:
            self._state = _State.GONE
            self._send(Bye(sorted(descendants(os.getpid())) if self._has_descendants else []))


def _cores_of_ranks(spec: Spawn) -> list[list[int]]:
    """Return the cores of each rank, [] where none is bound. Raises: UsageError."""
    if spec.bound_cores is None:
        return []
    from launcher.cluster.cores import shares

    return shares(spec.bound_cores, len(spec.rank_envs))


def _free_port(wanted: int) -> int:
    """Return `wanted`, or any port when that is 0; 0 when `wanted` is in use."""
    if wanted:
        with socket.socket() as probe:
            # As torch's own listener: connections of a run before may linger.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", wanted))
            except OSError:
                return 0
        return wanted
    for _ in range(_PORT_TRIES):
        port = _FIRST_PORT + int.from_bytes(os.urandom(4), "big") % _NUM_PORTS
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _problem_of_master(address: str, port: int) -> str | None:
    """Return why ranks of this node would not reach the master, None when they will. port: 0: is not tried.

    torch would repeat it for half an hour, with a warning each time. Nothing listens there yet: a refusal is an answer.
    """
    try:
        found = socket.getaddrinfo(address, port or None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return "cannot be resolved"
    problem = None
    for family, kind, protocol, _, place in found if port else ():
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(_MASTER_S / len(found))
            try:
                probe.connect(place)
            except ConnectionRefusedError:
                return None
            except TimeoutError:
                problem = problem or f"gives no answer at port {port}"
            except OSError as error:
                problem = problem or f"cannot be reached: {error.strerror or error}"
            else:
                return None
    return problem


def _take_text(path: str) -> str:
    """Return what a file holds and empty it; "" when there is none."""
    try:
        with open(path, "r+", encoding="utf-8", errors="replace") as file:
            text = file.read()
            file.truncate(0)
    except OSError:
        return ""
    return text
