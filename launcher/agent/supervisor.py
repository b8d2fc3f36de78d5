"""The agent's loop: one thread, one selector, one state.

Every wait has an end: reading never blocks, and writing is buffered (`Outbox`). Over a network every state has its
lease: a controller that says nothing is gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import sys
import time
from enum import Enum, auto

from launcher.agent import scratch
from launcher.agent.ports import free_port, problem_of_master, problem_of_port
from launcher.agent.ranks import Ranks, set_watched
from launcher.agent.spawn import append_to_call, check_devices, check_files, spawn_failure
from launcher.agent.wire import (
    MAX_READ_BYTES,
    PROTOCOL_VERSION,
    Bye,
    Call,
    Decoder,
    DumpStacks,
    Handled,
    Hello,
    Lease,
    LeftBehind,
    MasterTried,
    Message,
    Notify,
    Outbox,
    PickPort,
    Ping,
    Pong,
    PortPicked,
    Spawn,
    Stop,
    Sweep,
    Trace,
    TryMaster,
)
from launcher.base.errors import LauncherError, ProtocolError
from launcher.base.processes import descendants, name_of, signal_descendants, sweep_job
from launcher.base.signals import term_is_notice
from launcher.base.timeouts import timeouts
from launcher.cluster.devices import given_devices

_IDLE_WAIT_S = 1.0  # the longest sleep; deadlines shorten it
_STOP_POLL_S = 0.05
_SCAN_SHARE = 9  # times as long as a look at all processes took, until the next one
_LEFTOVER_WAIT_S = 0.5  # for children to end by themselves, after ranks which exited with 0
_LEFTOVER_GRACE_S = 2.0  # for children that outlive ranks which exited with 0
# The lease of an agent that has no ranks yet: the controller waits for all hosts before it starts any rank.
_WAITING_LEASE_S = 600.0


class _State(Enum):
    """WAITING -> RUNNING -> STOPPING -> GONE; a node without ranks goes straight to GONE."""

    WAITING = auto()  # connected, no ranks yet
    RUNNING = auto()  # ranks were started and none was asked to end
    STOPPING = auto()  # SIGTERM was sent, or all ranks have ended; descendants are being waited for
    GONE = auto()  # no rank and no descendant is left


class Supervisor:
    """Answers the launcher, and decides when the ranks of this node start and stop."""

    def __init__(
        self, command_fd: int, output_fd: int, lifeline: int | None = None, *, is_in_step: bool = False
    ) -> None:
        """lifeline, is_in_step: see `main.serve`."""
        self._lifeline, self._is_in_step = lifeline, is_in_step
        self._command_fd = command_fd
        self._decoder = Decoder(expect_magic=False)
        self._selector = selectors.DefaultSelector()
        self._outbox = Outbox(output_fd)
        self._ranks = Ranks(self._outbox, self._selector)
        self._state = _State.WAITING
        self._spec: Spawn | None = None
        self._lease_s: float | None = _WAITING_LEASE_S  # None: the stream's end is enough
        self._last_message_s = time.monotonic()
        self._kill_at_s: float | None = None
        self._give_up_at_s: float | None = None
        self._leftovers_until_s: float | None = None  # until then children of ended ranks may end by themselves
        self._call_fd: int | None = None  # holds the function call that ranks make
        self._scratch: scratch.Scratch | None = None  # there as soon as ranks are
        self._ending_signal: int | None = None  # that this process got, until the loop obeys it
        self._wake_read, self._wake_write = os.pipe()

    def run(self) -> None:
        """Serve commands until the ranks are gone and everything is sent."""
        os.set_blocking(self._outbox.descriptor, False)
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        signal.set_wakeup_fd(self._wake_write)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._selector.register(self._command_fd, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        if self._lifeline is not None:
            self._selector.register(self._lifeline, selectors.EVENT_READ)
        hello = Hello(PROTOCOL_VERSION, os.getpid(), sys.executable, time.monotonic(), given_devices(os.environ))
        self._outbox.send(hello)
        try:
            while self._state is not _State.GONE or self._outbox:
                self._turn()
        finally:
            if self._scratch is not None:
                self._scratch.remove()

    # ---- the loop ----

    def _turn(self) -> None:
        self._watch_output(bool(self._outbox))
        self._ranks.watch()
        may_have_raised = False  # a rank that has left its record sends SIGCHLD
        for key, events in self._selector.select(self._wait_s()):
            if key.fd == self._command_fd:
                self._read_commands()
            elif key.fd == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, MAX_READ_BYTES)
                may_have_raised = True
            elif key.fd == self._outbox.descriptor:
                self._write()
            elif key.fd == self._lifeline:
                self._selector.unregister(key.fd)
                self._lose_controller(0.0)  # the guard was killed, and nothing else sees to what comes after us
            elif events:
                self._ranks.read(key.fd, key.data)
        self._obey_signal()
        self._ranks.send_progress()
        self._ranks.reap()
        if not self._ranks and self._state is _State.RUNNING:
            self._end_leftovers()
        if may_have_raised:
            self._ranks.send_raised()
        self._check_deadlines()

    def _wait_s(self) -> float:
        is_urgent = self._state is _State.STOPPING or self._leftovers_until_s is not None
        return _STOP_POLL_S if is_urgent else self._ranks.longest_wait_s(_IDLE_WAIT_S, _STOP_POLL_S)

    def _watch_output(self, wanted: bool) -> None:
        set_watched(self._selector, self._outbox.descriptor, wanted, events=selectors.EVENT_WRITE)

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

    def _write(self) -> None:
        try:
            self._outbox.write()
        except OSError:
            self._lose_controller()

    def _lose_controller(self, grace_s: float = math.inf) -> None:
        """The launcher has ended: drop what is unsent and end the ranks, with their own grace at most."""
        self._watch_output(False)
        self._outbox.disconnect()
        self._stop(min(grace_s, self._spec.grace_s) if self._spec else 0.0)

    def _read_commands(self) -> None:
        data = os.read(self._command_fd, MAX_READ_BYTES)
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
            problem = problem_of_port(message.port) if message.port else None
            self._outbox.send(PortPicked(0 if problem else message.port or free_port(), problem))
        elif isinstance(message, TryMaster):
            self._outbox.send(MasterTried(problem_of_master(message.address, message.port)))
        elif isinstance(message, Call):
            self._call_fd = append_to_call(self._call_fd, message.data)
            self._outbox.send(Pong(time.monotonic()))
        elif isinstance(message, Spawn):
            self._spawn(message)
        elif isinstance(message, Stop):
            self._stop(message.grace_s)
        elif isinstance(message, Handled):
            self._outbox.add_handled(message.num_bytes)
        elif isinstance(message, Ping):
            self._outbox.send(Pong(time.monotonic()))
        elif isinstance(message, Lease):
            self._lease_s = message.lease_s
            self._outbox.send(Pong(time.monotonic()))
        elif isinstance(message, DumpStacks):
            self._ranks.dump_stacks(native=message.native)
        elif isinstance(message, Trace):
            self._ranks.trace(message)
        elif isinstance(message, Notify):
            self._ranks.notify()
        elif isinstance(message, Sweep):
            left = sweep_job(message.job_id, scratch.agents_of(message.job_id))
            scratch.remove_left(message.job_id)
            self._state = _State.GONE
            self._outbox.send(Bye(sorted(left)))

    # ---- ranks ----

    def _spawn(self, spec: Spawn) -> None:
        self._spec = spec
        self._lease_s = spec.lease_s
        self._outbox.window_bytes = spec.window_bytes
        self._state = _State.RUNNING
        num_ranks = len(spec.rank_envs)
        try:
            check_devices(spec)
            check_files(num_ranks, has_call=self._call_fd is not None)
            cores = _cores_of_ranks(spec)
            self._scratch = scratch.Scratch(spec.job_id)
            for local_rank in range(num_ranks):
                own_cores = cores[local_rank] if cores else None
                self._ranks.start(spec, local_rank, self._scratch.path, own_cores, self._call_fd)
                self._write()  # to the launcher, silence would mean that this host is lost
                if self._state is not _State.RUNNING:
                    break
            self._last_message_s = time.monotonic()  # nobody has listened meanwhile
        except (OSError, ValueError, LauncherError) as error:  # ValueError: what no argument or variable may hold
            self._ranks.forget()  # they are ended like all descendants, and are not to be taken for the cause
            self._outbox.send(spawn_failure(error, spec))
            self._stop(0.0)

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

    def _end_leftovers(self) -> None:
        """End what the ranks have left running: after exits with 0 a moment later, as most children end with them."""
        now_s = time.monotonic()
        self._leftovers_until_s = self._leftovers_until_s or now_s + _LEFTOVER_WAIT_S
        if self._ranks.all_exited_with_0 and self._ranks.has_descendants:
            if now_s < self._leftovers_until_s:
                return
            if left := sorted(descendants(os.getpid())):
                self._outbox.send(LeftBehind(left, [name_of(pid) for pid in left]))
        self._stop(_LEFTOVER_GRACE_S)

    def _check_deadlines(self) -> None:
        now_s = time.monotonic()
        is_silent = self._lease_s is not None and now_s - self._last_message_s > self._lease_s
        # On a busy machine, or one that was suspended, a message may have come since the last look.
        if self._outbox.is_connected and is_silent and not self._has_message_waiting():
            self._lose_controller()
        if self._state is not _State.STOPPING:
            return
        if self._ranks.has_descendants and self._kill_at_s is not None and now_s >= self._kill_at_s:
            signal_descendants(os.getpid(), signal.SIGKILL)
            # Again for those that were just forked. On a host with thousands of processes to find them takes its time.
            end_s = time.monotonic()
            self._kill_at_s = end_s + max(_STOP_POLL_S, _SCAN_SHARE * (end_s - now_s))
            self._give_up_at_s = self._give_up_at_s or now_s + timeouts().kill_s
        gave_up = self._give_up_at_s is not None and now_s > self._give_up_at_s
        if (not self._ranks.has_descendants and not self._ranks) or gave_up:
            self._state = _State.GONE
            self._outbox.send(Bye(sorted(descendants(os.getpid())) if self._ranks.has_descendants else []))


def _cores_of_ranks(spec: Spawn) -> list[list[int]]:
    """Return the cores of each rank, [] where none is bound. Raises: UsageError."""
    if spec.bound_cores is None:
        return []
    from launcher.cluster.cores import shares

    return shares(spec.bound_cores, len(spec.rank_envs))
