"""One host of a fleet: its channel, and the thread that connects it and then reads it to its end."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from launcher.agent.wire import Message
from launcher.base.errors import TransportError
from launcher.cluster.cluster import Host
from launcher.transport.api import Channel, Transport

NEVER_CONNECTED = "stopped before it was connected"
READ_BYTES = 1 << 18
# Messages of one host, output aside, that are read and not yet handled: no agent can make this process grow.
_MAX_UNHANDLED = 256
MAX_PARALLEL = (
    32  # hosts that are connected at a time: 64 is no quicker, 8 is 1.3 times slower (250 sshd on one machine)
)
_SLOW_AFTER_S = 1.0  # of connecting


@dataclass(frozen=True)
class Connected:
    """The channel to the host is open."""


@dataclass(frozen=True)
class HostEnded:
    """The host has ended or is lost: the last event of it."""

    error: Exception | None  # None: its stream ended as it should


Event = Message | Connected | HostEnded
Emit = Callable[[Event], object]


class ConnectSlots:
    """Lets a limited number of hosts be connected at a time.

    Connecting is work for this process, waiting for a host that does not answer is none: after a second a host gives
    its slot to another, so that many dead hosts cost little more than one.
    """

    def __init__(self, limit: int) -> None:
        self._free = threading.Semaphore(limit)
        self._lock = threading.Lock()
        self._since_s: dict[object, float] = {}  # of those that hold a slot

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Wait for a slot, and hold it."""
        self._free.acquire()
        key = object()
        with self._lock:
            self._since_s[key] = time.monotonic()
        try:
            yield
        finally:
            self._give_back([key])

    def free_slow(self) -> None:
        """Take the slots of those that only wait. Called a few times a second."""
        slow_s = time.monotonic() - _SLOW_AFTER_S
        with self._lock:
            slow = [key for key, since_s in self._since_s.items() if since_s < slow_s]
        self._give_back(slow)

    def _give_back(self, keys: Sequence[object]) -> None:
        with self._lock:
            held = [key for key in keys if self._since_s.pop(key, None) is not None]
        for _ in held:
            self._free.release()


class HostLink(ABC):
    """One host. Subclasses know what runs at the far end; the fields are for the main thread to read."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.channel: Channel | None = None  # once it is open
        self.transport = ""  # name of what reaches the host, once it is known
        self.start_s = self.opened_s = 0.0  # monotonic, of connecting; 0.0: not yet
        self.has_answered = False
        self.has_lease = False  # a network lies between, and the far end answers heartbeats: silence means a loss
        self.last_heard_s = 0.0  # monotonic; as long as its thread does not read, it is now
        self.exited_cleanly = False  # the far end has said that nothing is left there
        self.ended = False  # set by the fleet, which passes on no event from then on
        self.unhandled = threading.Semaphore(_MAX_UNHANDLED)  # for events that are not handled yet
        self._lock = threading.Lock()
        self._cancelled = threading.Event()

    @property
    def name(self) -> str:
        """The host's name, as the user wrote it."""
        return self.host.name

    @abstractmethod
    def follow(self, channel: Channel, emit: Emit) -> None:
        """Read the channel to its end. On the host's own thread. Raises: LauncherError, OSError for a bad end."""

    @abstractmethod
    def stop(self, grace_s: float) -> None:
        """Ask the far end to end what it runs; called again for a shorter grace. Only while a channel is open."""

    def is_mute_since(self, _asked_s: float) -> bool:
        """Whether the far end, on this machine, has left unanswered what was sent then. Where that is not known, no."""
        return False

    @abstractmethod
    def hang_up(self) -> None:
        """Send nothing more: where agents run, the end of their stdin makes them leave."""

    def serve(self, transport_for: Callable[[Host], Transport], slots: ConnectSlots, emit: Emit) -> None:
        """Connect, and follow the host to its end. On the host's own thread."""
        error: Exception | None = None
        try:
            channel = self.open(transport_for, slots)
            emit(Connected())
            self.follow(channel, emit)
        except Exception as caught:  # noqa: BLE001  # the main thread judges it
            error = caught
        emit(HostEnded(error))

    def open(self, transport_for: Callable[[Host], Transport], slots: ConnectSlots) -> Channel:
        """Open the channel. Blocking. Raises: TransportError, also when it was cancelled meanwhile."""
        with slots.take():
            if self._cancelled.is_set():
                raise TransportError(NEVER_CONNECTED, where=self.name)
            self.start_s = time.monotonic()
            transport = transport_for(self.host)
            self.transport = transport.name
            channel = transport.open(self.host)
        with self._lock:
            is_late = self._cancelled.is_set()
            if not is_late:
                self.opened_s = self.last_heard_s = time.monotonic()
                self.channel = channel
        if is_late:
            channel.close()
            raise TransportError(NEVER_CONNECTED, where=self.name)
        return channel

    def cancel(self) -> Channel | None:
        """Close the channel as soon as it opens. Returns it where it is open already, and leaves it so."""
        with self._lock:
            self._cancelled.set()
            return self.channel
