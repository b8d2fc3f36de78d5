"""The charts of the page, as data of plotly.js. Colours are names of the page's own variables, see `page.css`.

No plotly is imported: a chart is plain data, and the page has the library. Texts are escaped here: plotly.js reads some
HTML in them.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.base.secrets import mask_text
from launcher.base.units import counted, format_bytes, printable
from launcher.cli.views.facts import Run
from launcher.journal.curves import (
    Curve,
    logged,
    over_steps,
    over_time,
    phases_over_steps,
    rate_over_time,
    waiting,
)
from launcher.journal.history import History
from launcher.journal.read import Record
from launcher.journal.records import PHASES
from launcher.journal.summary import rate_column
from launcher.journal.trace_merge import newest_trace, read_steps

NUM_COLORS = 6  # of jobs, in page.css
_MAX_LOGGED = 24  # charts of a script's values
_MAX_UNITS = 40
_MAX_EVENTS = 400  # of one kind, in the timeline
_MAX_SPANS = 4000  # of a trace
_MAX_TEXT_CHARS = 160
_MAX_TICK_CHARS = 24
_DIGITS = 6


@dataclass
class Chart:
    """What plotly.js draws, below a title."""

    key: str  # unique on the page
    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    height: int = 280

    def as_data(self) -> dict[str, Any]:
        """Return what the page's script needs, numbers with a few digits."""
        return {"key": self.key, "traces": _short(self.traces), "layout": _short(self.layout)}


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_short(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def shown(text: object) -> str:
    """Return a foreign text for plotly.js: short, without secrets, and with no HTML in it."""
    plain = printable(mask_text(str(text)))
    return html.escape(plain if len(plain) <= _MAX_TEXT_CHARS else plain[:_MAX_TEXT_CHARS] + "…", quote=False)


def _tick(text: str) -> str:
    """Return a label of an axis: the end of a long one, which tells modules and hosts apart."""
    return shown(text if len(text) <= _MAX_TICK_CHARS else "…" + text[-_MAX_TICK_CHARS:])


def color_of(place: int) -> str:
    """Return the colour of a job."""
    return f"var(--run-{place % NUM_COLORS})"


# ---- curves of all jobs over each other ----


def curve_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return loss, norm, learning rate, rate and memory, those of which there is something."""
    charts = [_over_steps(runs, *each) for each in _STEP_CURVES]
    charts += [_rate(runs), _memory(runs)]
    return [chart for chart in charts if chart.traces]


_STEP_CURVES = (  # column, title
    ("loss", "Loss"),
    ("norm", "Norm of the gradients"),
    ("lr", "Learning rate"),
)


def _over_steps(runs: Sequence[Run], column: str, title: str) -> Chart:
    traces: list[dict[str, Any]] = []
    has_redone = False
    for place, run in enumerate(runs):
        curve, redone = over_steps(run.history, column)
        style = _Style(color_of(place), _width(place, len(runs)), has_range=column == "loss" and len(runs) == 1)
        traces += _line(curve, run.name, style)
        if redone:
            has_redone = True
            traces.append(_dotted(redone))
    note = (
        ""
        if column != "loss"
        else "Mean over ranks; the band is their range."
        if len(runs) == 1
        else "Mean over ranks."
    )
    layout = _axes("step", has_legend=len(runs) > 1)
    layout["yaxis"] |= {"tickformat": "~g"} if column == "loss" else {"tickformat": "~g", "rangemode": "tozero"}
    return Chart(
        column, title, traces, layout, note + (" Dotted: steps that a restart did again." if has_redone else "")
    )


def _dotted(curve: Curve) -> dict[str, Any]:
    line = {"color": "var(--muted)", "width": 1.5, "dash": "dot"}
    mode = "lines" if len(curve.xs) > 1 else "markers"
    return {"x": curve.xs, "y": curve.means, "name": "done again", "mode": mode, "line": line, "showlegend": False}


@dataclass(frozen=True)
class _Style:
    color: str
    width: float = 2.0
    has_range: bool = False  # a band from the least to the most


def _width(place: int, num_runs: int) -> float:
    """Return the width of a job's lines: those below are wider, so that equal curves do not hide each other."""
    return min(6.0, 2.0 + 2.0 * (num_runs - 1 - place))


def _line(curve: Curve, name: str, style: _Style) -> list[dict[str, Any]]:
    """Return the traces of a curve."""
    if not curve:
        return []
    color, line = style.color, {"color": style.color, "width": style.width}
    mode = "lines" if len(curve.xs) > 1 else "markers"
    main: dict[str, Any] = {"x": curve.xs, "y": curve.means, "name": shown(name), "mode": mode, "line": line}
    main["marker"] = {"color": color, "size": 7}
    if not style.has_range or curve.lows == curve.highs:
        return [main]
    edge = {"mode": "lines", "line": {"width": 0, "color": color}, "hoverinfo": "skip", "showlegend": False}
    low = {"x": curve.xs, "y": curve.lows, **edge}
    high = {"x": curve.xs, "y": curve.highs, **edge, "fill": "tonexty", "fillcolor": f"{color[:-1]}-band)"}
    return [low, high, main]


def _axes(x_title: str, y_title: str = "", *, has_legend: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x_title}, "rangemode": "tozero" if "since" in x_title else "normal"},
        "yaxis": {"title": {"text": y_title}},
        "showlegend": has_legend,
        **more,
    }


