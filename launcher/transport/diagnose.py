"""Turn the silent end of an agent that never said hello into an error with a cause and a remedy."""

from __future__ import annotations

from launcher.base.errors import TransportError
from launcher.transport.api import Channel

_WAIT_S = 2.0
_COMMAND_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


def start_failure(channel: Channel, reason: str | None) -> TransportError:
    """Say why the agent behind `channel` ended before its first message; waits up to 2 s for its status.

    reason: what is known already, such as a damaged stream; None when the stream simply ended.
    """
    if reason is not None:
        return TransportError(reason, where=channel.host_name, hint="are both sides the same version of launch-zero?")
    status = channel.wait(_WAIT_S)
    stderr = channel.stderr_tail()
    where = channel.host_name
    if "No module named" in stderr and "launcher" in stderr.rpartition("No module named")[2]:
        return TransportError(
            "python is there, but the launcher package is not",
            where=where,
            hint="install launch-zero for that python, or use the same checkout path on every host",
        )
    if status in (_COMMAND_NOT_FOUND, _NOT_EXECUTABLE):
        return TransportError(
            f"python was not found (exit status {status}): {_last_line(stderr)}",
            where=where,
            hint="the same python path is used on every host: install it there, or give another path",
        )
    ended = "the connection was lost" if status is None else f"exit status {status}"
    detail = f"; its last words:\n{stderr}" if stderr else ""
    return TransportError(f"the agent ended before it answered ({ended}){detail}", where=where)


def _last_line(text: str) -> str:
    return text.splitlines()[-1] if text else "no message"
