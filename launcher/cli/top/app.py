"""The screens of `launch top`: the list of jobs, one job, and what is opened from it. Imports textual."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Log, Static

from launcher.base.errors import LauncherError
from launcher.base.units import printable
from launcher.cli.top import frame
from launcher.cli.top.frame import ACTIVE, DIM, Filter, ProgressOfJobs, Words
from launcher.cli.top.widgets import STYLES, Curve, Key, Phases, Rows, styled
from launcher.journal.live import LOSS, STEPS_PER_S, TOKENS_PER_S, JobView, LiveJob, RankView
from launcher.registry.log_reader import LogReader
from launcher.registry.registry import JobEntry, latest

_REFRESH_S, _LIST_REFRESH_S = 1.0, 2.0
_MESSAGE_S = 10.0
_LOG_LINES, _MAX_LOG_LINES = 200, 5000
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
_LIST_KEYS = "enter open · q quit · ? help"
_JOB_KEYS = "enter log · tab pane · / filter · s stacks · p trace · k kill · v verdicts · ?"
_AROUND_ROWS, _TALL_AROUND_ROWS = 13, 25  # lines of the screen that the table leaves to the rest
_FILTER_HINT = "ranks, such as 0-7,12, or a part of a host's name; enter keeps, escape clears"
_HELP = """\
up, down, page up, page down, home, end   move
enter     a job: open it; a host: show or hide its ranks; a rank: its log
tab       between the table and the log below it
escape    back
/         filter: ranks such as 0-7,12, or a part of a host's name
< >       sort by the column before, or after
r         reverse the order
f         fold: one row for each host, or for each rank
l         the log of the rank, on the whole screen
v         verdicts, warnings and events
s         Python stack traces of all ranks; the job continues
p         profile: the next steps as one file for Perfetto; the job continues
k         kill the job; asks first
q         quit

TIME is of one step, OWN is without waiting for other ranks. A row's HEARD is
how long ago the rank's journal had something new. `no step` and `silent` name
ranks that have made no step, or said nothing, for longer than is usual.

goodput   time of the steps that count, of the whole time since the start
"""


@dataclass(frozen=True)
class Actions:
    """What a user can do to jobs. The functions of a job may take a while, and raise LauncherError."""

    jobs: Callable[[], list[JobEntry]]
    kill: Callable[[JobEntry], str]  # returns how that went
    stacks: Callable[[JobEntry], str]  # returns the stack traces of all ranks
    # Records the next steps; returns where the file is. It is given up when its second argument returns true.
    trace: Callable[[JobEntry, Callable[[], bool]], str]


class TopApp(App[None]):
    """`launch top`."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "launch top"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", priority=False),
        Binding("question_mark", "help"),
    ]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012  # textual's
    CSS = """
    Static { text-wrap: nowrap; text-overflow: ellipsis; }
    Rows { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }
    #ranks { height: auto; min-height: 3; }
    #head { height: 2; }
    #trouble { height: auto; max-height: 2; text-wrap: wrap; display: none; }
    #trouble.-some { display: block; }
    .title { height: 1; text-style: bold; }
    #curves { height: 1fr; min-height: 5; }
    Curve { width: 1fr; height: 1fr; }
    Phases { height: 2; }
    Log { height: 1fr; overflow-x: auto; scrollbar-size: 1 1; border-top: solid ansi_blue; }
    Log:focus { border-top: solid ansi_green; background-tint: ansi_default 0%; }
    LogScreen Log { border: none; }
    .-short #log { display: none; }
    .-short.-log #log { display: block; }
    .-short.-log #curves, .-short.-log Phases { display: none; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #filter.-open { display: block; }
    .keys { height: 1; }
    #text { height: 1fr; overflow-x: auto; scrollbar-size: 1 1; }
    #text Static { width: auto; }
    ConfirmScreen { align: center middle; }
    #question { width: 64; height: auto; border: solid ansi_red; padding: 1 2; text-wrap: wrap; }
    """

    def __init__(self, actions: Actions, entry: JobEntry | None = None) -> None:
        """entry: the job that is shown; None: the list of jobs first."""
        super().__init__()
        self.theme = "ansi-dark"  # the terminal's own colours, its background too
        self.actions = actions
        self._entry = entry

    def on_mount(self) -> None:
        """Open the first screen."""
        self.push_screen(ListScreen() if self._entry is None else JobScreen(self._entry))

    def action_help(self) -> None:
        """Show the keys."""
        if not isinstance(self.screen, TextScreen):
            self.push_screen(TextScreen("keys of launch top", _HELP))


