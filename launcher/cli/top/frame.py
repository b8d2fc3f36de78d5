"""What `launch top` and `launch ps` show of a job: words, rows, curves. Plain text: a frame needs no textual."""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.units import counted, format_bytes, format_count, printable
from launcher.cluster.nodeset import fold
from launcher.job.events import signal_name
from launcher.journal.live import JobView, LiveJob, Points, RankView, shown_phase
from launcher.journal.records import PHASES
from launcher.registry.registry import JobEntry

OK, WARNING, BAD, DIM, PLAIN = "ok", "warning", "bad", "dim", ""
ACTIVE = ("running", "elsewhere")  # states of the registry
PROGRESS_TITLE = "STEP · LOSS · RATE"
_BARS = " ▁▂▃▄▅▆▇█"
_MAX_LISTED = 200  # running jobs whose progress a list shows
_LIST_S = 1.0  # what reading it may take
_UNFOLDED_RANKS = 64
_WIDE = 110  # columns of a terminal
_LEAST_WIDTH = 80  # of the table of ranks, with the scroll bar
_SHORT_MIB = re.compile(r"\.\d (?=[MGT]iB)")


@dataclass(frozen=True)
class Words:
    """A piece of text, and what it means."""

    text: str
    kind: str = PLAIN


@dataclass(frozen=True)
class Column:
    """A column of the table of ranks."""

    title: str
    width: int  # with the space before it
    cell: Callable[[RankView, float], Words]
    order: Callable[[RankView], Any]  # of the ranks, where None comes last
    is_left: bool = False


# ---- ranks ----


def rank_state(rank: RankView, now_s: float, *, has_ended: bool = False) -> Words:
    """Say what a rank does, or how it ended."""
    if rank.status is not None:
        text = signal_name(rank.status) or f"exit {rank.status}"
        return Words("ended", DIM) if rank.status == 0 else Words(text, BAD)
    if rank.is_lost:
        return Words("host lost", BAD)
    if has_ended:
        return Words("gone", DIM)
    if not rank.has_started:
        return Words("not started", WARNING)
    silence_s = rank.silence_s(now_s)
    if silence_s is not None:
        hears = rank.heard_at_s is not None and now_s - rank.heard_at_s < silence_s / 2
        return Words(f"{'no step' if hears else 'silent'} {short_time(silence_s)}", WARNING)
    return Words(printable(shown_phase(rank, now_s)), OK)


