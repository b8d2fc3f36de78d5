"""Has the job stopped making progress, and which rank is the odd one out?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_COMPARED_FRAMES = 3
_NO_STACK = "  (no Python stack)"


class HangWatch:
    """Knows when each rank last made progress.

    Progress is a heartbeat. As long as no rank has ever made one, output counts instead: scripts that know nothing
    of heartbeats are watched by what they print.
    """

    def __init__(self, timeout_s: float, ranks: Iterable[int], now_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_s = dict.fromkeys(ranks, now_s)
        self._counts = dict.fromkeys(self._last_s, 0)
        self._has_heartbeats = False

    @property
    def counts(self) -> dict[int, int]:
        """The heartbeats of each rank that still runs."""
        return {rank: self._counts[rank] for rank in self._last_s}

    def beat(self, rank: int, count: int, now_s: float) -> None:
        """Note the heartbeats of a rank; a number that stands still is no progress."""
        if count == self._counts[rank]:
            return
        self._has_heartbeats = True
        self._counts[rank] = count
        if rank in self._last_s:
            self._last_s[rank] = now_s

    def output(self, rank: int, now_s: float) -> None:
        """Note that a rank wrote something."""
        if not self._has_heartbeats and rank in self._last_s:
            self._last_s[rank] = now_s

    def hold(self, now_s: float) -> None:
        """Note that ranks wait for the launcher, or that it was away: their standstill counts from now on."""
        self._last_s = dict.fromkeys(self._last_s, now_s)

    def ended(self, rank: int) -> None:
        """Forget a rank that has ended."""
        self._last_s.pop(rank, None)

    def is_expired(self, now_s: float) -> bool:
        """Say whether some rank has made no progress for too long."""
        return any(now_s - last_s > self._timeout_s for last_s in self._last_s.values())


def odd_one_out(stacks: dict[int, str], counts: dict[int, int]) -> int | None:
    """Return the rank the others most likely wait for.

    The one that has made fewer heartbeats than all others, else the one whose main thread stands where no other does.
    None when the ranks look alike.
    """
    if len(stacks) < 2:
        return next(iter(stacks), None)
    behind = min(counts.values(), default=0)
    slowest = [rank for rank, count in counts.items() if count == behind]
    if len(slowest) == 1 and len(set(counts.values())) > 1:
        return slowest[0]
    places = {rank: _place(text) for rank, text in stacks.items()}
    how_many = Counter(places.values())
    alone = [rank for rank, place in places.items() if how_many[place] == 1]
    return alone[0] if len(alone) == 1 and len(how_many) == 2 and len(stacks) > 2 else None


def _place(stack: str) -> tuple[tuple[str, str], ...]:
    """Return the innermost frames of the main thread, which faulthandler writes last."""
    main = stack[stack.rfind("hread 0x") :]
    return tuple((frame["file"], frame["name"]) for frame in _FRAME.finditer(main))[:_COMPARED_FRAMES]


def format_stacks(stacks: dict[int, str]) -> str:
    """Return the stacks of all ranks as one text, rank by rank."""
    return "\n".join(f"rank {rank}:\n{stacks[rank] or _NO_STACK}" for rank in sorted(stacks))


def group_by_stack(text: str) -> list[tuple[list[int], str]]:
    """Return what `format_stacks` wrote as (ranks that stand alike, their stack), the largest group last.

    Thread numbers differ from process to process and are left out of the comparison.
    """
    groups: dict[str, tuple[list[int], str]] = {}
    for part in re.split(r"(?m)^(?=rank \d+:$)", text):
        head, _, stack = part.partition("\n")
        if head:
            key = re.sub(r"0x[0-9a-f]+", "0x", stack).strip()
            groups.setdefault(key, ([], stack.rstrip()))[0].append(int(head[len("rank ") : -1]))
    return sorted(groups.values(), key=lambda group: len(group[0]))