def actions_of(screen: Screen[Any]) -> Actions:
    """Return what the user can do."""
    app = screen.app
    assert isinstance(app, TopApp)
    return app.actions


class ListScreen(Screen[None]):
    """The jobs of this machine; those that run come first."""

    def __init__(self) -> None:
        super().__init__()
        self._progress = ProgressOfJobs()
        self._jobs: dict[Key, tuple[JobEntry, str]] = {}
        self._views: dict[str, JobView] = {}
        self._is_looking = False

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield Static(classes="title")
        yield Rows(id="jobs")
        yield Static(styled([Words(_LIST_KEYS, DIM)]), classes="keys")

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one(Rows).focus()
        self.set_interval(_LIST_REFRESH_S, self._look)
        self._look()

    def _look(self) -> None:
        if not self._is_looking and self.is_current:
            self._is_looking = True
            self.run_worker(self._read, thread=True)

    def _read(self) -> None:
        try:
            found = [(entry, entry.state) for entry in actions_of(self).jobs()]
            found.sort(key=lambda item: (item[1] in ACTIVE, item[0].started_s), reverse=True)
            views = self._progress.look([entry for entry, state in reversed(found) if state in ACTIVE])
            self.app.call_from_thread(self._show, found, views)
        finally:
            self._is_looking = False

    def _show(self, found: Sequence[tuple[JobEntry, str]], views: dict[str, JobView]) -> None:
        self._jobs, self._views = {entry.job_id: (entry, state) for entry, state in found}, views
        none = "no job is running, and none has ended in the last week"
        self.query_one(Static).update(frame.list_title(self.size.width) if found else none)
        self.query_one(Rows).show(list(self._jobs), self._row)

    def _row(self, key: Key) -> list[Words]:
        entry, state = self._jobs[key]
        return frame.list_row(entry, state, self._views.get(entry.job_id), self.size.width)

    def on_rows_opened(self, message: Rows.Opened) -> None:
        """Show a job."""
        self.app.push_screen(JobScreen(self._jobs[message.key][0]))


