"""Standard output and error when they are not what a program hopes for: closed, full, unread, not to be waited on.

What a job says must never end the job: its logs are complete. A stream that fails is pointed to nowhere, for good.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from typing import BinaryIO, TextIO

import click


def open_missing() -> None:
    """Put /dev/null where a standard descriptor was closed (`launch >&-`): no pipe of ours may take its number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def write(stream: BinaryIO, data: bytes) -> None:
    """Write bytes as they are; when it cannot be done, what follows goes nowhere."""
    view = memoryview(data)
    while True:
        try:
            while view:
                count = stream.write(view)
                if count is None:  # what a stream without a buffer says
                    raise BlockingIOError(errno.EAGAIN, "", 0)
                view = view[count:]
            stream.flush()
            return
        except BlockingIOError as error:  # a terminal or pipe that somebody else has set to O_NONBLOCK
            view = view[error.characters_written :]
            poller = select.poll()
            poller.register(stream.fileno(), select.POLLOUT)
            poller.poll()
        except OSError as error:
            _silence(stream.fileno())
            if error.errno != errno.EPIPE and stream is not sys.stderr.buffer:
                say(click.style("! ", fg="yellow") + f"standard output: {error.strerror}; the rest is in the logs only")
            return


def shows_colors(stream: TextIO) -> bool:
    """Say whether our own lines may have colours there: on a terminal, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def say(text: str) -> None:
    """Write a line of our own to standard error."""
    shown = text if shows_colors(sys.stderr) else click.unstyle(text)
    sys.stderr.flush()
    write(sys.stderr.buffer, f"{shown}\n".encode("utf-8", "backslashreplace"))


def silence_all() -> None:
    """Point both streams to nowhere: Python must not complain about them while it shuts down."""
    for descriptor in (1, 2):
        _silence(descriptor)


def _silence(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