def time_unit(duration_s: float) -> tuple[str, float]:
    """Return the unit that a time axis of this length has, and its seconds."""
    return ("s", 1.0) if duration_s < 300 else ("min", 60.0) if duration_s < 4 * 3600 else ("h", 3600.0)


def _longest_s(runs: Sequence[Run]) -> float:
    return max((run.summary.duration_s or 0.0 for run in runs), default=0.0)


def _in_unit(curve: Curve, unit_s: float) -> Curve:
    return Curve([x / unit_s for x in curve.xs], curve.means, curve.lows, curve.highs)


def _rate(runs: Sequence[Run]) -> Chart:
    unit, unit_s = time_unit(_longest_s(runs))
    columns = {rate_column(run.history) for run in runs if run.summary.rate is not None}
    title = f"Rate, {columns.pop()[1]}" if len(columns) == 1 else "Rate, each in its own unit"
    traces = []
    for place, run in enumerate(runs):
        curve = _in_unit(rate_over_time(run.history), unit_s)
        traces += _line(curve, run.name, _Style(color_of(place), _width(place, len(runs)))) if curve else []
    layout = _axes(f"{unit} since the job began", has_legend=len(runs) > 1)
    layout["yaxis"]["rangemode"] = "tozero"
    return Chart("rate", title, traces, layout, "All ranks together. Zero: no step was done.")


def _memory(runs: Sequence[Run]) -> Chart:
    unit, unit_s = time_unit(_longest_s(runs))
    traces: list[dict[str, Any]] = []
    for place, run in enumerate(runs):
        curve = _in_unit(over_time(run.history, "memory_bytes"), unit_s)
        gib = Curve(curve.xs, *([value / 2**30 for value in ys] for ys in (curve.means, curve.lows, curve.highs)))
        traces += _line(gib, run.name, _Style(color_of(place), _width(place, len(runs)), has_range=len(runs) == 1))
    note = "Of each rank, in use at the end of a step: mean and range over ranks."
    layout = _axes(f"{unit} since the job began", "GiB", has_legend=len(runs) > 1)
    layout["yaxis"]["rangemode"] = "tozero"
    return Chart("memory", "Memory", traces, layout, note)


