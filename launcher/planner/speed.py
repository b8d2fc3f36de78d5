"""How quick machines are, as `launch probe` has measured them: of each rank, each link, each collective by size."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.base.folders import home_folder

FORMAT = 1  # of the JSON
SLOW = 0.7  # of what the others have: less is named


@dataclass(frozen=True)
class RankSpeed:
    """What one rank can do while all others do the same."""

    rank: int
    node: int
    host: str
    device: str  # such as "cpu", or a GPU's name
    matmul_flops: dict[str, float] = field(default_factory=dict)  # type -> operations per second
    memory_bytes_per_s: float = 0.0  # read and written, by a copy on the device
    to_device_bytes_per_s: float | None = None  # from page-locked host memory; None: the device is the host
    disk_read_bytes_per_s: float | None = None  # None: not asked for, or another rank of the host measures it
    disk_write_bytes_per_s: float | None = None
    kernel_s: float = 0.0  # of a small operation in a module, forward and backward; 0: not measured


@dataclass(frozen=True)
class CollectiveSpeed:
    """One collective over one group, for one size."""

    kind: str
    group: str  # "all ranks", "within a node" or "between nodes"
    num_ranks: int
    num_bytes: int  # of the whole buffer
    seconds: float  # of the slowest rank; the median of several calls

    @property
    def bus_bytes_per_s(self) -> float:
        """The rate at which a link works in a ring: comparable with the hardware's. NCCL tests, doc/PERFORMANCE.md."""
        share = (self.num_ranks - 1) / self.num_ranks
        return self.num_bytes * share * (2 if self.kind == "all_reduce" else 1) / self.seconds


@dataclass(frozen=True)
class LinkSpeed:
    """Two nodes that send to each other at the same time."""

    nodes: tuple[int, int]
    hosts: tuple[str, str]
    bytes_per_s: float  # in each direction


@dataclass(frozen=True)
class Fit:
    """The line through the times of a collective: seconds = latency_s + bytes on a link / bytes_per_s."""

    latency_s: float
    bytes_per_s: float


@dataclass
class Speed:
    """All that one probe has measured."""

    measured: str  # date and time, UTC
    backend: str
    ranks: list[RankSpeed] = field(default_factory=list)
    collectives: list[CollectiveSpeed] = field(default_factory=list)
    links: list[LinkSpeed] = field(default_factory=list)

    @property
    def key(self) -> str:
        """What tells one set of machines from another: hosts, ranks and devices."""
        hosts = ",".join(sorted({each.host for each in self.ranks}))
        return f"{hosts}-{len(self.ranks)}x{self.ranks[0].device if self.ranks else 'none'}"

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data, with the lines through the collectives."""
        fits = [
            {"kind": kind, "group": group, **asdict(fit)} for (kind, group), fit in fits_of(self.collectives).items()
        ]
        return {"format": FORMAT, **asdict(self), "fits": fits, "slow": slow(self)}

    @classmethod
    def from_json(cls, text: str) -> Speed:
        """Return what `as_json` has made."""
        found = json.loads(text)
        return cls(
            found["measured"],
            found["backend"],
            [RankSpeed(**each) for each in found["ranks"]],
            [CollectiveSpeed(**each) for each in found["collectives"]],
            [LinkSpeed(tuple(each["nodes"]), tuple(each["hosts"]), each["bytes_per_s"]) for each in found["links"]],
        )


def named_apart(ranks: list[RankSpeed]) -> list[RankSpeed]:
    """Return the ranks with names of hosts that tell nodes apart: some of one name get their node's number."""
    nodes_of: dict[str, set[int]] = {}
    for each in ranks:
        nodes_of.setdefault(each.host, set()).add(each.node)
    return [each if len(nodes_of[each.host]) == 1 else replace(each, host=f"{each.host}/{each.node}") for each in ranks]


def kept_file(key: str, kind: str = "") -> Path | None:
    """Return where the user's cache keeps what was measured on a set of machines, None for a user without a home.

    kind: what else than a probe has measured, such as "factors".
    """
    base = os.environ.get("XDG_CACHE_HOME") or (None if (home := home_folder()) is None else str(home / ".cache"))
    if base is None:
        return None
    name = re.sub(r"[^A-Za-z0-9,._-]+", "_", key)[:120]
    return Path(base, "launch", "speed", f"{name}.{kind}.json" if kind else f"{name}.json")


def kept_speeds() -> list[Speed]:
    """Return what was measured before and can still be read."""
    folder = None if (path := kept_file("any")) is None else path.parent
    found = []
    for path in [] if folder is None else sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found.append(Speed.from_json(path.read_text()))
    return found


def fits_of(measured: Sequence[CollectiveSpeed]) -> dict[tuple[str, str], Fit]:
    """Return the line through each collective of each group, by least squares of the relative error.

    The model of Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994).
    """
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in measured:
        on_link = one.bus_bytes_per_s * one.seconds
        series.setdefault((one.kind, one.group), []).append((on_link, one.seconds))
    return {key: _line(points) for key, points in series.items() if len(points) > 1}


def _line(points: Sequence[tuple[float, float]]) -> Fit:
    weights = [1 / seconds**2 for _, seconds in points]  # small sizes count as much as large ones
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    above = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    below = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = above / below if below else 0.0
    if slope <= 0:  # noise: the largest size says what there is
        x, y = max(points)
        return Fit(0.0, x / y)
    return Fit(max(0.0, mean_y - slope * mean_x), 1 / slope)


def slow(found: Speed) -> list[str]:
    """Return a sentence for each rank, disk or link that has much less than the others."""
    sentences = []
    kinds = sorted({kind for each in found.ranks for kind in each.matmul_flops})
    facts = {f"{kind} matrix products": [each.matmul_flops.get(kind) for each in found.ranks] for kind in kinds}
    facts |= {
        "copies in its memory": [each.memory_bytes_per_s for each in found.ranks],
        "copies to its device": [each.to_device_bytes_per_s for each in found.ranks],
        "reads from its disk": [each.disk_read_bytes_per_s for each in found.ranks],
        "writes to its disk": [each.disk_write_bytes_per_s for each in found.ranks],
    }
    for what, values in facts.items():
        for each, share in zip(found.ranks, _shares(values), strict=True):
            if share is not None and share < SLOW:
                sentences.append(f"rank {each.rank} ({each.host}): {what} at {100 * share:.0f} % of the others'")
    for link, share in zip(found.links, _shares([each.bytes_per_s for each in found.links]), strict=True):
        if share is not None and share < SLOW:
            sentences.append(f"{link.hosts[0]} and {link.hosts[1]}: their link has {100 * share:.0f} % of the others'")
    return sentences


def _shares(values: Sequence[float | None]) -> list[float | None]:
    """Return each value over the median of the others; None where there is none."""
    shares: list[float | None] = []
    for index, value in enumerate(values):
        others = [each for place, each in enumerate(values) if place != index and each is not None]
        shares.append(None if value is None or not others else value / statistics.median(others))
    return shares
