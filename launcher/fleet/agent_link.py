"""One host with an agent: what it has said of itself, its clock, its output window, and what is sent to it."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Collection, Iterable

from launcher.agent.wire import (
    JOURNAL,
    RESULT,
    STDERR,
    STDOUT,
    TRACE,
    Bye,
    Decoder,
    Exited,
    Handled,
    Hello,
    MasterTried,
    Message,
    Output,
    Ping,
    Pong,
    PortPicked,
    Raised,
    SpawnFailed,
    Stop,
    check_version,
    encode,
    is_sound_record,
)
from launcher.base.errors import LauncherError, ProtocolError, TransportError
from launcher.base.fields import MAX_PORT
from launcher.cluster.cluster import Host
from launcher.fleet.host_link import READ_BYTES, Emit, HostLink
from launcher.transport.api import Channel, Shared
from launcher.transport.diagnose import start_failure

# ---- What an agent may send, and when ----


_STREAMS = (STDOUT, STDERR, RESULT, JOURNAL, TRACE)
_STATUSES = range(-64, 256)  # minus a signal, or an exit code


class ProtocolCheck:
    """Checks the messages of one agent in their order. Used by the thread that reads them."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """ranks: those of the agent's node."""
        self._ranks = frozenset(ranks)
        self._running = set(self._ranks)  # as far as the agent has reported

    def check(self, message: Message) -> None:
        """Raise ProtocolError when the agent may not send this, or not now."""
        problem = self._problem(message)
        if problem is not None:
            raise ProtocolError(f"its agent broke the protocol: {problem}")

    def _problem(self, message: Message) -> str | None:
        rank = getattr(message, "rank", None)
        if rank is not None and rank not in self._ranks:
            return f"{type(message).__name__} for rank {rank}, which is not on this host"
        if isinstance(message, (Raised, Exited)) and message.record is not None and not is_sound_record(message.record):
            return f"an unreadable error record of rank {rank}"
        if isinstance(message, Exited):
            if rank not in self._running or message.status not in _STATUSES:
                return f"Exited of rank {rank} with status {message.status}" + (
                    "" if rank in self._running else ", for the second time"
                )
            self._running.discard(message.rank)
        elif isinstance(message, Output) and message.stream not in _STREAMS:
            return f"output on {message.stream[:20]!r}"
        elif isinstance(message, PortPicked) and not 0 <= message.port <= MAX_PORT:
            return f"port {message.port}"
        elif isinstance(message, SpawnFailed):
            self._running.clear()
        elif isinstance(message, Bye) and self._running and not message.left:
            return f"Bye without a word about {len(self._running)} of its ranks"
        return None


# ---- A host with an agent ----


HEARTBEAT_INTERVAL_S = 1.0
_MAX_DRIFT = 1e-4  # of clocks against each other, seconds a second; bad crystals have half of it


class Window:
    """How much output of a host may be on its way: the launcher's side of `wire.Handled`.

    Counts what has arrived and been handled of one host's output; it is acknowledged in quarters of the window.

    Output goes several ways (the logs, the display). It is handled when it has come to the end of all of them.
    """

    def __init__(self, num_bytes: int | None, num_ways: int = 1) -> None:
        """num_bytes: the size; None: there is no limit, and nothing is acknowledged."""
        self.num_bytes = num_bytes
        self._lock = threading.Lock()
        self._arrived_bytes = 0
        self._handled_bytes = [0] * num_ways
        self._acknowledged_bytes = 0

    @property
    def is_half_full(self) -> bool:
        """Whether so much is held here that the ranks may have to wait."""
        return self.num_bytes is not None and self._arrived_bytes - min(self._handled_bytes) > self.num_bytes // 2

    def arrived(self, output: Output) -> None:
        """Record that `output` is here. For the one thread that reads the node."""
        self._arrived_bytes += output.cost_bytes

    def handled(self, output: Output, way: int = 0) -> Handled | None:
        """Record that `output` has come to the end of a way. Returns the acknowledgement that is due now, if one is."""
        if self.num_bytes is None:
            return None
        with self._lock:
            self._handled_bytes[way] += output.cost_bytes
            due_bytes = min(self._handled_bytes) - self._acknowledged_bytes
            if due_bytes < self.num_bytes // 4:
                return None
            self._acknowledged_bytes += due_bytes
        return Handled(due_bytes)


