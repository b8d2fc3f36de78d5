"""Standard output and error when they are not what a program hopes for: closed, full, unread, not to be waited on.

What a job says must never end the job: its logs are complete. A stream that fails is pointed to nowhere, for good.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, BinaryIO, TextIO

import click

from launcher.base.units import printable

_DEFAULT_COLUMNS = 80
_NO_LIMIT_COLUMNS = 1000


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
    try:
        descriptor = stream.fileno()
    except OSError:  # it is in memory
        stream.write(data)
        return
    # Past the stream's buffer: a thread that waits here must hold no lock that Python's end wants.
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # a terminal or pipe that another process has set to O_NONBLOCK
            poller = select.poll()
            poller.register(descriptor, select.POLLOUT)
            poller.poll()
        except OSError as error:
            _silence(descriptor)
            if error.errno != errno.EPIPE and stream is not sys.stderr.buffer:
                say(click.style("! ", fg="yellow") + f"standard output: {error.strerror}; the rest is in the logs only")
            return


def echo_table(table: Any, console: Any = None) -> None:
    """Print a table of rich without the blank lines, and the blanks at the ends of lines, that it has.

    console: of rich, as wide as the table may be; None: a line of a terminal is not cut.
    """
    from rich.console import Console

    console = console or Console(width=_NO_LIMIT_COLUMNS)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        if line.strip():
            click.echo(line.rstrip())


def echo_rows(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_texts: int) -> None:
    """Print a table of text, without the columns that are empty. num_texts: columns that are flush left; the first."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, name in enumerate(header):
        if any(row[place] for row in rows):
            table.add_column(name, justify="left" if place < num_texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell for place, cell in enumerate(row) if any(each[place] for each in rows)))
    echo_table(table)


def shows_colors(stream: TextIO) -> bool:
    """Whether our own lines may have colours there: on a terminal, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def say(text: str) -> None:
    """Write a line of our own to standard error."""
    shown = text if shows_colors(sys.stderr) else click.unstyle(text)
    sys.stderr.flush()
    write(sys.stderr.buffer, f"{shown}\n".encode("utf-8", "backslashreplace"))


def say_waiting(what: str) -> None:
    """Say on standard error what a command waits for."""
    say(f"waiting for {what}")


def say_if_possible(text: str) -> None:
    """Write a line of our own to standard error, unless one would have to wait for that."""
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        if poller.poll(0):
            os.write(2, f"{text}\n".encode("utf-8", "backslashreplace"))


def show_table(rows: Sequence[tuple[str, ...]], right: Collection[int] = ()) -> None:
    """Print rows of text in columns. right: the columns that are flush right."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def is_same_terminal(one: int, other: int) -> bool:
    """Whether two descriptors are the same terminal."""
    with contextlib.suppress(OSError):
        return os.isatty(other) and os.fstat(one).st_rdev == os.fstat(other).st_rdev
    return False


def columns_of(descriptor: int) -> Callable[[], int] | None:
    """Return what tells the width of a terminal that can clear a line; None for anything else."""
    if os.environ.get("TERM", "") in ("", "dumb", "unknown") or not os.isatty(descriptor):
        return None

    def columns() -> int:
        with contextlib.suppress(OSError):  # it has gone
            return os.get_terminal_size(descriptor).columns or _DEFAULT_COLUMNS
        return _DEFAULT_COLUMNS

    return columns


def silence_all() -> None:
    """Point both streams to nowhere: Python must not complain about them while it shuts down."""
    for descriptor in (1, 2):
        _silence(descriptor)


def _silence(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
