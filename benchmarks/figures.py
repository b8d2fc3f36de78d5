"""The figures of the first page: read from the sections that were measured, drawn as one picture.

`bench.py` puts the table on top of docs/benchmarks.md and writes the picture, which the first page shows too.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from common import ROOT, table

RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "figures.svg"
_WIDTH, _BAR, _GAP, _LABEL = 760, 18, 6, 250  # pixels


@dataclass(frozen=True)
class Figure:
    """One figure beside the peers': cells of a table in a section, the first one ours."""

    title: str
    section: str  # the file in benchmarks/results without its suffix
    cells: tuple[tuple[str, str, str], ...]  # who, the first cell of the row, the name of the column

    def values(self) -> list[tuple[str, float, str]]:
        """Return who, the number and its unit, in the order of `cells`."""
        text = (RESULTS / f"{self.section}.md").read_text()
        return [(who, *_cell(text, row, column)) for who, row, column in self.cells]


_EXISTS = "the last rank's process exists"
FIGURES = (
    Figure(
        "From the command until both ranks of this machine exist",
        "startup",
        tuple((name, _EXISTS, name) for name in ("launch", "torchrun", "DeepSpeed")),
    ),
    Figure(
        "One command on 250 hosts over SSH",
        "fanout_250",
        (
            ("launch exec", "launch exec, paramiko", "250"),
            ("OpenSSH, its quickest key exchange", "OpenSSH, curve25519", "250"),
            ("pdsh", "pdsh", "250"),
        ),
    ),
    Figure(
        "A step at stage 3, optimizer and parameters in host memory",
        "offload_time",
        tuple((who, f"{who} stage 3, optimizer and parameters offloaded", "step") for who in ("launch", "DeepSpeed")),
    ),
)


def _cell(text: str, row: str, column: str) -> tuple[float, str]:
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            header = []
        elif not header:
            header = cells
        elif cells[0] == row and column in header:
            number, unit = cells[header.index(column)].replace(",", "").split()[:2]
            return float(number), unit
    raise ValueError(f"no row {row!r} with a column {column!r}")


def shown(value: float, unit: str) -> str:
    """Return a figure with three digits: `0.10 s`, `329 ms`."""
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"


def summary() -> str:
    """Return the figures as a table."""
    rows = []
    for figure in FIGURES:
        (_, own, unit), *peers = figure.values()
        others = ", ".join(f"{who} {shown(value, peer_unit)}" for who, value, peer_unit in peers)
        rows.append([figure.title, shown(own, unit), others, f"{peers[-1][1] / own:.1f} times"])
    return table(["figure", "launch", "peers", "the last peer over launch"], rows)


def picture() -> str:
    """Return the figures as an SVG: bars, the longest of each figure as wide as there is room."""
    parts, y = [], 0
    for figure in FIGURES:
        values = figure.values()
        y += 24
        parts.append(f'<text class="title" x="0" y="{y - 8}">{escape(figure.title)}</text>')
        longest = max(value for _, value, _ in values)
        for position, (who, value, unit) in enumerate(values):
            width = max(2, (_WIDTH - _LABEL - 90) * value / longest)
            middle = y + _BAR - 5
            kind = "peer" if position else "own"
            parts += [
                f'<text x="{_LABEL - 10}" y="{middle}" text-anchor="end">{escape(who)}</text>',
                f'<rect class="{kind}" x="{_LABEL}" y="{y}" width="{width:.1f}" height="{_BAR}"/>',
                f'<text x="{_LABEL + width + 8:.1f}" y="{middle}">{shown(value, unit)}</text>',
            ]
            y += _BAR + _GAP
        y += 10
    style = (
        "text{font:13px system-ui,sans-serif;fill:#222}.title{font-weight:600}.own{fill:#3f51b5}.peer{fill:#b0b7c3}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.own{fill:#8c9eff}.peer{fill:#5b6472}}"
    )
    size = f'viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
        f"<style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def write_picture(path: Path = PICTURE) -> None:
    """Write the picture of what was measured last."""
    path.write_text(picture())
