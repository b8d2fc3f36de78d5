"""What is sent to one agent: in order, on a thread of its own, with a heartbeat every second.

A node that takes nothing out of its stream, a full pipe or SSH window, delays what is sent to that node and nothing
else. Terminals, logs and user code share nothing with this thread, so that they cannot delay a heartbeat.
"""

from __future__ import annotations

import math
import queue
import threading
import time

from launcher.agent.wire import Message, Ping, encode
from launcher.base.errors import TransportError
from launcher.transport.api import Channel

HEARTBEAT_INTERVAL_S = 1.0


class Sender:
    """Writes messages to a channel."""

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
        self._outbox.put(encode(message))

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
