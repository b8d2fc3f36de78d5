"""Turn the silent end of an agent, or of a shell, that never answered into an error with a cause and a remedy."""

from __future__ import annotations

from launcher.base.errors import TransportError
from launcher.base.fields import named
from launcher.base.timeouts import timeouts
from launcher.transport.api import Channel
from launcher.transport.command import SETUP_FAILED

_COMMAND_NOT_FOUND = 127
_NOT_EXECUTABLE = 126
_MAX_WORDS_CHARS = 2000
_RESTRICTED = "restricted"  # what shells say of themselves that may not start programs by their paths


def start_failure(channel: Channel, reason: str | None, printed: bytes = b"") -> TransportError:
    """Return why the agent behind `channel` ended before its first message; waits up to 2 s for its status.

    reason: what is known already, such as a damaged stream; None when the stream simply ended. printed: what came on
    stdout in place of an agent's words: a login shell that refuses says why there.
    """
    where = channel.host_name
    if reason is not None:
        return TransportError(reason, where=where, hint="are both sides the same version of launch-zero?")
    status = channel.wait(timeouts().last_words_s)
    stderr = channel.stderr_tail()
    last = stderr.splitlines()[-1] if stderr else "no message"
    if SETUP_FAILED in stderr:
        return setup_failure(where, status, stderr)
    if "No module named" in stderr and "launcher" in stderr.rpartition("No module named")[2]:
        return TransportError(
            "python is there, but the launcher package is not",
            where=where,
            hint="install launch-zero for that python, or use the same checkout path on every host",
        )
    if status == _COMMAND_NOT_FOUND and _RESTRICTED not in stderr:
        return TransportError(
            f"python was not found (exit status {status}): {last}",
            where=where,
            hint="every host needs python at the same path: install it there, or name another with"
            f" {named('remote_python')}",
        )
    if status == _NOT_EXECUTABLE:
        return TransportError(
            f"python may not be executed (exit status {status}): {last}",
            where=where,
            hint="let this user execute it there, folders above it included, or name another with"
            f" {named('remote_python')}",
        )
    ended = "the connection was lost" if status is None else f"exit status {status}"
    words = last_words(stderr, printed)
    detail = f"; the end of its output:\n{words}" if words else ""
    return TransportError(
        f"the agent ended before it answered ({ended}){detail}",
        where=where,
        hint=shell_hint(where, words) if printed or _RESTRICTED in words or not (words or status is None) else None,
    )


def shell_hint(where: str, words: str) -> str:
    """Return what to do about a login shell that ended before it ran anything. words: what it printed."""
    if _RESTRICTED in words:
        return "its login shell may not start /bin/sh, as it is a restricted one (rbash): ask who runs the host"
    if words:
        return "this came from its login shell in place of an answer: ask who runs the host"
    return f"does a start-up file of its login shell (.bashrc) end it? Then this prints nothing: ssh {where} echo hello"


def setup_failure(where: str, status: int | None, stderr: str) -> TransportError:
    """Return the error for a setup command that failed."""
    lines = stderr.partition(SETUP_FAILED)[0].strip().splitlines()
    what, hint = "it failed", "nothing is started where this fails: fix the command, or leave the option out"
    if status == _COMMAND_NOT_FOUND:
        what = "a command of it was not found"
        hint = (
            "the text is run by the login shell, or /bin/sh, without its interactive start-up files: "
            "name what defines the command, such as '. /etc/profile.d/modules.sh && module load cuda'"
        )
    elif status == 0:
        what, hint = "it ended its shell", "ranks are started by the same shell: leave `exit` and `exec` out of it"
    words = f": {lines[-1]}" if lines else ""
    return TransportError(
        f"{named('setup')} or {named('venv_script')}: {what} (exit status {status}){words}", where=where, hint=hint
    )


def last_words(stderr: str, printed: bytes) -> str:
    """Return what both streams showed before the end, in few lines."""
    words = "\n".join(filter(None, (printed.decode("utf-8", "replace").strip(), stderr.strip())))
    return words[-_MAX_WORDS_CHARS:]
