"""One node as the controller sees it: its channel, its ranks, and the threads that read and write."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from launcher.agent.wire import Decoder, Hello, LeftBehind, Message, Output, Pong
from launcher.base.errors import ProtocolError, TransportError
from launcher.cluster.cluster import NodePlacement
from launcher.job.flow_control import Window
from launcher.job.protocol import ProtocolCheck
from launcher.job.sender import Sender
from launcher.transport.api import Channel

_READ_BYTES = 1 << 18
# Messages of one node, output aside, that are read and not yet handled: no agent can make this process grow.
_MAX_UNHANDLED = 256
# Output that is here and not yet written, of one node and of all together. Then agents leave their ranks' pipes unread
# and ranks wait: nothing is lost and nothing grows. The stream itself is always read, whatever the console does: the
# answers to heartbeats and the news of failures come through it too.
_WINDOW_BYTES = 4 << 20
_ALL_WINDOWS_BYTES = 512 << 20
_MIN_WINDOW_BYTES = 1 << 18
_NUM_WAYS = 2  # of output: to the logs and to the display
_MAX_NAMED = 5  # processes that a warning lists
_MAX_DRIFT = 1e-4  # of clocks against each other, seconds a second; bad crystals have half of it


@dataclass(frozen=True)
class ChannelEnded:
    """The agent's stream is over, well (after Bye) or not."""

    reason: str | None  # None: it ended without an error that could be told
    printed: bytes = b""  # what came in place of an agent's words


@dataclass
class Node:
    """The state of one node during a run; touched by the controller's thread only, but for what its reader hears."""

    placement: NodePlacement
    channel: Channel
    has_lease: bool = False  # a network lies between: see `JobPlan.needs_lease`
    num_nodes: int = 1  # that share what may be held here
    running: set[int] = field(default_factory=set)  # ranks that were started and have not ended
    pids: dict[int, int] = field(default_factory=dict)
    devices: list[str] | None = None  # what the agent's environment says of GPUs, see wire.Hello
    clock_offset_s: float = math.inf  # our monotonic clock minus the node's, see `hear_clock`
    last_heard_s: float = field(default_factory=time.monotonic)  # monotonic clock; while we do not listen it is now
    ponged_s: float = 0.0  # monotonic clock, of the last answer to a heartbeat
    wrote_s: dict[int, float] = field(default_factory=dict)  # monotonic clock: when each rank's last output came
    said_bye: bool = False
    left_pids: tuple[int, ...] = ()  # processes that the agent could not kill
    ended: bool = False
    window: Window = field(init=False)
    _clock_heard_s: float = 0.0

    def __post_init__(self) -> None:
        share_bytes = max(_MIN_WINDOW_BYTES, min(_WINDOW_BYTES, _ALL_WINDOWS_BYTES // self.num_nodes))
        self.window = Window(self.channel.window_bytes or share_bytes, _NUM_WAYS)
        self._sender = Sender(self.channel, has_lease=self.has_lease)

    @property
    def name(self) -> str:
        return self.placement.host.name

    def hear_clock(self, time_s: float) -> None:
        """Learn from a message what the node's clock says. Any delay makes the offset too large: the smallest counts.

        A little is added for the time since then, as clocks drift: a job may run for weeks.
        """
        now_s = time.monotonic()
        drift_s = _MAX_DRIFT * (now_s - self._clock_heard_s)
        self.clock_offset_s = min(now_s - time_s, self.clock_offset_s + drift_s)
        self._clock_heard_s = now_s

    def handled(self, output: Output, way: int) -> None:
        """Note that output has come to the end of a way, and tell the agent when it is time to. Any thread."""
        message = self.window.handled(output, way)
        if message is not None and not self.ended:
            self.send(message)

    def send(self, message: Message) -> None:
        """Send a message, without waiting. Any thread. When the connection is gone the reader reports it."""
        self._sender.send(message)

    def close_stdin(self) -> None:
        """End the agent's stdin once everything is sent. Does not wait."""
        self._sender.end()


def describe_leftovers(node: Node, message: LeftBehind) -> str:
    """Say what the ranks of a node have left running, that it is ended now, and what helps."""
    pairs = list(zip(message.pids, message.names, strict=False))
    shown = [f"{name} (pid {pid})" for pid, name in pairs[:_MAX_NAMED]]
    more = len(pairs) - len(shown)
    what = ", ".join(shown) + (f" and {more} more" if more else "")
    return (
        f"ranks on {node.name} have ended and left processes running, which end with the job: {what};"
        " let the script wait for them (nohup and setsid do not keep them)"
    )


NodeEvent = tuple[Node, "Message | ChannelEnded"]


class Inbox:
    """Events of all nodes in one queue, bounded for each node, and wake-ups from signal handlers."""

    def __init__(self, take_output: Callable[[Node, Output], None]) -> None:
        """take_output: gets the output of ranks, on the thread that reads the node; must not block."""
        self._take_output = take_output
        # SimpleQueue.put may be called from a signal handler, which queue.Queue forbids.
        self._queue: queue.SimpleQueue[tuple[NodeEvent, threading.Semaphore] | None] = queue.SimpleQueue()

    def listen(self, node: Node) -> None:
        """Start reading `node`'s channel in a thread of its own."""
        threading.Thread(target=self._read, args=(node,), name=f"read-{node.name}", daemon=True).start()

    def wake(self) -> None:
        """Let a waiting `get` return None. Safe in a signal handler."""
        self._queue.put(None)

    def get(self, timeout_s: float) -> NodeEvent | None:
        """Return the next event, None after `timeout_s` or a wake-up."""
        try:
            item = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if item is None:
            return None
        event, room = item
        room.release()
        return event

    def _read(self, node: Node) -> None:
        room = threading.Semaphore(_MAX_UNHANDLED)
        decoder, protocol = Decoder(expect_magic=True), ProtocolCheck(node.placement.ranks)
        reason = None
        try:
            while True:
                node.last_heard_s = time.monotonic()  # as long as nobody listened, silence means nothing
                data = node.channel.read(_READ_BYTES)
                if not data:
                    break
                for message in decoder.feed(data):
                    protocol.check(message)
                    if isinstance(message, Output):
                        self._take_output(node, message)
                        continue
                    if isinstance(message, (Hello, Pong)):
                        node.hear_clock(message.time_s)
                    if isinstance(message, Pong):
                        node.ponged_s = time.monotonic()
                    room.acquire()
                    self._queue.put(((node, message), room))
        except (ProtocolError, TransportError, OSError) as error:
            reason = str(error)
        room.acquire()
        self._queue.put(((node, ChannelEnded(reason, decoder.banner)), room))
