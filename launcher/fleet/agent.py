"""One host with an agent: what it has said of itself, its clock, its output window, and what is sent to it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection

from launcher.agent.wire import Bye, Decoder, Hello, Message, Output, Pong, PortPicked, Stop, check_version
from launcher.base.errors import LauncherError, TransportError
from launcher.cluster.cluster import Host
from launcher.fleet.flow_control import Window
from launcher.fleet.member import READ_BYTES, Emit, Member
from launcher.fleet.protocol import ProtocolCheck
from launcher.fleet.sender import Sender
from launcher.transport.api import Channel
from launcher.transport.diagnose import start_failure

_MAX_DRIFT = 1e-4  # of clocks against each other, seconds a second; bad crystals have half of it


class Agent(Member):
    """One host whose channel leads to an agent. Subclasses take the output of its ranks."""

    def __init__(
        self, host: Host, ranks: Collection[int] = (), *, window_bytes: int | None = None, num_ways: int = 1
    ) -> None:
        """ranks: that the agent may speak of. window_bytes: how much of their output may be held here, where the
        channel has no limit of its own. num_ways: that output goes, see `Window`."""
        super().__init__(host)
        self.hello: Hello | None = None
        self.port: int | None = None  # the answer to PickPort
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
        """Note that output has come to the end of a way, and say so to the agent when it is time to. Any thread."""
        message = self.window.handled(output, way)
        if message is not None and not self.ended:
            self.send(message)

    def send(self, message: Message) -> None:
        """Send a message once there is a channel, without waiting. Any thread. The reader reports a lost connection."""
        self._sender.send(message)

    def stop(self, grace_s: float) -> None:
        self.send(Stop(grace_s))

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
            self.port = message.port
        elif isinstance(message, Bye):
            self.exited_cleanly, self.left_pids = True, tuple(message.left)

    def _estimate_clock_offset(self, time_s: float) -> None:
        """Learn from a message what the host's clock says. Any delay makes the offset too large: the smallest counts.

        A little is added for the time since then, as clocks drift: a job may run for weeks.
        """
        now_s = time.monotonic()
        drift_s = _MAX_DRIFT * (now_s - self._clock_heard_s)
        self.clock_offset_s = min(now_s - time_s, self.clock_offset_s + drift_s)
        self._clock_heard_s = now_s
