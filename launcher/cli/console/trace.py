"""What `launch -v` shows of the agent protocol: a line for each message, without output, arguments and variables."""

from __future__ import annotations

import threading

from launcher.agent.wire import Handled, Message, Output, Ping, Pong, watch_messages
from launcher.cli.console import streams

_TOO_MANY = (Ping, Pong, Handled)  # they say that both sides live, each second or more often
_SECRET = {"env", "forwarded_env", "rank_envs", "commands", "data", "text", "record"}  # values, or what ranks write


def show_messages() -> None:
    """Show the messages of this process on stderr from now on."""
    watch_messages(_show)


def line_of(message: Message, *, is_sent: bool) -> str:
    """Return a message as one line: `protocol: received Started(rank=0, pid=4711)`."""
    fields = message.as_dict()
    shown = [f"{name}={value!r}" for name, value in fields.items() if name not in _SECRET]
    if isinstance(message, Output):
        shown.append(f"{len(message.data)} bytes")
    way = "sent" if is_sent else "received"
    return f"protocol: {way} {type(message).__name__}({', '.join(shown)})"


def _show(message: Message, is_sent: bool) -> None:
    if not isinstance(message, _TOO_MANY):
        streams.say(f"{line_of(message, is_sent=is_sent)} [{threading.current_thread().name}]")