def columns_for(width: int, view: JobView) -> list[Column]:
    """Return the columns that fit."""
    has_ended = view.ended_at_s is not None
    rate = "TOK/S" if view.tokens_per_s else "STEPS/S"

    def rate_of(rank: RankView) -> float | None:
        return rank.tokens_per_s if view.tokens_per_s else rank.steps_per_s

    def state(rank: RankView, now_s: float) -> Words:
        return rank_state(rank, now_s, has_ended=has_ended)

    more = [
        Column("HEARD", 7, _heard, lambda r: r.heard_at_s),
        Column("PEAK", 9, lambda r, _: _plain(r.peak_bytes, _short_bytes), lambda r: r.peak_bytes),
        Column("PID", 9, lambda r, _: _plain(r.pid, str), lambda r: r.pid),
    ]
    left = width - _LEAST_WIDTH
    shown = []
    for column in more:
        if left >= column.width:
            shown.append(column)
            left -= column.width
    host_width = 11 + min(13, max(0, left // 2))
    state_width = 16 + min(10, max(0, left - (host_width - 11)))
    return [
        Column("RANK", 6, lambda r, _: Words(str(r.rank)), lambda r: r.rank),
        Column("HOST", host_width, lambda r, _: Words(printable(r.host)), lambda r: r.host, True),
        Column("STATE", state_width, state, lambda r: rank_state(r, time.time()).text, True),
        Column("STEP", 8, lambda r, _: _plain(r.step, str), lambda r: r.step),
        Column("LOSS", 8, lambda r, _: _plain(r.loss, _loss), lambda r: r.loss),
        Column(rate, 8, lambda r, _: _plain(rate_of(r), _rate), rate_of),
        Column("TIME", 7, lambda r, _: _plain(r.step_s, short_time), lambda r: r.step_s),
        Column("OWN", 7, lambda r, _: _own(r, view), lambda r: r.own_s),
        Column("MEMORY", 8, lambda r, _: _plain(r.memory_bytes, _short_bytes), lambda r: r.memory_bytes),
        *shown,
    ]


def title_of(columns: Sequence[Column], sorted_by: int | None = None) -> str:
    """Return the line above the table. sorted_by: the column with a mark."""
    titles = [column.title for column in columns]
    if sorted_by is not None:
        titles[sorted_by] += "*"
    return "".join(_cell(title, column) for title, column in zip(titles, columns, strict=True))


def row_of(rank: RankView, columns: Sequence[Column], now_s: float) -> list[Words]:
    """Return the row of a rank: a piece of fixed width for each column."""
    cells = [column.cell(rank, now_s) for column in columns]
    return [Words(_cell(cell.text, column), cell.kind) for cell, column in zip(cells, columns, strict=True)]


def host_row(name: str, ranks: Sequence[RankView], now_s: float, mark: str, *, has_ended: bool = False) -> list[Words]:
    """Return the row of a host: how many of its ranks do what, and how far the slowest is."""
    states: Counter[Words] = Counter(rank_state(rank, now_s, has_ended=has_ended) for rank in ranks)
    steps = [rank.step for rank in ranks if rank.step is not None]
    words = [Words(f"{mark} {printable(name)}"), Words(f"  {counted(len(ranks), 'rank')}", DIM)]
    for words_of, number in sorted(states.items(), key=lambda item: item[0].kind == OK):
        words += [Words("  "), Words(f"{number} {words_of.text}", words_of.kind)]
    return [*words, Words(f"  step {min(steps)}" if steps else "", DIM)]


def sorted_ranks(ranks: Iterable[RankView], column: Column, *, is_reversed: bool) -> list[RankView]:
    """Return ranks in the order of a column; those without a value come last."""
    known = [rank for rank in ranks if column.order(rank) is not None]
    unknown = [rank for rank in ranks if column.order(rank) is None]
    return sorted(known, key=column.order, reverse=is_reversed) + unknown


def folds(view: JobView) -> bool:
    """Whether a host is one row at first."""
    return len(view.hosts) > 1 and len(view.ranks) > _UNFOLDED_RANKS


class Filter:
    """Chooses ranks: by numbers, such as `3` or `0-7,12`, or by a part of their host's name."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        self._ranges: list[tuple[int, int]] = []
        self._names: list[str] = []
        for word in filter(None, re.split(r"[\s,]+", self.text)):
            match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word)
            if match:
                self._ranges.append((int(match[1]), int(match[2] or match[1])))
            else:
                self._names.append(word.lower())

    def has(self, rank: RankView) -> bool:
        """Whether a rank is chosen; without any word all are."""
        if not self.text:
            return True
        in_range = any(first <= rank.rank <= last for first, last in self._ranges)
        return in_range or any(name in rank.host.lower() for name in self._names)


# ---- the job ----


def with_end(view: JobView, state: str) -> JobView:
    """Return a job whose launcher has gone without a word as one that has ended when its ranks were last heard."""
    if state != "lost" or view.ended_at_s is not None:
        return view
    heard = [rank.heard_at_s for rank in view.ranks.values() if rank.heard_at_s is not None]
    return dataclasses.replace(view, ended_at_s=max(heard, default=view.started_at_s))


def job_state(entry: JobEntry | None, view: JobView, state: str) -> Words:
    """Say whether a job runs. state: what the registry says; "" where it does not know the job."""
    if state in ("", "ended"):
        code = entry.exit_code if entry is not None and entry.ended_s is not None else view.exit_code
        if state == "" and view.ended_at_s is None:
            return Words("not known here", DIM)
        return Words("ended", OK) if code == 0 else Words(f"exit {code}", BAD)
    if state == "lost":
        return Words("launcher gone", BAD)
    if view.stopping and view.ended_at_s is None:
        return Words("stopping", WARNING)
    if view.ended_at_s is not None:
        return Words("between starts", WARNING)
    where = f"on {entry.machine}" if entry is not None and state == "elsewhere" else "running"
    return Words(where, OK)


def headline(entry: JobEntry | None, view: JobView, state: str, now_s: float) -> list[Words]:
    """Return the job's name, state, size and time."""
    names = [name for name, _ in view.hosts] or list(entry.hosts if entry else ())
    num_ranks = view.world_size or (entry.num_ranks if entry else 0)
    start_s = (entry.started_s if entry else None) or view.started_at_s
    end_s = (entry.ended_s if entry else None) or (now_s if state in ACTIVE else view.ended_at_s)
    words = [Words(view.job_id or (entry.job_id if entry else ""), "title"), job_state(entry, view, state)]
    hosts = fold(names) if len(names) <= 2 else counted(len(names), "host")
    words.append(Words(f"{printable(hosts)} × {counted(num_ranks // max(1, len(names)) or num_ranks, 'rank')}"))
    if start_s and end_s:
        words.append(Words(clock(max(0.0, end_s - start_s))))
    if view.restart:
        words.append(Words(f"restart {view.restart}", WARNING))
    return words


def numbers(view: JobView) -> list[Words]:
    """Return how far the job is, and how quick."""
    texts = []
    if view.step is not None:
        texts.append(f"step {view.step}" + (f" of {view.total_steps}" if _is_ahead(view) else ""))
    if view.loss is not None:
        texts.append(f"loss {_loss(view.loss)}")
    rates = _rates(view)
    texts += rates[:1]
    if view.left_s:
        texts.append(f"{clock(view.left_s)} left")
    if view.goodput is not None:
        texts.append(f"goodput {view.goodput:.0%}")
    texts += rates[1:]
    return [Words(text) for text in texts]


def trouble(entry: JobEntry | None, view: JobView, state: str, now_s: float) -> Words:
    """Return what most needs a look, in one line; empty text where nothing does."""
    if not view.has_journal:
        return Words("no journal: it ran with --no-journal, or with an older launch; its logs are here", WARNING)
    if view.ended_at_s is not None and view.exit_code:
        return Words(f"✗ {view.reason or f'exit code {view.exit_code}'}", BAD)
    if view.stopping and view.ended_at_s is None:
        return Words(f"! {view.stopping}", WARNING)
    if view.verdicts:
        worst = max(view.verdicts, key=lambda verdict: (verdict.severity == "critical", verdict.time_s))
        more = f" (v: {len(view.verdicts)} verdicts)" if len(view.verdicts) > 1 else ""
        return Words(f"! {worst.text}{more}", BAD if worst.severity == "critical" else WARNING)
    silent = view.silent(now_s) if state in ACTIVE else []
    if silent:
        first, others = silent[0], len(silent) - 1
        more = f", and {counted(others, 'other rank')}" if others else ""
        word = rank_state(first, now_s).text
        return Words(f"! rank {first.rank} ({first.host}): {word}{more}", WARNING)
    if view.slowest is not None and view.ended_at_s is None:
        slow = view.slowest
        host = view.ranks[slow.rank].host
        own = f"{short_time(slow.own_s)} a step of its own, the others {short_time(slow.median_s)}"
        return Words(f"! rank {slow.rank} ({host}) is the slowest: {own}", WARNING)
    return Words("")


def joined(words: Iterable[Words]) -> list[Words]:
    """Return pieces with dots between them."""
    shown: list[Words] = []
    for piece in words:
        shown += [Words(" · ", DIM), piece] if shown else [piece]
    return shown


def progress_text(view: JobView) -> str:
    """Return step, loss and rate in a few words, for a list of jobs."""
    if view.step is None:
        return ""
    step = f"{view.step}/{view.total_steps}" if _is_ahead(view) else str(view.step)
    loss = [_loss(view.loss)] if view.loss is not None else []
    return " · ".join([step, *loss, *_rates(view)[:1]])


def progress_json(view: JobView | None) -> dict[str, Any] | None:
    """Return the same for programs; None without a journal."""
    if view is None or not view.has_journal:
        return None
    names = ("step", "total_steps", "loss", "steps_per_s", "tokens_per_s", "restart")
    return {name: _jsonable(getattr(view, name)) for name in names} | {"num_verdicts": len(view.verdicts)}


class ProgressOfJobs:
    """Step, loss and rate of the jobs that run: little is read of each, and of very many jobs some have none."""

    def __init__(self) -> None:
        self._live: dict[str, LiveJob] = {}

    def look(self, entries: Sequence[JobEntry]) -> dict[str, JobView]:
        """Return the jobs that run, by id. The newest are read first, for about a second at most."""
        end_s, views = time.monotonic() + _LIST_S, dict[str, JobView]()
        for entry in list(reversed(entries))[:_MAX_LISTED]:
            if time.monotonic() > end_s:
                break
            live = self._live.get(entry.job_id)
            if live is None:
                live = self._live[entry.job_id] = LiveJob(Path(entry.run_folder), is_brief=True)
            views[entry.job_id] = live.look(time.time())
        self._live = {job_id: live for job_id, live in self._live.items() if job_id in views}
        return views


def list_title(width: int) -> str:
    """Return the line above the list of jobs."""
    hosts = f"{'HOSTS':<21}" if width >= _WIDE else ""
    return f"{'JOB':<20} {'STATE':<13} {'TIME':>7}  RANKS  {hosts}{PROGRESS_TITLE}"


def list_row(entry: JobEntry, state: str, view: JobView | None, width: int) -> list[Words]:
    """Return the row of a job in the list of jobs."""
    word = job_state(entry, view or JobView(), state)
    end_s = entry.ended_s or (time.time() if state in ACTIVE else None)
    lasted = short_time(max(0.0, end_s - entry.started_s)) if end_s else ""
    progress = progress_text(view) if view is not None else ""
    command = shlex.join((os.path.basename(entry.command[0]), *entry.command[1:])) if entry.command else ""
    hosts = [Words(f" {printable(fold(entry.hosts))[:20]:<20}")] if width >= _WIDE else []
    return [
        Words(f"{_cut(entry.job_id, 20):<20} "),
        Words(f"{_cut(word.text, 13):<13} ", word.kind),
        Words(f"{lasted:>7}  {entry.num_ranks:>5} "),
        *hosts,
        Words(f" {progress or printable(command)}", PLAIN if progress else DIM),
    ]


# ---- curves and bars ----


def chart(points: Points, width: int, height: int, *, from_zero: bool = False) -> list[str]:
    """Return a curve as rows of bars, with largest and smallest value beside it. from_zero: bars begin there."""
    if not points or width < 16 or height < 1:
        return [""] * height
    values = _columns_of(points, width - 9)
    low, high = 0.0 if from_zero else min(values), max(values)
    extent = (high - low) or 1.0
    num_levels = 8 * height - 1
    levels = [1 + round((value - low) / extent * num_levels) if high > low else 4 * height for value in values]
    rows = []
    for row in range(height - 1, -1, -1):
        label = short_number(high) if row == height - 1 else short_number(low) if row == 0 else ""
        bars = "".join(_BARS[min(8, max(0, level - 8 * row))] for level in levels)
        rows.append(f"{label:>8} {bars}")
    return rows


def _columns_of(points: Points, width: int) -> list[float]:
    """Return a value for each column: the mean of the points there, else the last one before."""
    first, last = points[0][0], points[-1][0]
    steps = [step for step, _ in points]
    columns: list[float] = []
    for column in range(width):
        start = bisect.bisect_left(steps, first + (last - first) * column / width)
        end = bisect.bisect_left(steps, first + (last - first) * (column + 1) / width)
        end = len(points) if column == width - 1 else end
        inside = [value for _, value in points[start:end]]
        columns.append(sum(inside) / len(inside) if inside else columns[-1] if columns else points[0][1])
    return columns


def phase_widths(phases: dict[str, float], width: int) -> list[tuple[str, int]]:
    """Return the phases of a step, in order, with the columns of each in a bar of `width`; short ones have none."""
    total = sum(phases.values())
    if total <= 0:
        return []
    found, so_far, drawn = [], 0.0, 0
    for name in PHASES:
        so_far += phases.get(name, 0.0)
        end = round(width * so_far / total)
        found += [(name, end - drawn)] if end > drawn else []
        drawn = end
    return found


def phase_text(phases: dict[str, float]) -> str:
    """Return the phases that take at least 1 %, with their share, the longest first."""
    total = sum(phases.values()) or 1.0
    shares = sorted(((time_s / total, name) for name, time_s in phases.items()), reverse=True)
    return " · ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.01)


# ---- the whole as text ----


def plain_frame(entry: JobEntry | None, view: JobView, state: str, *, width: int, max_ranks: int) -> list[str]:
    """Return what the screen shows as lines of text."""
    now_s = time.time()
    lines = [_text(joined(headline(entry, view, state, now_s)))]
    if view.step is not None:
        lines.append(_text(joined(numbers(view))))
    line = trouble(entry, view, state, now_s).text
    lines += [printable(" ".join(line.split()))] if line else []
    if view.ranks:
        columns = columns_for(width, view)
        lines += ["", title_of(columns)]
        ranks = list(view.ranks.values())
        lines += [_text(row_of(rank, columns, now_s)).rstrip() for rank in ranks[:max_ranks]]
        lines += [f"… {len(ranks) - max_ranks} more ranks"] if len(ranks) > max_ranks else []
        first = next((rank for rank in ranks if rank.phases), None)
        if first is not None and first.step_s:
            lines += ["", f"a step of rank {first.rank}, {short_time(first.step_s)}: {phase_text(first.phases)}"]
    for verdict in view.verdicts:
        lines.append(f"{verdict.severity}: {printable(verdict.text)}")
        lines += [f"  → {printable(verdict.next)}"] if verdict.next else []
    return lines


def as_json(entry: JobEntry | None, view: JobView, state: str) -> dict[str, Any]:
    """Return the same for programs."""
    now_s = time.time()
    facts = dataclasses.asdict(view)
    facts["ranks"] = [
        dataclasses.asdict(rank) | {"own_s": rank.own_s, "state": rank_state(rank, now_s).text}
        for rank in view.ranks.values()
    ]
    found: dict[str, Any] = _jsonable(facts)
    return {"entry": dataclasses.asdict(entry) if entry is not None else None, "state": state, **found}


def clock(seconds: float) -> str:
    """Return `0:01:23`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def short_time(seconds: float) -> str:
    """Return `31 ms`, `1.26 s`, `95 s`, `12 min` or `3.2 h`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.00995 else f"{seconds * 1e3:.1f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def short_number(value: float) -> str:
    """Return a number of a curve in at most eight characters."""
    return format_count(value) if abs(value) >= 1e4 else f"{value:.4g}"


def _is_ahead(view: JobView) -> bool:
    """Whether the last step is known: a script may train for longer than its schedule says."""
    return view.total_steps is not None and (view.step or 0) <= view.total_steps


def _rates(view: JobView) -> list[str]:
    texts = [f"{format_count(view.tokens_per_s)} tok/s"] if view.tokens_per_s else []
    if view.steps_per_s:
        is_quick = view.steps_per_s >= 1
        texts.append(f"{view.steps_per_s:.3g} steps/s" if is_quick else f"{1 / view.steps_per_s:.3g} s/step")
    return texts


def _cell(text: str, column: Column) -> str:
    room = column.width - 1
    text = _cut(text, room)
    return f" {text:<{room}}" if column.is_left else f" {text:>{room}}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _own(rank: RankView, view: JobView) -> Words:
    is_slow = view.slowest is not None and view.slowest.rank == rank.rank
    return Words("" if rank.own_s is None else short_time(rank.own_s), WARNING if is_slow else PLAIN)


def _heard(rank: RankView, now_s: float) -> Words:
    return Words("" if rank.heard_at_s is None else f"{max(0.0, now_s - rank.heard_at_s):.0f} s", DIM)


def _plain(value: float | None, text: Callable[[Any], str]) -> Words:
    return Words("" if value is None else text(value))


def _loss(value: float) -> str:
    return f"{value:.4g}"


def _rate(value: float) -> str:
    return format_count(value) if value >= 1e3 else f"{value:.3g}"


def _short_bytes(value: float) -> str:
    text = format_bytes(value)
    return text if len(text) <= 7 else _SHORT_MIB.sub(" ", text)


def _text(words: Iterable[Words]) -> str:
    return "".join(piece.text for piece in words)


def _jsonable(value: Any) -> Any:
    """Return plain data in which numbers that JSON has not are text."""
    if isinstance(value, dict):
        return {str(name): _jsonable(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