class Sender:
    """Writes messages to a channel: in order, on a thread of its own, with a heartbeat every second.

    A node that takes nothing out of its stream, a full pipe or SSH window, delays what is sent to that node and nothing
    else. Terminals, logs and user code share nothing with this thread, so that they cannot delay a heartbeat.
    """

    def __init__(self) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ping_at_s = math.inf

    def start(self, channel: Channel, *, has_lease: bool) -> None:
        """Begin to write. has_lease: the agent ends its ranks when it hears nothing, so it gets heartbeats."""
        if has_lease:
            self._ping_at_s = time.monotonic() + HEARTBEAT_INTERVAL_S
        threading.Thread(target=self._run, args=(channel,), name="send", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message, later. A lost connection is noticed by whoever reads. Raises: ProtocolError."""
        self.put(encode(message))

    def put(self, frame: bytes) -> None:
        """Send what is encoded, as `send` does."""
        self._outbox.put(frame)

    def end(self) -> None:
        """End the agent's stdin once everything is sent. Idempotent."""
        self._outbox.put(None)

    def _run(self, channel: Channel) -> None:
        try:
            while (data := self._next()) is not None:
                channel.write(data)
        except TransportError:
            return
        channel.close_stdin()

    def _next(self) -> bytes | None:
        """Return what is to be written now; None at the end."""
        try:
            wait_s = max(0.0, self._ping_at_s - time.monotonic())
            return self._outbox.get(timeout=None if wait_s == math.inf else wait_s)
        except queue.Empty:
            self._ping_at_s = time.monotonic() + HEARTBEAT_INTERVAL_S
            return encode(Ping())


class AgentLink(HostLink):
    """One host whose channel leads to an agent. Subclasses take the output of its ranks."""

    def __init__(
        self, host: Host, ranks: Collection[int] = (), *, window_bytes: int | None = None, num_ways: int = 1
    ) -> None:
        """ranks: that the agent may speak of. window_bytes: how much of their output may be held here, where the
        channel has no limit of its own. num_ways: that output goes, see `Window`."""
        super().__init__(host)
        self.hello: Hello | None = None
        self.picked: PortPicked | None = None  # the answer to PickPort
        self.master: MasterTried | None = None  # the answer to TryMaster
        self.left_pids: tuple[int, ...] = ()  # processes that the agent could not kill
        self.clock_offset_s = math.inf  # our monotonic clock minus the host's, see `_estimate_clock_offset`
        self.ponged_s = 0.0  # monotonic, of the last answer to a heartbeat
        self.window = Window(window_bytes, num_ways)
        self._clock_heard_s = 0.0
        self._ranks = ranks
        self._num_ways = num_ways
        self._sender = Sender()

    def take_output(self, output: Output) -> None:
        """Take what a rank wrote. On the host's own thread, which reads nothing meanwhile."""

    def handled(self, output: Output, way: int = 0) -> None:
        """Record that output has come to the end of a way, and say so to the agent when it is time to. Any thread."""
        message = self.window.handled(output, way)
        if message is not None and not self.ended:
            self.send(message)

    def send(self, message: Message) -> None:
        """Send a message once there is a channel, without waiting. Any thread. The reader reports a lost connection."""
        self._sender.send(message)

    def send_frame(self, frame: Shared) -> None:
        """Send what is encoded once for all hosts, as `send` does."""
        self._sender.put(frame)

    def stop(self, grace_s: float) -> None:
        self.send(Stop(grace_s))
        if not self.has_lease:  # it gets no heartbeats, and a suspended one is to be noticed
            self.send(Ping())

    def is_mute_since(self, asked_s: float) -> bool:
        return not self.has_lease and self.has_answered and self.ponged_s < asked_s

    def hang_up(self) -> None:
        self._sender.end()

    def follow(self, channel: Channel, emit: Emit) -> None:
        self.has_lease = self.transport != "local"  # a local agent's pipe ends with it
        if channel.window_bytes is not None:
            self.window = Window(channel.window_bytes, self._num_ways)
        self._sender.start(channel, has_lease=self.has_lease)
        decoder, protocol = Decoder(expect_magic=True), ProtocolCheck(self._ranks)
        try:
            while data := channel.read(READ_BYTES):
                for message in decoder.feed(data):
                    protocol.check(message)
                    if isinstance(message, Output):
                        self.take_output(message)
                    else:
                        self._note(message)
                        emit(message)
                self.last_heard_s = time.monotonic()  # as long as this thread did not read, silence means nothing
        except (LauncherError, OSError) as error:
            if self.has_answered or (isinstance(error, LauncherError) and error.diagnostics[0].hint):
                raise
            raise start_failure(channel, str(error)) from None
        if not self.has_answered:
            raise start_failure(channel, None, decoder.banner)
        if not self.exited_cleanly:
            raise TransportError("the agent ended or the connection was lost")

    def _note(self, message: Message) -> None:
        """Keep what a message says of the agent itself."""
        if isinstance(message, Hello):
            check_version(message, self.name)
            self.hello, self.has_answered = message, True
            self._estimate_clock_offset(message.time_s)
        elif isinstance(message, Pong):
            self.ponged_s = time.monotonic()
            self._estimate_clock_offset(message.time_s)
        elif isinstance(message, PortPicked):
            self.picked = message
        elif isinstance(message, MasterTried):
            self.master = message
        elif isinstance(message, Bye):
            self.exited_cleanly, self.left_pids = True, tuple(message.left)

    def _estimate_clock_offset(self, time_s: float) -> None:
        """Learn from a message what the host's clock says. Any delay makes the offset too large: the smallest counts.

        A little is added for the time since then, as clocks drift: a job may run for weeks.
        """
        if not self.has_lease:  # on this machine there is one clock; what follows would only make later times earlier
            self.clock_offset_s = 0.0
            return
        now_s = time.monotonic()
        drift_s = _MAX_DRIFT * (now_s - self._clock_heard_s)
        self.clock_offset_s = min(now_s - time_s, self.clock_offset_s + drift_s)
        self._clock_heard_s = now_s