def logged_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart of each number that scripts logged."""
    found: dict[str, list[tuple[int, str, Curve]]] = {}
    for place, run in enumerate(runs):
        for name, (axis, curve) in logged(run.history).items():
            found.setdefault(name, []).append((place, axis, curve))
    charts = []
    for number, (name, curves) in enumerate(list(found.items())[:_MAX_LOGGED]):
        axis = "step" if all(axis == "step" for _, axis, _ in curves) else "s since the job began"
        traces: list[dict[str, Any]] = []
        for place, _, curve in curves:
            style = _Style(color_of(place), _width(place, len(runs)), has_range=len(runs) == 1)
            traces += _line(curve, runs[place].name, style)
        charts.append(Chart(f"logged-{number}", name, traces, _axes(axis, has_legend=len(curves) > 1), height=220))
    return charts


# ---- one job ----


def phase_color(name: str) -> str:
    """Return the colour of a phase."""
    return f"var(--phase-{name})" if name in PHASES else "var(--phase-outside)"


def phases_chart(run: Run, prefix: str) -> Chart | None:
    """Return where the time of steps went, over the steps; None without steps."""
    steps, width, phases = phases_over_steps(run.history)
    if not phases:
        return None
    unit, factor = ("ms", 1e3) if max(map(sum, zip(*phases.values(), strict=True))) < 1 else ("s", 1.0)
    traces = [
        {
            "type": "bar",
            "x": steps,
            "y": [time_s * factor for time_s in times],
            "width": width,
            "name": name,
            "marker": {"color": phase_color(name), "line": {"width": 0}},
            "hovertemplate": f"%{{y:.3g}} {unit}",
        }
        for name, times in phases.items()
    ]
    layout = _axes("step", f"{unit} a step", has_legend=True, barmode="stack", bargap=0, hovermode="x unified")
    return Chart(f"{prefix}phases", "Time of a step by phase", traces, layout, "Means over ranks.", 320)


def waiting_chart(run: Run, prefix: str) -> Chart | None:
    """Return the map of which rank waited when; None where that was not measured, and of one rank."""
    found = waiting(run.history)
    if found is None or not any(share for row in found.shares for share in row):
        return None
    hosts: dict[int, str | None] = {}
    for start in run.history.starts:
        hosts |= {rank: start.host_of(rank) for rank in start.ranks}
    several_hosts = len(set(hosts.values())) > 1
    labels = []
    for first, last in found.ranks:
        host = f"{hosts.get(first)} · " if several_hosts and hosts.get(first) else ""
        labels.append(_tick(f"{host}{first}" if first == last else f"{first}-{last}"))
    shares = [[None if share is None else share * 100 for share in row] for row in found.shares]
    most = max((share for row in shares for share in row if share is not None), default=0.0)
    trace = {
        "type": "heatmap",
        "x": found.steps,
        "y": labels,
        "z": shares,
        "zmin": 0,
        "zmax": max(20.0, most),
        "colorscale": [[0, "var(--heat-0)"], [0.5, "var(--heat-1)"], [1, "var(--heat-2)"]],
        "colorbar": {"title": {"text": "%"}, "thickness": 10, "outlinewidth": 0},
        "hovertemplate": "step %{x:.0f}, rank %{y}: %{z:.1f} % waiting<extra></extra>",
        "hoverongaps": False,
    }
    layout = _axes("step", "rank", yaxis={"type": "category", "autorange": "reversed", "title": {"text": "rank"}})
    note = (
        "Share of a step that a rank waits in collectives. The rank that waits least is the one that others wait for."
    )
    return Chart(
        f"{prefix}waiting", "Waiting for other ranks", [trace], layout, note, min(640, max(200, 160 + 12 * len(labels)))
    )


def units_chart(run: Run, prefix: str) -> Chart | None:
    """Return the bytes of each unit of the model; None where the engine has not said."""
    units = units_of(run.history.engine)
    if not units:
        return None
    largest = sorted(units, key=lambda unit: -unit[1])[:_MAX_UNITS]
    kept = [unit for unit in units if unit in largest][:_MAX_UNITS]
    places = list(range(len(kept)))
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [num_bytes / 2**20 for _, num_bytes in kept],
        "y": places,
        "text": [format_bytes(num_bytes) for _, num_bytes in kept],
        "customdata": [shown(label) for label, _ in kept],
        "textposition": "auto",
        "marker": {"color": "var(--run-0)"},
        "hovertemplate": "%{customdata}: %{text}<extra></extra>",
    }
    ticks = {"tickvals": places, "ticktext": [_tick(label) for label, _ in kept]}
    layout = _axes("MiB", bargap=0.25, hovermode="closest", yaxis={"autorange": "reversed", **ticks})
    note = "" if len(units) == len(kept) else f"The largest {len(kept)} of {len(units)}."
    return Chart(f"{prefix}units", "Bytes of the model by unit", [trace], layout, note, 110 + 20 * len(kept))


def units_of(engine: Record) -> list[tuple[str, float]]:
    """Return label and bytes of each unit in an `engine` record."""
    units = engine.get("units")
    named = [unit for unit in units if isinstance(unit, list) and len(unit) == 3] if isinstance(units, list) else []
    return [(str(label), float(num_bytes)) for label, _, num_bytes in named if isinstance(num_bytes, int | float)]


def collectives_chart(run: Run, prefix: str) -> Chart | None:
    """Return the phases and collectives of the steps that `launch trace` has recorded last; None without a trace.

    Raises: OSError, ValueError for a file that cannot be read.
    """
    path = newest_trace(run.folder)
    if path is None:
        return None
    traced = read_steps(path)
    spans = sorted(traced.spans, key=lambda span: (not span.is_phase, -span.duration_s))
    kept, left_out = spans[:_MAX_SPANS], spans[_MAX_SPANS:]
    if not traced.steps or not kept:
        return None
    unit, factor = ("ms", 1e3) if max(end for _, end in traced.steps.values()) < 10 else ("s", 1.0)
    ranks = sorted({span.rank for span in kept})
    kinds = list(dict.fromkeys((span.is_phase, span.kind) for span in kept))
    kinds.sort(key=lambda kind: (not kind[0], PHASES.index(kind[1]) if kind[1] in PHASES else 0, kind[1]))
    traces: list[dict[str, Any]] = []
    for number, (is_phase, kind) in enumerate(kinds):
        own = [span for span in kept if (span.is_phase, span.kind) == (is_phase, kind)]
        color = phase_color(kind) if is_phase else color_of(number)
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "base": [span.begin_s * factor for span in own],
                "x": [span.duration_s * factor for span in own],
                "y": [f"rank {span.rank} · {'phases' if is_phase else 'collectives'}" for span in own],
                "text": [shown(span.name) for span in own],
                "textposition": "none",
                "name": shown(kind),
                "showlegend": not is_phase,  # their colours are those of the chart of phases
                "marker": {"color": color, "opacity": 1.0 if is_phase else 0.75, "line": {"width": 0}},
                "hovertemplate": f"%{{text}}: %{{x:.3g}} {unit}, from %{{base:.4g}}<extra></extra>",
            }
        )
    first, last = min(traced.steps), max(traced.steps)
    layout = _axes(f"{unit} since step {first} began", has_legend=True, barmode="overlay", hovermode="closest")
    rows = [f"rank {rank} · {what}" for rank in ranks for what in ("phases", "collectives")]
    layout["yaxis"] = {"type": "category", "categoryarray": rows, "autorange": "reversed", "automargin": True}
    layout["shapes"] = [_step_end(end * factor) for _, end in traced.steps.values()]
    note = f"From {path.name}, which launch trace has recorded, on one clock; a line is the end of a step of rank"
    note += f" {ranks[0]}."
    counts = Counter("phase" if span.is_phase else "collective" for span in left_out)
    shortest = " and ".join(counted(count, what) for what, count in counts.items())
    note += f" The shortest are left out: {shortest}." if shortest else ""
    note += "" if traced.is_whole else " The file is too large to be read to its end."
    title = f"Collectives of step {first}" + (f" to {last}" if last > first else "")
    return Chart(f"{prefix}collectives", title, traces, layout, note, 200 + 64 * len(ranks))


def _step_end(at: float) -> dict[str, Any]:
    line = {"color": "var(--muted)", "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line}


# ---- what happened when ----

_EVENTS = {  # kind -> how it is called, its mark, its colour
    "start": ("rank started", "circle", "var(--good)"),
    "exit": ("rank ended", "square", "var(--muted)"),
    "failed": ("rank failed", "x", "var(--bad)"),
    "raised": ("exception", "x-thin-open", "var(--bad)"),
    "save": ("save", "diamond", "var(--run-3)"),
    "notice": ("notice", "triangle-up", "var(--warn)"),
    "stopping": ("stopping", "triangle-down", "var(--warn)"),
    "host_lost": ("host lost", "x", "var(--bad)"),
    "verdict": ("verdict", "star", "var(--warn)"),
    "nonfinite": ("not finite", "hexagram", "var(--bad)"),
    "stacks": ("stacks", "pentagon", "var(--run-2)"),
    "end": ("end of a start", "line-ns-open", "var(--muted)"),
}


@dataclass(frozen=True)
class Event:
    """Something that happened."""

    kind: str  # a key of _EVENTS
    after_s: float  # since the job began
    text: str

    @property
    def name(self) -> str:
        """How its kind is called."""
        return _EVENTS[self.kind][0]


def events_of(history: History) -> list[Event]:
    """Return what happened, in order; saves as rank 0, or the lowest rank that has any, saw them."""
    begun_s = history.begun_s or 0.0
    records = history.events()
    saving = next((rank.rank for rank in history.ranks() if rank.of_kind("save")), None)
    for rank in history.ranks():
        own = [record | {"rank": rank.rank} for record in rank.of_kind("nonfinite")]
        records += own + (rank.of_kind("save") if rank.rank == saving else [])
    found = []
    for record in records:
        kind = record["kind"]
        if kind == "exit" and record.get("status") not in (0, None):
            kind = "failed"
        if kind in _EVENTS:
            found.append(Event(kind, record["time_s"] - begun_s, _event_text(kind, record)))
    return sorted(found, key=lambda event: event.after_s)


def _event_text(kind: str, record: Record) -> str:
    rank = f"rank {record.get('rank')}"
    if kind == "start":
        return f"{rank} on {record.get('host')}, pid {record.get('pid')}"
    if kind in ("exit", "failed"):
        status = record.get("status")
        if isinstance(status, int) and status < 0:
            return f"{rank}: killed by signal {-status}"
        return f"{rank}: exit code {status}"
    if kind == "raised":
        return f"{rank}: {record.get('type')}: {record.get('message')}"
    if kind == "save":
        return f"{record.get('path')}, {record.get('duration_s')} s"
    if kind == "host_lost":
        return f"{record.get('host')}: {record.get('reason')}"
    if kind == "nonfinite":
        module = record.get("module")
        return f"{rank}: {record.get('what')}" + (f" of {module}" if module else "")
    if kind == "end":
        return f"exit code {record.get('exit_code')}"
    return str(record.get("text") or record.get("path") or "")


def timeline_chart(run: Run, events: Sequence[Event], prefix: str) -> Chart | None:
    """Return what happened when; None without events."""
    if not events:
        return None
    unit, unit_s = time_unit(_longest_s([run]))
    traces: list[dict[str, Any]] = []
    kinds = [kind for kind in _EVENTS if any(event.kind == kind for event in events)]
    for kind in kinds:
        name, symbol, color = _EVENTS[kind]
        own = [event for event in events if event.kind == kind]
        own = own[:: math.ceil(len(own) / _MAX_EVENTS)]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [event.after_s / unit_s for event in own],
                "y": [name] * len(own),
                "text": [shown(event.text) for event in own],
                "marker": {"symbol": symbol, "color": color, "size": 11, "line": {"color": color, "width": 2}},
                "hovertemplate": f"%{{x:.4g}} {unit}: %{{text}}<extra></extra>",
            }
        )
    layout = _axes(f"{unit} since the job began", hovermode="closest")
    layout["yaxis"] = {"type": "category", "autorange": "reversed", "automargin": True}
    layout["xaxis"] |= {"range": [-0.03 * _longest_s([run]) / unit_s, 1.03 * _longest_s([run]) / unit_s]}
    layout["shapes"] = _tries(run, unit_s)
    return Chart(f"{prefix}timeline", "What happened", traces, layout, "", 120 + 26 * len(kinds))


def _tries(run: Run, unit_s: float) -> list[dict[str, Any]]:
    """Return a band for every second start of the job, so that restarts are seen."""
    begun_s = run.history.begun_s or 0.0
    return [
        {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": (start.begun_s - begun_s) / unit_s,
            "x1": (start.ended_s - begun_s) / unit_s,
            "y0": 0,
            "y1": 1,
            "fillcolor": "var(--band)",
            "line": {"width": 0},
            "layer": "below",
        }
        for start in run.history.starts[1::2]
        if start.begun_s is not None and start.ended_s is not None
    ]
