"""A run in words: what `launch show` prints, and `launch report` has at its head."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.base.errors import UsageError
from launcher.base.secrets import MASK, mask_text
from launcher.base.units import counted, format_bytes, format_duration, printable
from launcher.cluster.nodeset import fold
from launcher.journal.history import History, read_history
from launcher.journal.summary import Summary, summarize
from launcher.registry.registry import JobEntry, find_run

OUTSIDE = "outside of steps"
_MAX_LOGGED = 12  # values of a script
_MAX_TEXT_CHARS = 200  # of one of them


@dataclass(frozen=True)
class Run:
    """A job that is looked at."""

    name: str
    folder: Path
    entry: JobEntry | None  # None: it was named by its folder
    history: History
    summary: Summary


def load_run(job: str, max_bytes: int | None = None) -> Run:
    """Read the journal of a job, named as in `find_run`. max_bytes: see `read_history`. Raises: UsageError."""
    folder, entry = find_run(job)
    history = read_history(folder, max_bytes)
    summary = summarize(history)
    if summary.begun_s is None:
        raise UsageError(
            "there is no journal",
            where=str(folder),
            hint="it was run with --no-journal, or by an older version of launch",
        )
    return Run(summary.job_id or folder.resolve().name, folder, entry, history, summary)


def state_of(run: Run) -> str:
    """Return "running", "ended", "lost" or "elsewhere", as `launch ps` has it; of a path alone the first or second."""
    if run.entry is not None:
        return run.entry.state
    return "running" if run.summary.exit_code is None else "ended"


@dataclass(frozen=True)
class Finding:
    """Something that whoever looks at a run should know first."""

    is_critical: bool
    text: str
    next: str = ""
    evidence: str = ""  # several lines
    log: str = ""  # file


def findings_of(summary: Summary) -> list[Finding]:
    """Return the failure of the job, what made it start again, and the verdicts, critical ones first."""
    found = []
    failure = summary.failure
    if failure is not None:
        evidence = str(failure.get("traceback") or "\n".join(map(str, failure.get("last_lines") or ()))).rstrip()
        hint, log = (str(failure.get(name) or "") for name in ("hint", "log"))
        found.append(Finding(True, failure_text(failure), hint, evidence, log))
    for place in range(len(summary.tries) - 1):
        found.append(Finding(False, f"it was started again after {_try_text(summary, place)}"))
    for verdict in summary.verdicts:
        is_critical = verdict.get("severity") == "critical"
        until = verdict.get("until_step")
        text = f"{verdict.get('text')}" + ("" if until is None else f" (until step {until})")
        found.append(Finding(is_critical, text, str(verdict.get("next") or "")))
    return sorted(found, key=lambda finding: not finding.is_critical)


def failure_text(failure: dict[str, Any]) -> str:
    """Return the sentence of a failure of `report.json` or of a record `end`."""
    host, rank, reason = (failure.get(name) for name in ("host", "rank", "reason"))
    after = failure.get("after_s")
    when = f" {format_duration(after)} after start" if isinstance(after, int | float) else ""
    if rank is None:
        return f"{failure.get('kind')}: {host}{when}: {reason}"
    raised = str(failure.get("traceback") or "").rstrip().rpartition("\n")[2]
    return f"rank {rank} ({host}) failed{when}: {reason}" + (f" · {raised}" if raised else "")


def end_text(run: Run) -> str:
    """Return how the job ended, or that it runs."""
    entry, code = run.entry, run.summary.exit_code
    if code is None and entry is None:
        return "it has not ended, or its launcher was killed"
    if code is None and entry is not None and entry.state in ("running", "elsewhere"):
        return "running" if entry.is_here else f"running on {entry.machine}"
    if code is None:
        return "its launcher was killed"
    return "ended well (exit code 0)" if code == 0 else f"exit code {code}"


def size_text(summary: Summary) -> str:
    """Return hosts and ranks."""
    ranks = counted(summary.world_size or 0, "rank")
    return f"{ranks} on {fold(summary.hosts)}" if summary.hosts else ranks


def command_text(summary: Summary) -> str:
    """Return the command as a shell reads it; its secrets were masked when the journal was written."""
    return shlex.join(summary.command).replace(shlex.quote(MASK), MASK)


def facts_of(run: Run) -> list[tuple[str, str]]:
    """Return the lines of the text: a name and what there is to say."""
    summary = run.summary
    begun = datetime.fromtimestamp(summary.begun_s or 0.0)
    rows = [
        ("job", f"{run.name} · {end_text(run)}"),
        ("command", f"{command_text(summary) or 'not recorded'}"),
        ("ran", f"{size_text(summary)} · {begun:%Y-%m-%d %H:%M} · {format_duration(summary.duration_s or 0.0)}"),
    ]
    if summary.last_step is None:
        rows.append(("steps", "none was recorded"))
    else:
        rows.append(("steps", _steps_text(summary)))
    if summary.first_loss is not None and summary.last_loss is not None:
        rows.append(("loss", f"{summary.first_loss:.4g} → {summary.last_loss:.4g}"))
    if summary.first_nonfinite_loss is not None:
        rows.append(("", f"not finite at step {summary.first_nonfinite_loss:,}"))
    if summary.rate is not None:
        rows.append(("rate", rate_text(summary)))
    if summary.goodput is not None:
        rows.append(("goodput", goodput_text(summary)))
    if summary.peak_bytes:
        rows.append(("memory", memory_text(summary.peak_bytes)))
    if summary.sent_bytes_of_step is not None:
        rows.append(("sent", f"{format_bytes(summary.sent_bytes_of_step)} a step by each rank"))
    if summary.slowest is not None:
        rows.append(("slowest", slowest_text(summary)))
    if summary.num_saves:
        rows.append(("saves", f"{counted(summary.num_saves, 'save')}, {format_duration(summary.save_s)} of training"))
    rows += [
        (f"restart {each.number}" if each.number else "start", _try_text(summary, place))
        for place, each in _tries(summary)
    ]
    rows += [("logged", line) for line in _logged_lines(summary)]
    return rows


def _steps_text(summary: Summary) -> str:
    text = f"{summary.first_step:,} to {summary.last_step:,}"
    if summary.num_redone_steps:
        text += f" · {summary.num_redone_steps:,} done again after a restart"
    if summary.num_skipped_steps:
        text += f" · {summary.num_skipped_steps:,} skipped: gradients were not finite"
    return text


def rate_text(summary: Summary) -> str:
    """Return the speed of the steps."""
    rate = summary.rate
    assert rate is not None
    text = f"{_rate(rate.median)} {rate.unit} (median)"
    if not math.isnan(rate.first_tenth + rate.last_tenth):
        text += f" · first tenth {_rate(rate.first_tenth)}, last tenth {_rate(rate.last_tenth)}"
    return text + (f" · MFU {rate.mfu:.1%}" if rate.mfu is not None else "")


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def goodput_text(summary: Summary) -> str:
    """Return which share of the job's time trained."""
    assert summary.goodput is not None
    useful, whole = format_duration(summary.useful_s), format_duration(summary.duration_s or 0.0)
    return f"{summary.goodput:.0%}: {useful} of {whole} were spent on steps that count"


