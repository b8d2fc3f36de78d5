"""Parts of the screen of `launch top`: rows of which only those in sight are drawn, curves, the bar of phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static

from launcher.cli.top.frame import (
    BAD,
    DIM,
    OK,
    PLAIN,
    WARNING,
    Words,
    chart,
    phase_text,
    phase_widths,
    short_number,
    short_time,
)
from launcher.journal.live import STEPS_PER_S, TOKENS_PER_S, Points, RankView
from launcher.journal.records import BACKWARD, COMMUNICATION, DATA, FORWARD, GC, SAVE, SCRIPT, UPDATE

# The terminal's own colours, of which every terminal has eight.
STYLES = {
    PLAIN: Style(),
    OK: Style(color="green"),
    WARNING: Style(color="yellow"),
    BAD: Style(color="red", bold=True),
    DIM: Style(dim=True),
    "title": Style(bold=True),
}
_PHASE_COLORS = {
    DATA: "red",
    FORWARD: "blue",
    BACKWARD: "green",
    COMMUNICATION: "yellow",
    UPDATE: "cyan",
    SAVE: "magenta",
    GC: "white",
    SCRIPT: "white",
}
_CURSOR = Style(reverse=True)
_LEAST_NAMED = 4  # columns of a bar in which the name of its phase is written

Key = int | str


def styled(words: Iterable[Words]) -> Text:
    """Return pieces of text with their colours, on one line that is cut where it is too long."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for piece in words:
        text.append(piece.text, STYLES[piece.kind])
    return text


class Rows(ScrollView, can_focus=True):
    """Rows with a cursor, which follows its row when the order changes. A row is drawn when it comes into sight."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "move(-1000000000)", show=False),
        Binding("end", "move(1000000000)", show=False),
        Binding("enter", "open", show=False),
    ]

    class Opened(Message):
        """Enter was pressed on a row."""

        def __init__(self, key: Key) -> None:
            super().__init__()
            self.key = key

    class Moved(Message):
        """The cursor is on another row."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._keys: Sequence[Key] = ()
        self._row: Callable[[Key], list[Words]] = lambda _: []
        self._cursor = 0

    @property
    def key(self) -> Key | None:
        """The row of the cursor; None while there is none."""
        return self._keys[self._cursor] if self._keys else None

    @property
    def keys_in_sight(self) -> Sequence[Key]:
        """The rows that are drawn."""
        top = self.scroll_offset.y
        return self._keys[top : top + self.size.height]

    def show(self, keys: Sequence[Key], row: Callable[[Key], list[Words]]) -> None:
        """Show these rows. row: returns what a row says."""
        before = self.key
        place = min(self._cursor, max(0, len(keys) - 1))
        if before is not None and keys and keys[place] != before:
            place = next((index for index, key in enumerate(keys) if key == before), place)
        has_moved = place != self._cursor or before is None
        self._keys, self._row, self._cursor = keys, row, place
        size = Size(1, len(keys))  # as narrow as can be: there is no scrolling sideways
        if size != self.virtual_size:
            self.virtual_size = size
        if has_moved:
            self._scroll_to_cursor()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        index, width = y + self.scroll_offset.y, self.size.width
        if index >= len(self._keys):
            return Strip.blank(width)
        is_chosen = index == self._cursor
        pieces = self._row(self._keys[index])
        if is_chosen and self.has_focus:
            # One colour for the whole row: green in reverse would be another thing than green.
            segments, rest = [Segment("".join(piece.text for piece in pieces), _CURSOR)], _CURSOR
        else:
            rest = Style(bold=is_chosen)
            segments = [Segment(piece.text, STYLES[piece.kind] + rest) for piece in pieces]
        return Strip(segments).adjust_cell_length(width, rest).crop(0, width)

    def action_move(self, count: int) -> None:
        """Move the cursor by so many rows."""
        before = self._cursor
        self._cursor = max(0, min(self._cursor + count, len(self._keys) - 1))
        if self._cursor != before:
            self._scroll_to_cursor()
            self.refresh()
            self.post_message(self.Moved())

    def action_page(self, count: int) -> None:
        """Move the cursor by a screen."""
        self.action_move(count * max(1, self.size.height - 1))

    def action_open(self) -> None:
        """Open the row of the cursor."""
        key = self.key
        if key is not None:
            self.post_message(self.Opened(key))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor where the mouse is."""
        self.action_move(event.y + self.scroll_offset.y - self._cursor)

    def _scroll_to_cursor(self) -> None:
        self.scroll_to_region(Region(0, self._cursor, 1, 1), animate=False, force=True)


class Curve(Static):
    """A value over steps."""

    def show(self, name: str, points: Points) -> None:
        """Show points, the last one in the title."""
        width, height = self.size.width, self.size.height
        if not points:
            self.update(Text(f"{name}: not known", STYLES[DIM]), layout=False)
            return
        title = f"{name} {short_number(points[-1][1])}  steps {points[0][0]:.0f} to {points[-1][0]:.0f}"
        text = Text(f"{'':>8} {title}\n", no_wrap=True, overflow="crop")
        for row in chart(points, width - 1, height - 1, from_zero=name in (STEPS_PER_S, TOKENS_PER_S)):
            text.append(row[:9], STYLES[DIM])
            text.append(row[9:] + "\n", Style(color="cyan"))
        self.update(text, layout=False)


class Phases(Static):
    """Where the time of a rank's steps goes, as a bar; and its memory."""

    def show(self, rank: RankView | None) -> None:
        """Show one rank."""
        if rank is None or rank.step_s is None:
            self.update(Text("phases: no steps so far" if rank is not None else "", STYLES[DIM]), layout=False)
            return
        text = Text(f"rank {rank.rank}: {short_time(rank.step_s)} a step = ", no_wrap=True, overflow="ellipsis")
        text.append(phase_text(rank.phases) + "\n")
        for name, width in phase_widths(rank.phases, max(10, self.size.width - 1)):
            word = f" {name}" if len(name) < width else name[: width - 1] if width > _LEAST_NAMED else name[:1]
            text.append(f"{word:<{width}}"[:width], Style(color="black", bgcolor=_PHASE_COLORS[name]))
        self.update(text, layout=False)
