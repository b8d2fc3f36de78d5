"""Open the channels of many hosts at once, so that the wait for them can be ended and explained at any moment.

Whoever waits never joins a thread that connects: a channel that nobody wants any more is closed when it opens.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from launcher.base.errors import Diagnostic, TransportError
from launcher.cluster.cluster import Host
from launcher.transport.api import Channel, Transport

MAX_PARALLEL = 32  # 64 is no quicker, 8 is 1.3 times slower (250 sshd on one machine)
NEVER_CONNECTED = "stopped before it was connected"
TELL_AFTER_S = 2.0  # a wait longer than this is explained to the user
_SLOW_AFTER_S = 1.0
_POLL_S = 0.1
_MAX_NAMES_CHARS = 80


def is_local(host_name: str) -> bool:
    """Tell whether `host_name` means this machine: `localhost` or its own name.

    Addresses never do, 127.0.0.x included: a user who writes an address means the network.
    """
    own = os.uname().nodename.lower()
    return host_name.lower() in {"localhost", own, own.partition(".")[0]}


def max_parallel(num_hosts: int) -> int:
    """Return how many hosts are connected at a time: so many for each process that connects. Raises: UsageError."""
    from launcher.transport.ssh.pool_size import helper_count  # a job on one host has no use for it

    return MAX_PARALLEL * max(1, helper_count(num_hosts))


def waiting_text(names: Sequence[str], num_all: int, transport: str = "") -> str:
    """Return what is being waited for: `node-[3-5] (ssh), 3 of 16`."""
    from launcher.cluster.fold import fold  # a job that need not wait does without

    folded = fold(names)
    short = folded if len(folded) <= _MAX_NAMES_CHARS else folded[:_MAX_NAMES_CHARS] + "…"
    return f"{short}{f' ({transport})' if transport else ''}, {len(names)} of {num_all}"


class Turns:
    """Lets a limited number of hosts be connected at a time.

    Connecting is work for this process, waiting for a host that does not answer is none: after a second a host gives
    its turn to another, so that many dead hosts cost little more than one.
    """

    def __init__(self, limit: int) -> None:
        self._free = threading.Semaphore(limit)
        self._lock = threading.Lock()
        self._since_s: dict[object, float] = {}  # of those that hold a turn

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and hold it."""
        self._free.acquire()
        key = object()
        with self._lock:
            self._since_s[key] = time.monotonic()
        try:
            yield
        finally:
            self._give_back([key])

    def look(self) -> None:
        """Take the turns of those that only wait. Called a few times a second."""
        slow_s = time.monotonic() - _SLOW_AFTER_S
        with self._lock:
            slow = [key for key, since_s in self._since_s.items() if since_s < slow_s]
        self._give_back(slow)

    def _give_back(self, keys: Sequence[object]) -> None:
        with self._lock:
            held = [key for key in keys if self._since_s.pop(key, None) is not None]
        for _ in held:
            self._free.release()


class Opening:
    """One host whose channel is opened on one thread, while another may give it up at any moment."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.transport = ""  # name of what reaches the host, once it is known
        self.channel: Channel | None = None
        self.start_s = self.opened_s = 0.0  # monotonic; 0.0: not yet
        self._lock = threading.Lock()
        self._given_up = threading.Event()

    def open(self, transport_for: Callable[[Host], Transport], turns: Turns) -> Channel:
        """Open the channel. Blocking. Raises: TransportError, also when it was given up meanwhile."""
        with turns.turn():
            if self._given_up.is_set():
                raise TransportError(NEVER_CONNECTED, where=self.host.name)
            self.start_s = time.monotonic()
            transport = transport_for(self.host)
            self.transport = transport.name
            channel = transport.open(self.host)
        with self._lock:
            is_late = self._given_up.is_set()
            if not is_late:
                self.opened_s = time.monotonic()
                self.channel = channel
        if is_late:
            channel.close()
            raise TransportError(NEVER_CONNECTED, where=self.host.name)
        return channel

    def give_up(self) -> Channel | None:
        """Close the channel as soon as it opens. Returns it where it is open already, and leaves it so."""
        with self._lock:
            self._given_up.set()
            return self.channel


def open_all(
    transport_for: Callable[[Host], Transport],
    hosts: Sequence[Host],
    look_up: Callable[[], object] = lambda: None,
    on_waiting: Callable[[str], object] = lambda _: None,
) -> list[Channel]:
    """Start the agents of `hosts`, `max_parallel` at a time; the channels come in the order of `hosts`.

    look_up: called ten times a second; what it raises ends the wait at once. on_waiting: called once, after 2 s, with
    what is waited for. When this raises, no channel stays open.

    Raises: TransportError with one finding for each host that failed, or another LauncherError of one host.
    """
    turns = Turns(max_parallel(len(hosts)))
    openings = [Opening(host) for host in hosts]
    ended: queue.SimpleQueue[tuple[int, Exception | None]] = queue.SimpleQueue()

    def work(number: int) -> None:
        error: Exception | None = None
        try:
            openings[number].open(transport_for, turns)
        except Exception as caught:  # noqa: BLE001  # the main thread judges it
            error = caught
        ended.put((number, error))

    for number, host in enumerate(hosts):
        threading.Thread(target=work, args=(number,), name=f"connect-{host.name}", daemon=True).start()
    try:
        return _wait_for_all(openings, ended, turns, look_up, on_waiting)
    except BaseException:  # no host may keep an agent that nobody talks to
        for opening in openings:
            channel = opening.give_up()
            if channel is not None:
                channel.close()
        raise


def _wait_for_all(
    openings: Sequence[Opening],
    ended: queue.SimpleQueue[tuple[int, Exception | None]],
    turns: Turns,
    look_up: Callable[[], object],
    on_waiting: Callable[[str], object],
) -> list[Channel]:
    """Wait for all openings. Raises: TransportError, and what `look_up` raises."""
    left = dict(enumerate(openings))
    findings: dict[int, Sequence[Diagnostic]] = {}
    tell_at_s = time.monotonic() + TELL_AFTER_S
    while left:
        with contextlib.suppress(queue.Empty):
            number, error = ended.get(timeout=_POLL_S)
            del left[number]
            if isinstance(error, TransportError):
                findings[number] = error.diagnostics
            elif error is not None:
                raise error
        look_up()
        turns.look()
        if left and time.monotonic() > tell_at_s:
            tell_at_s = math.inf
            opening = next(iter(left.values()))
            on_waiting(waiting_text([opening.host.name for opening in left.values()], len(openings), opening.transport))
    if findings:
        raise TransportError.from_diagnostics([found for _, several in sorted(findings.items()) for found in several])
    return [opening.channel for opening in openings if opening.channel is not None]
