"""The output of many ranks on one stream: whole lines, each with the prefix of its rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

_MAX_PENDING_BYTES = 1 << 16  # a longer line is shown in parts
_IDLE_S = 0.3  # a line that has not grown for so long is shown as it is
CLEAR_LINE = b"\x1b[K"
_SCREEN_LINES = 30  # what came before so many lines may have scrolled away
_TAIL_BYTES = 1 << 14  # kept of each rank: more than the last lines of a failure


class LineAssembler:
    """Cuts one byte stream into prefixed lines.

    A carriage return ends a part too, and is kept, so that progress bars overwrite themselves as they do without a
    launcher.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self.pending = b""  # the line that has no end yet
        self.is_inside = False  # parts of this line are shown already
        self.is_previewed = False
        self.fed_s = 0.0  # monotonic

    def feed(self, data: bytes) -> bytes:
        """Return what can be shown now: lines that are complete."""
        # bytes.splitlines cuts at \\n, \\r and \\r\\n only.
        parts = (self.pending + data).splitlines(keepends=True)
        self.pending, self.is_previewed, self.fed_s = b"", False, time.monotonic()
        if parts and not parts[-1].endswith(b"\n"):  # also after \r: the \n that belongs to it may be on its way
            self.pending = parts.pop()
        shown = b""
        if parts:
            if b"\r" in parts:  # a bar begins with it: it returns to where the bar will be, and is no line
                shown = b"".join(part if part == b"\r" else self._prefix + part for part in parts)
                shown = shown.removeprefix(self._prefix) if self.is_inside else shown
            else:
                shown = self._start + self._prefix.join(parts)
            self.is_inside = False
        if len(self.pending) > _MAX_PENDING_BYTES:
            shown += self.take_pending()
        return shown

    def take_pending(self) -> bytes:
        """Return what is pending, to be shown for good."""
        shown, self.pending = (b"" if self.pending == b"\r" else self._start) + self.pending, b""
        self.is_inside = not shown.endswith(b"\r")
        return shown

    def preview(self, columns: int) -> bytes:
        """Return what is pending as one row of a terminal that the complete line will overwrite."""
        self.is_previewed = True
        text = (self._prefix + self.pending).decode("utf-8", "replace")
        return text[: max(1, columns - 1)].encode("utf-8", "replace") + b"\r"

    def flush(self) -> bytes:
        """Return the rest, which had no line end, as a line."""
        if not (self.pending or self.is_inside):
            return b""
        shown = self._start + self.pending + b"\n"
        self.pending, self.is_inside = b"", False
        return shown

    @property
    def _start(self) -> bytes:
        return b"" if self.is_inside else self._prefix


class MixedLines:
    """The lines of several writers on one stream. A line is broken off only where another writer needs the stream."""

    def __init__(self, columns: Callable[[], int] | None = None, *, has_prompts: bool = False) -> None:
        """columns: of the terminal, where the stream is one that can clear a line: unfinished lines are shown there.

        has_prompts: an unfinished line may be one that somebody is to type behind, so that the cursor stays there.
        """
        self._columns = columns
        self._has_prompts = has_prompts
        self._assemblers: dict[Hashable, LineAssembler] = {}
        self._unfinished: LineAssembler | None = None  # whose line stands unfinished on the stream
        self._has_preview = False
        self._returned: LineAssembler | None = None  # whose part stands on the row where the cursor has gone back

    def feed(self, key: Hashable, prefix: bytes, data: bytes) -> bytes:
        """Return what can be shown of what `key` wrote. prefix: of its lines."""
        assembler = self._assemblers.get(key)
        if assembler is None:
            assembler = self._assemblers[key] = LineAssembler(prefix)
        return self._shown(assembler, assembler.feed(data))

    def settle(self, now_s: float) -> bytes:
        """Return what can be shown because nothing has followed for a while. now_s: monotonic clock."""
        shown = b""
        for assembler in self._assemblers.values():
            if not assembler.pending or now_s - assembler.fed_s < _IDLE_S:
                continue
            if assembler.pending.endswith(b"\r") or (self._has_prompts and self._columns is not None):
                shown += self._shown(assembler, assembler.take_pending())
            elif self._columns is not None and not (assembler.is_previewed or assembler.is_inside):
                shown += self._shown(assembler, assembler.preview(self._columns()))
                self._has_preview = True
        return shown

    def interrupt(self) -> bytes:
        """Return what must come before a line that is not of these writers."""
        return self._shown(None, b"")

    def flush(self) -> bytes:
        """Return the rest of every writer, and forget them."""
        shown = b""
        for _, assembler in sorted(self._assemblers.items(), key=lambda item: str(item[0])):
            shown += self._shown(assembler, assembler.flush())
        self._assemblers.clear()
        return shown

    def _shown(self, assembler: LineAssembler | None, data: bytes) -> bytes:
        """Return `data` behind what ends, or clears, what stands on the stream now."""
        if assembler is not None and not data:
            return b""
        # A longer bar would show behind a shorter line of another writer.
        is_over_bar = self._columns is not None and self._returned not in (None, assembler)
        before = CLEAR_LINE if self._has_preview or is_over_bar else b""
        self._has_preview = False
        self._returned = assembler if data.endswith(b"\r") else None
        if self._unfinished is not None and self._unfinished is not assembler:
            self._unfinished.is_inside = False
            before += b"\n"
        self._unfinished = assembler if assembler is not None and assembler.is_inside else None
        return before + data


class ShownOutput:
    """What of the ranks' output a reader still sees, so that a failing rank's last lines are not shown twice.

    Kept are the end of each rank's output, and how much of all ranks' was shown after it.
    """

    def __init__(self) -> None:
        self._num_lines = 0
        self._tails: dict[int, tuple[bytes, int]] = {}  # and the number of lines when it was shown

    def add(self, rank: int, data: bytes) -> None:
        """Record that a rank's bytes were shown."""
        self._num_lines += data.count(b"\n")
        tail, _ = self._tails.get(rank, (b"", 0))
        self._tails[rank] = ((tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:], self._num_lines)

    def has(self, rank: int | None, text: str) -> bool:
        """Whether this rank wrote `text`, and so short a while ago that it is still on the screen."""
        if rank not in self._tails or not text.strip():
            return False
        tail, num_lines = self._tails[rank]
        is_near = self._num_lines - num_lines + text.count("\n") <= _SCREEN_LINES
        return is_near and text.strip().encode("utf-8", "replace") in tail