def memory_text(peak_bytes: dict[int, float]) -> str:
    """Return the peaks of the ranks that need least and most."""
    low, high = (choose(peak_bytes, key=lambda rank: peak_bytes[rank]) for choose in (min, max))
    text = f"peak {format_bytes(peak_bytes[high])} (rank {high})"
    return text if low == high else f"{text}, least {format_bytes(peak_bytes[low])} (rank {low})"


def slowest_text(summary: Summary) -> str:
    """Return which rank takes longest for its own work."""
    slowest = summary.slowest
    assert slowest is not None
    more = slowest.own_s / slowest.median_own_s - 1 if slowest.median_own_s else 0.0
    host = f" ({slowest.host})" if slowest.host else ""
    return f"rank {slowest.rank}{host}: {step_time(slowest.own_s)} of its own a step, {more:.0%} over the median"


def step_time(time_s: float) -> str:
    """Return the time of a step."""
    return f"{time_s * 1e3:.3g} ms" if time_s < 1 else format_duration(time_s)


def _tries(summary: Summary) -> Iterator[tuple[int, Any]]:
    return enumerate(summary.tries) if len(summary.tries) > 1 else iter(())


def _try_text(summary: Summary, place: int) -> str:
    each = summary.tries[place]
    duration_s = 0.0 if each.begun_s is None or each.ended_s is None else each.ended_s - each.begun_s
    code = "no end was recorded" if each.exit_code is None else f"exit code {each.exit_code}"
    reason = " · ".join(filter(None, (each.reason or code, each.raised)))
    return f"{format_duration(duration_s)}: {reason}"


def _logged_lines(summary: Summary) -> Iterator[str]:
    names = [name for name in summary.logged if name != "step"]
    for name in names[:_MAX_LOGGED]:
        yield f"{name} = {mask_text(shown_value(summary.logged[name]))[:_MAX_TEXT_CHARS]}"
    if len(names) > _MAX_LOGGED:
        yield f"... and {counted(len(names) - _MAX_LOGGED, 'other value')}: --json has all"


def shown_value(value: Any) -> str:
    """Return a value of a script as text."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return value if isinstance(value, str) else json.dumps(value)


def notes_of(summary: Summary) -> Iterator[str]:
    """Yield what whoever reads the figures must know of them."""
    if summary.is_sample:
        yield "The journal is large: sums and medians are of a sample of it. launch report reads all of it."
    if summary.num_damaged:
        yield f"{counted(summary.num_damaged, 'line')} of the journal cannot be read and were left out."
    if summary.num_dropped:
        yield f"{counted(summary.num_dropped, 'record')} were lost: the journal could not be written as quickly."
    if summary.last_step is not None and not summary.has_engine:
        yield "Without the engine the script's own work has the forward passes, and waiting for ranks is not known."
        if len(summary.tries) > 1:
            yield "What the script did again after a restart is not known either."


def safe(value: object) -> str:
    """Return a foreign text without secrets and control characters."""
    return printable(mask_text(str(value)))
