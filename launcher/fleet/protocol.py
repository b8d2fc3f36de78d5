"""What an agent may send, and when: a broken or hostile agent must not speak for other hosts, nor report a success."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.agent.record import is_sound
from launcher.agent.wire import RESULT, STDERR, STDOUT, Bye, Exited, Message, Output, PortPicked, Raised, SpawnFailed
from launcher.base.errors import ProtocolError

_MAX_PORT = 65535
_STREAMS = (STDOUT, STDERR, RESULT)
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
        if isinstance(message, (Raised, Exited)) and message.record is not None and not is_sound(message.record):
            return f"an unreadable error record of rank {rank}"
        if isinstance(message, Exited):
            if rank not in self._running or message.status not in _STATUSES:
                return f"Exited of rank {rank} with status {message.status}" + (
                    "" if rank in self._running else ", for the second time"
                )
            self._running.discard(message.rank)
        elif isinstance(message, Output) and message.stream not in _STREAMS:
            return f"output on {message.stream[:20]!r}"
        elif isinstance(message, PortPicked) and not 0 <= message.port <= _MAX_PORT:
            return f"port {message.port}"
        elif isinstance(message, SpawnFailed):
            self._running.clear()
        elif isinstance(message, Bye) and self._running and not message.left:
            return f"Bye without a word about {len(self._running)} of its ranks"
        return None