class JobScreen(Screen[None]):
    """One job: what needs a look, its ranks, curves and the log of a rank."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", show=False),
        Binding("tab", "pane", show=False),
        Binding("slash", "filter", show=False),
        Binding("less_than_sign", "sort(-1)", show=False),
        Binding("greater_than_sign", "sort(1)", show=False),
        Binding("r", "reverse", show=False),
        Binding("f", "fold", show=False),
        Binding("l", "log", show=False),
        Binding("v", "verdicts", show=False),
        Binding("s", "stacks", show=False),
        Binding("p", "trace", show=False),
        Binding("k", "kill", show=False),
    ]

    def __init__(self, entry: JobEntry) -> None:
        super().__init__()
        self._entry, self._state = entry, entry.state
        self._live, self._view = LiveJob(Path(entry.run_folder)), JobView()
        self._filter = Filter("")
        self._sort, self._is_reversed = 0, False
        self._open_hosts: set[str] = set()
        self._by_host: dict[str, list[RankView]] = {}  # of the ranks that are chosen, where hosts are folded
        self._shown_trouble = Words("")
        self._message = ("", 0.0)  # and when it goes
        self._is_folded: bool | None = None  # None: as its size says
        self._log: LogTail | None = None
        self._is_looking = False

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield Static(id="head")
        yield Static(id="trouble")
        yield Static(id="title", classes="title")
        yield Rows(id="ranks")
        with Horizontal(id="curves"):
            yield Curve(id="left")
            yield Curve(id="right")
        yield Phases()
        yield Log(id="log", max_lines=_MAX_LOG_LINES)
        yield Input(id="filter", placeholder=_FILTER_HINT, compact=True)
        yield Static(styled([Words(_JOB_KEYS, DIM)]), classes="keys")

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one(Rows).focus()
        self.set_interval(_REFRESH_S, self._look)
        self._look()

    def on_resize(self) -> None:
        """Draw for the new size, once it is known to the parts."""
        self.call_after_refresh(self._draw)

    # ---- reading, on a thread: a shared disk may be slow ----

    def _look(self) -> None:
        if not self._is_looking and self.is_current:
            self._is_looking = True
            wanted = [key for key in self.query_one(Rows).keys_in_sight if isinstance(key, int)]
            self.run_worker(lambda: self._read(wanted, self._rank), thread=True)

    def _read(self, wanted: list[int], rank: int | None) -> None:
        try:
            self._entry = latest(self._entry)
            state = self._entry.state  # asked before reading: what was written until the end is read after it
            view = self._live.look(time.time(), wanted)
            if rank is not None and (self._log is None or self._log.rank != rank):
                self._log = LogTail(self._entry.run_folder, rank)
            text = self._log.read() if self._log is not None else []
            self.app.call_from_thread(self._show, view, state, self._log, text)
        finally:
            self._is_looking = False

    # ---- drawing ----

    def _show(self, view: JobView, state: str, log: LogTail | None, lines: list[str]) -> None:
        self._view, self._state = frame.with_end(view, state), state
        widget = self.query_one("#log", Log)
        if log is not None and widget.border_title != log.title:
            widget.clear()
            widget.border_title = log.title
        if lines:
            widget.write_lines(lines)
        self._draw()

    def _draw(self) -> None:
        view, now_s, width = self._view, time.time(), self.size.width
        head = [
            frame.joined(frame.headline(self._entry, view, self._state, now_s)),
            frame.joined(frame.numbers(view)),
        ]
        self._show_trouble(self._trouble(now_s))
        self.query_one("#head", Static).update(Text("\n").join(map(styled, head)), layout=False)
        columns = frame.columns_for(width, view)
        self._sort = min(self._sort, len(columns) - 1)
        self.query_one("#title", Static).update(
            Text(frame.title_of(columns, self._sort), no_wrap=True, overflow="crop"), layout=False
        )
        rows = self.query_one(Rows)
        around = _TALL_AROUND_ROWS if self.has_class("-tall") else _AROUND_ROWS
        rows.styles.max_height = max(3, self.size.height - around)
        rows.show(self._keys(columns[self._sort]), lambda key: self._row(key, columns, now_s))
        self._draw_rank()
        rate = TOKENS_PER_S if TOKENS_PER_S in view.curves else STEPS_PER_S
        self.query_one("#left", Curve).show(LOSS, view.curves.get(LOSS, []))
        self.query_one("#right", Curve).show(rate, view.curves.get(rate, []))

    def _draw_rank(self) -> None:
        rank = self._rank
        self.query_one(Phases).show(None if rank is None else self._view.ranks.get(rank))

    def _show_trouble(self, words: Words) -> None:
        if words != self._shown_trouble:
            self._shown_trouble = words
            box = self.query_one("#trouble", Static)
            box.set_class(bool(words.text), "-some")
            box.update(Text(words.text, STYLES[words.kind]))

    def _trouble(self, now_s: float) -> Words:
        text, end_s = self._message
        if now_s < end_s:
            return Words(text)
        words = frame.trouble(self._entry, self._view, self._state, now_s)
        text = printable(" ".join(words.text.split()))
        if self._filter.text:
            return Words(f"filter {self._filter.text} (/ changes it) {text}", words.kind or DIM)
        return Words(text, words.kind)

    def _keys(self, column: frame.Column) -> list[Key]:
        """Return the rows: ranks in order; where hosts are folded, hosts, each with its ranks where it is open."""
        view = self._view
        if not view.ranks:
            return list(range(self._entry.num_ranks))
        chosen = [rank for rank in view.ranks.values() if self._filter.has(rank)]
        chosen = frame.sorted_ranks(chosen, column, is_reversed=self._is_reversed)
        if not self._folds:
            return [rank.rank for rank in chosen]
        by_host = self._by_host = dict[str, list[RankView]]()
        for rank in chosen:
            by_host.setdefault(rank.host, []).append(rank)
        names = [name for name, _ in view.hosts] if column.title == "RANK" and not self._is_reversed else list(by_host)
        keys: list[Key] = []
        for name in names:
            if name in by_host:
                keys.append(name)
                keys += [rank.rank for rank in by_host[name]] if name in self._open_hosts else []
        return keys

    @property
    def _folds(self) -> bool:
        return frame.folds(self._view) if self._is_folded is None else self._is_folded

    def _row(self, key: Key, columns: Sequence[frame.Column], now_s: float) -> list[Words]:
        if isinstance(key, int):
            return frame.row_of(self._view.ranks.get(key, RankView(key)), columns, now_s)
        mark, has_ended = "-" if key in self._open_hosts else "+", self._view.ended_at_s is not None
        return frame.host_row(key, self._by_host.get(key, []), now_s, mark, has_ended=has_ended)

    @property
    def _rank(self) -> int | None:
        """The rank of the cursor; of a host its first."""
        key = self.query_one(Rows).key
        if isinstance(key, str):
            return min((rank.rank for rank in self._by_host.get(key, [])), default=None)
        return key

    # ---- keys ----

    def on_rows_moved(self) -> None:
        """Show the phases and the log of another rank."""
        self._draw_rank()
        self._look()

    def on_rows_opened(self, message: Rows.Opened) -> None:
        """Show the ranks of a host, or the log of a rank."""
        if isinstance(message.key, str):
            self._open_hosts ^= {message.key}
            self._draw()
        else:
            self.action_log()

    def action_back(self) -> None:
        """Clear the filter, else go back to the list."""
        if self._filter.text:
            self._set_filter("")
        elif len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    def action_pane(self) -> None:
        """Go to the log, or back to the table."""
        is_log = self.query_one(Rows).has_focus
        self.set_class(is_log, "-log")
        self.query_one("#log" if is_log else "#ranks").focus()
        self.call_after_refresh(self._draw)

    def action_sort(self, count: int) -> None:
        """Sort by another column."""
        self._sort = (self._sort + count) % len(frame.columns_for(self.size.width, self._view))
        self._draw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._is_reversed = not self._is_reversed
        self._draw()

    def action_fold(self) -> None:
        """Show hosts, or ranks."""
        self._is_folded = not self._folds
        self._draw()

    def action_filter(self) -> None:
        """Let the user type a filter."""
        box = self.query_one("#filter", Input)
        box.add_class("-open")
        box.value = self._filter.text
        box.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        if event.input.has_class("-open"):
            self._filter = Filter(event.value)
            self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        self._set_filter(event.value)

    def _set_filter(self, text: str) -> None:
        self._filter = Filter(text)
        self.query_one("#filter", Input).remove_class("-open")
        self.query_one(Rows).focus()
        self._draw()

    def action_log(self) -> None:
        """Show the log on the whole screen."""
        if self._rank is not None:
            self.app.push_screen(LogScreen(self._entry, self._rank))

    def action_verdicts(self) -> None:
        """Show verdicts and events."""
        self.app.push_screen(TextScreen(f"{self._entry.job_id}: verdicts and events", verdict_text(self._view)))

    def action_stacks(self) -> None:
        """Show the stack traces of all ranks."""
        screen = TextScreen(f"{self._entry.job_id}: stack traces", "waiting for the ranks")
        self.app.push_screen(screen)
        self._do(actions_of(self).stacks, screen.change)

    def action_trace(self) -> None:
        """Record the next steps of the ranks as `launch trace` does, and show where the file is."""
        screen = TextScreen(f"{self._entry.job_id}: trace", "the ranks record their next steps; leave to give it up")
        self.app.push_screen(screen)

        def trace(entry: JobEntry) -> str:
            return actions_of(self).trace(entry, lambda: screen.is_left or not self.app.is_running)

        self._do(trace, screen.change)

    def action_kill(self) -> None:
        """Kill the job, once the user has said so."""

        def answered(is_wanted: bool | None) -> None:
            if is_wanted:
                self._say("it is being stopped")
                self._do(actions_of(self).kill, self._say)

        self.app.push_screen(ConfirmScreen(f"Kill {self._entry.job_id} on all its hosts?"), answered)

    def _say(self, text: str) -> None:
        self._message = (text, time.time() + _MESSAGE_S)
        self._draw()

    def _do(self, action: Callable[[JobEntry], str], show: Callable[[str], object]) -> None:
        """Call what may take a while, and show its result or why there is none."""

        def act() -> None:
            try:
                text = action(self._entry)
            except (LauncherError, OSError) as error:  # a disk that is full, a folder of another user
                text = str(error)
            self.app.call_from_thread(show, printable(text))

        self.run_worker(act, thread=True)


def verdict_text(view: JobView) -> str:
    """Return verdicts and events, the newest first."""
    lines = [] if view.verdicts else ["no verdicts so far", ""]
    for verdict in sorted(view.verdicts, key=lambda each: (each.severity != "critical", -each.time_s)):
        lines += [f"{verdict.severity}: {printable(verdict.text)}"]
        lines += [f"  next: {printable(verdict.next)}"] if verdict.next else []
        lines.append("")
    if view.num_lost_records:
        lines += [f"{view.num_lost_records} records of ranks were lost: the journal could not be written quickly", ""]
    for time_s, text in reversed(view.events):
        lines.append(f"{time.strftime('%H:%M:%S', time.localtime(time_s))}  {printable(' '.join(text.split()))}")
    return "\n".join(lines)


class LogTail:
    """The log of one rank, as lines without what moves a cursor."""

    def __init__(self, run_folder: str, rank: int) -> None:
        self.rank = rank
        self.title = f"log of rank {rank}"
        self._reader = LogReader(run_folder, rank, _LOG_LINES)
        self._rest = ""

    def read(self) -> list[str]:
        """Return the lines that are new. A progress bar is its last state."""
        try:
            data = b"".join(piece for _, piece in self._reader.read())
        except OSError:  # the run folder has been removed
            return []
        *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
        return [_plain_line(line) for line in lines]


def _plain_line(line: str) -> str:
    shown = _ESCAPE.sub("", line).rstrip("\r").rpartition("\r")[2]
    return printable(shown.expandtabs(8))


class LogScreen(Screen[None]):
    """The log of a rank, on the whole screen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,l", "app.pop_screen", show=False)]

    def __init__(self, entry: JobEntry, rank: int) -> None:
        super().__init__()
        self._tail = LogTail(entry.run_folder, rank)
        self._heading = f"{entry.job_id}: {self._tail.title}"

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield Static(self._heading, classes="title")
        yield Log(max_lines=_MAX_LOG_LINES)
        yield Static(styled([Words("escape back · end follows · q quit", DIM)]), classes="keys")

    def on_mount(self) -> None:
        """Begin to follow."""
        self.query_one(Log).focus()
        self.set_interval(_REFRESH_S, self._read)
        self._read()

    def _read(self) -> None:
        log = self.query_one(Log)
        if lines := self._tail.read():
            log.write_lines(lines)
        elif not log.line_count:
            log.border_title = "nothing so far"


class TextScreen(Screen[None]):
    """A text that can be scrolled."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", show=False)]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._heading, self._body = title, text
        self.is_left = False

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield Static(self._heading, classes="title")
        with VerticalScroll(id="text"):
            yield Static(Text(self._body), id="body")
        yield Static(styled([Words("arrows, page up, page down · escape back · q quit", DIM)]), classes="keys")

    def on_mount(self) -> None:
        """Let the arrows scroll."""
        self.query_one("#text").focus()

    def on_unmount(self) -> None:
        """Let who works for it know."""
        self.is_left = True

    def change(self, text: str) -> None:
        """Show another text in its place."""
        if self.is_attached:
            self.query_one("#body", Static).update(Text(text))


class ConfirmScreen(ModalScreen[bool]):
    """A question that only y answers with yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", show=False),
        Binding("n,escape,q,enter", "dismiss(False)", show=False),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        text = Text.assemble((self._question, STYLES["title"]), "\n\ny: yes    n, escape: no")
        yield Static(text, id="question")
