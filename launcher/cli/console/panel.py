"""How a run looks at the bottom of a terminal. Imports rich, so it is imported only where the panel is shown."""

from __future__ import annotations

import io
import math
from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.base.units import format_duration, printable
from launcher.cli.console.facts import HostView, Pace, RunView

_MAX_WIDTH = 120
_MAX_HOSTS = 6
_MAX_VERDICTS = 3
_MARGIN = "│ "  # tells the panel from output; a rule above it would be most of what is sent for every drawing
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


def draw(view: RunView, columns: int, rows: int) -> list[str]:
    """Return the panel as lines with escape codes, at most `rows` lines of at most `columns` columns."""
    width = max(1, min(columns - len(_MARGIN), _MAX_WIDTH))
    console = Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False)
    with console.capture() as capture:
        console.print(_headline(view), no_wrap=True, overflow="ellipsis")
        console.print(_hosts(view, max(1, min(_MAX_HOSTS, rows - 3 - min(_MAX_VERDICTS, len(view.verdicts))))))
        for verdict in view.verdicts[:_MAX_VERDICTS]:
            colour = "red" if verdict.severity == "critical" else "yellow"
            console.print(Text.assemble(("! ", colour), printable(verdict.text)), no_wrap=True, overflow="ellipsis")
        if view.trouble:
            text = Text.assemble(("! ", "yellow"), " ".join(view.trouble.split()))
            console.print(text, no_wrap=True, overflow="ellipsis")
    return [f"{_DIM}{_MARGIN}{_RESET}{line.rstrip(' ')}" for line in capture.get().splitlines()[: max(1, rows)]]


def _headline(view: RunView) -> Text:
    words = [Text(view.job_id, "bold"), Text(view.size), Text(_clock(view.elapsed_s))]
    if view.restart:
        words.append(Text(f"restart {view.restart}", "yellow"))
    if view.is_stopping:
        words.append(Text("stopping", "yellow"))
    words += [Text(word) for word in _pace(view.pace)]
    if view.loss is not None:
        words.append(Text(f"loss {view.loss:.4g}" if math.isfinite(view.loss) else f"loss {view.loss}"))
    if view.pace.left_s:
        words.append(Text(f"{_clock(view.pace.left_s)} left"))
    return Text.assemble((" · ", "dim")).join(words)


def _hosts(view: RunView, max_rows: int) -> Table:
    """Return a row for each host. Of many, those that need a look come first, and the rest is counted."""
    hosts = view.hosts
    left_out: list[HostView] = []
    if len(hosts) > max_rows:
        ((usual, _),) = Counter(frozenset(host.running) for host in hosts).most_common(1)
        # Stable: otherwise in the order of the hostfile.
        hosts = sorted(hosts, key=lambda host: (_is_dull(host), host.running.keys() == usual))
        hosts, left_out = hosts[: max_rows - 1], hosts[max_rows - 1 :]
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for host in hosts:
        step = "" if host.pace.step is None or len(view.hosts) == 1 else f"step {host.pace.step}"
        table.add_row(host.name, _state(host), step)
    if left_out:
        others = "" if all(map(_is_dull, left_out)) else ", not all well"
        running = sum((host.running for host in left_out), Counter[str]())
        table.add_row(f"{len(left_out)} more", Text(", ".join(_counted(running)) + others, "dim"))
    return table


def _counted(running: Counter[str]) -> list[str]:
    return [f"{number} {printable(phase)}" for phase, number in running.items()]


def _is_dull(host: HostView) -> bool:
    return not (host.num_failed or host.num_starting or host.num_ended or host.pace.is_stalled)


def _state(host: HostView) -> Text:
    parts = [Text(f"{host.num_starting} starting", "yellow")] if host.num_starting else []
    parts += [Text(text, "green") for text in _counted(host.running)]
    parts += [Text(f"{host.num_ended} ended", "dim")] if host.num_ended else []
    parts += [Text(f"{host.num_failed} failed", "red")] if host.num_failed else []
    return Text(", ").join(parts)


def _pace(pace: Pace) -> list[str]:
    if pace.step is None:
        return []
    words = [f"step {pace.step}" + (f" of {pace.total_steps}" if pace.total_steps else "")]
    if pace.is_stalled:
        return [*words, f"last step {format_duration(pace.idle_s)} ago"]
    if not pace.steps_per_s:
        return words
    return [
        *words,
        f"{pace.steps_per_s:.3g} steps/s" if pace.steps_per_s >= 1 else f"{1 / pace.steps_per_s:.3g} s/step",
    ]


def _clock(seconds: float) -> str:
    """Return `0:01:23`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
