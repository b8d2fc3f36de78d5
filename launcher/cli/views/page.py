"""Write the page: one file of HTML with all it needs in it, so that it opens from a disk, without a network.

The template escapes every text. Beyond that the page's policy lets no script run but its own two, known by their
digests, and nothing be loaded: what a journal holds cannot become code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pkgutil
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.base.errors import UsageError
from launcher.base.units import format_duration
from launcher.cli.views import charts
from launcher.cli.views.charts import Event
from launcher.cli.views.compare import (
    code_of,
    differences,
    flat_config,
    masked,
    packages_of,
    variables_of,
    versions_of,
)
from launcher.cli.views.facts import OUTSIDE, Run, facts_of, findings_of, notes_of, safe, step_time
from launcher.journal.records import PHASE_DOCS
from launcher.journal.summary import Summary

_FOLDER = Path(__file__).parent
_MAX_LISTED_EVENTS = 200
_UNLISTED = {"start", "exit"}  # the timeline has them
_STARTS_JSON = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def plotly_js() -> str:
    """Return the library that draws. Raises: UsageError without the package."""
    try:
        data = pkgutil.get_data("plotly", "package_data/plotly.min.js")
    except (ImportError, OSError):
        data = None
    if data is None:
        raise UsageError("the page needs plotly", hint="pip install 'launch-zero[report]'")
    return data.decode()


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the page of these jobs. Raises: UsageError, OSError."""
    import jinja2
    from markupsafe import Markup

    library = plotly_js()
    sections = [_section(run, place, is_one=len(runs) == 1) for place, run in enumerate(runs)]
    curves = charts.curve_charts(runs)
    logged = charts.logged_charts(runs)
    drawn = [*curves, *logged, *(chart for section in sections for chart in section["charts"])]
    script = (_FOLDER / "page.js").read_text()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    text = environment.get_template("page.html").render(
        title=" · ".join(run.name for run in runs),
        sections=sections,
        curves=curves,
        logged=logged,
        texts=[each for run in runs for each in _logged_texts(run, is_one=len(runs) == 1)],
        differences=differences(runs) if len(runs) > 1 else {},
        names=[run.name for run in runs],
        totals=_totals(runs),
        written=f"{datetime.now():%Y-%m-%d %H:%M}",
        version=__version__,
        policy=_policy(library, script),
        data=Markup(json.dumps([chart.as_data() for chart in drawn]).translate(_STARTS_JSON)),
        style=Markup((_FOLDER / "page.css").read_text()),
        library=Markup(library),
        script=Markup(script),
    )
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _policy(*scripts: str) -> str:
    digests = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data: blob:"


def _section(run: Run, place: int, *, is_one: bool) -> dict[str, Any]:
    """Return what the template needs of one job."""
    history, summary = run.history, run.summary
    prefix = "" if is_one else f"{place}-"
    events = charts.events_of(history)
    notes, collectives = list(notes_of(summary)), None
    try:
        collectives = charts.collectives_chart(run, prefix)
    except (OSError, ValueError) as error:
        notes.append(safe(f"The recorded steps are not shown: {error}"))
    found = (
        charts.phases_chart(run, prefix),
        charts.waiting_chart(run, prefix),
        collectives,
        charts.timeline_chart(run, events, prefix),
        charts.units_chart(run, prefix),
    )
    return {
        "name": run.name,
        "color": place % charts.NUM_COLORS,
        "findings": [(f.is_critical, *map(safe, (f.text, f.next, f.evidence))) for f in findings_of(summary)],
        "facts": [(name, safe(text)) for name, text in facts_of(run)],
        "notes": notes,
        "charts": [chart for chart in found if chart is not None],
        "phases": _phases(summary),
        "events": _listed(events, summary),
        "num_unlisted": max(0, sum(e.kind not in _UNLISTED for e in events) - _MAX_LISTED_EVENTS),
        "auto": _auto(history.engine.get("auto")),
        "config": list(flat_config(history.engine.get("config")).items()),
        "environment": [*versions_of(history).items(), *code_of(history).items()],
        "variables": variables_of(history),
        "packages": list(packages_of(history).items()),
    }


def _phases(summary: Summary) -> list[dict[str, Any]]:
    """Return the rows of the table of phases, outside of steps last."""
    whole_s = summary.duration_s or sum(summary.phases_s.values()) or 1.0
    times = sorted(summary.phases_s.items(), key=lambda each: -each[1])
    times += [(OUTSIDE, summary.outside_s)] if summary.outside_s else []
    return [
        {
            "name": name,
            "phase": name if name in PHASE_DOCS else "outside",
            "time": format_duration(time_s),
            "share": f"{time_s / whole_s:.1%}",
            "width": f"{100 * time_s / whole_s:.2f}",
            "step": step_time(summary.phases_of_step_s[name]) if name in summary.phases_of_step_s else "",
            "doc": PHASE_DOCS.get(name, "starting, restarting and ending"),
        }
        for name, time_s in times
    ]


def _totals(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a bar of phases for each job: all as long as the job that took longest."""
    longest_s = max((run.summary.duration_s or 0.0 for run in runs), default=0.0) or 1.0
    return [
        {
            "name": run.name,
            "time": format_duration(run.summary.duration_s or 0.0),
            "width": f"{100 * (run.summary.duration_s or 0.0) / longest_s:.2f}",
            "phases": _phases(run.summary),
        }
        for run in runs
        if run.summary.phases_s
    ]


def _listed(events: Sequence[Event], summary: Summary) -> list[tuple[str, str, str]]:
    listed = [event for event in events if event.kind not in _UNLISTED]
    unit, unit_s = charts.time_unit(summary.duration_s or 0.0)
    return [
        (f"{event.after_s / unit_s:.1f} {unit}", event.name, safe(event.text)) for event in listed[:_MAX_LISTED_EVENTS]
    ]


def _auto(auto: Any) -> list[tuple[str, str, str]]:
    """Return key, value and reason of what was `auto`."""
    found = []
    for each in auto if isinstance(auto, list) else []:
        if isinstance(each, list) and len(each) == 3:
            key, value, reason = map(str, each)
            found.append((key, masked(key, value), safe(reason)))
    return found


def _logged_texts(run: Run, *, is_one: bool) -> list[tuple[str, str]]:
    """Return the values that a script logged and that are no numbers."""
    texts = {name: value for name, value in run.summary.logged.items() if not isinstance(value, int | float)}
    prefix = "" if is_one else f"{run.name}: "
    return [
        (f"{prefix}{name}", safe(value if isinstance(value, str) else json.dumps(value)))
        for name, value in texts.items()
    ]
