"""A few lines that stay at the bottom of a terminal, while everything else scrolls above them, byte for byte.

The cursor stays at the start of those lines. So "erase everything from here" takes them away whatever the width of the
window has become, and can never take away a line of output.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Callable

Draw = Callable[[int, int], list[str]]

_REDRAW_S = 0.25  # without output
_GATHER_S = 0.05  # output that comes within this time is written at once, with the lines drawn once
_MAX_HELD_BYTES = 1 << 16  # more is written by whoever brings it: a slow terminal slows the job, nothing grows
_MAX_COLORS = 8
_COLOR = re.compile(rb"\x1b\[[0-9;:]*m")
# What moves the cursor up or elsewhere: nested progress bars, full-screen programs.
_MOVE = re.compile(rb"\x1b(\[[0-9;]*[ABEFHSTdfsu]|\[\?1049h|[78DEMc])")


class _Trail:
    """What the output has left behind at the place where it continues."""

    def __init__(self) -> None:
        self.is_open = False  # a line that ended with a carriage return: the next one overwrites it
        self.is_inside = False  # in the middle of a line
        self.moves_cursor = False  # it has done so at least once
        self._colors: list[bytes] = []

    @property
    def color(self) -> bytes:
        """What brings the output's colours back."""
        return b"".join(self._colors)

    def follow(self, data: bytes) -> None:
        """Record the end of some output, not empty."""
        self.is_open = data.endswith(b"\r")
        self.is_inside = not data.endswith((b"\r", b"\n"))
        if b"\x1b" not in data:
            return
        self.moves_cursor = self.moves_cursor or _MOVE.search(data) is not None
        for code in _COLOR.findall(data):
            if code in (b"\x1b[m", b"\x1b[0m"):
                self._colors.clear()
            else:
                self._colors = [*self._colors[1 - _MAX_COLORS :], code]


class Screen:
    """The terminal while lines stay at its bottom. `write` is for one thread; another one draws.

    Output is held for a moment, so that a burst of it costs one drawing. Only output waits for a slow terminal: lines
    it cannot take now are left out. A terminal that has gone swallows everything.
    """

    def __init__(self, descriptor: int, draw: Draw) -> None:
        """draw: returns the lines, escape codes included, that fit into so many columns and rows."""
        self._descriptor = descriptor
        self._draw = draw
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._held = bytearray()
        self._trail = _Trail()
        self._is_drawn = False
        self._lines: list[bytes] = []
        self._size: tuple[int, ...] = (0, 0)  # columns and rows, when the lines were drawn
        self._is_paused = False
        self._is_stale = False  # what is on the screen is not these lines
        self._draw_at_s = 0.0
        self.is_broken = False  # the terminal has gone
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Show output, soon."""
        with self._lock:
            self._held += data
            if len(self._held) > _MAX_HELD_BYTES or not self._thread.is_alive():
                self._show(with_lines=False)
        self._wake.set()

    def pause(self) -> None:
        """Show what is held and take the lines away, until `resume`."""
        with self._lock:
            self._is_paused = True
            self._show(with_lines=False)

    def resume(self) -> None:
        """Show the lines again."""
        with self._lock:
            self._is_paused = False
        self._wake.set()

    def close(self) -> None:
        """Show the rest, and leave the terminal as if there had never been lines at its bottom."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        with self._lock:
            self._show(with_lines=False)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._refresh_lines()
            with self._lock:
                self._show(with_lines=True)
            self._wake.wait(_REDRAW_S)
            self._closing.wait(_GATHER_S)
            self._wake.clear()

    def _refresh_lines(self) -> None:
        """Draw anew, not too often: drawing costs more than writing."""
        try:
            size = tuple(os.get_terminal_size(self._descriptor))
        except OSError:  # it has gone, which the next write will find
            return
        if time.monotonic() < self._draw_at_s and size == self._size:
            return
        self._draw_at_s = time.monotonic() + _REDRAW_S
        # One column is left free, for what is typed. A window of no size is one that does not tell.
        lines = [line.encode() for line in self._draw((size[0] or 80) - 1, (size[1] or 24) - 1)]
        self._is_stale = self._is_stale or (size, lines) != (self._size, self._lines)
        self._size, self._lines = size, lines

    def _show(self, *, with_lines: bool) -> None:
        """Write what is held, and the lines below it. The lock is held."""
        output, trail = bytes(self._held), self._trail
        self._held.clear()
        has_screen = self._has_screen()
        is_due = with_lines and has_screen and not (self._closing.is_set() or self._is_paused)
        self._is_drawn = self._is_drawn and has_screen  # what a shell has written over is not ours to erase
        is_news = is_due and (self._is_stale or not self._is_drawn)
        if not output and with_lines and not (is_news and self._can_write()):
            return
        frame = b""
        if self._is_drawn and (output or not is_due):
            frame += b"\r\x1b[0m\x1b[J" + (b"\x1b[A" if trail.is_open else b"") + trail.color
            self._is_drawn = False
        if output:
            trail.follow(output)
            frame += output
        if is_due and self._lines and not (trail.is_inside or trail.moves_cursor):
            # Where nothing is written above, the old lines are overwritten: erasing them first would flicker.
            frame += b"\n" if trail.is_open and not self._is_drawn else b""
            up = b"\x1b[%dA" % (len(self._lines) - 1) if len(self._lines) > 1 else b""
            # Lines are not broken meanwhile (?7): the window may have become narrower since they were drawn.
            frame += b"\r\x1b[0m\x1b[?7l" + b"\x1b[K\n".join(self._lines) + b"\x1b[K\x1b[J\x1b[?7h\r" + up
            self._is_drawn, self._is_stale = True, False
        self._write_all(frame)

    def _has_screen(self) -> bool:
        """Whether the screen is ours: not while a shell has it back (`launch ... &`, Ctrl-Z)."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # not our controlling terminal, so no shell shares it
            return True

    def _can_write(self, wait_s: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(wait_s * 1000))

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.is_broken:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # another process has switched the terminal to non-blocking
                self._can_write(1.0)
            except OSError:
                self.is_broken = True
