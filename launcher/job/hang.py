"""Has the job stopped making progress, and which rank is the odd one out?"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_COMPARED_FRAMES = 3
_NO_STACK = "  (no Python stack)"


class HangWatch:
    """Knows when each rank last made progress, by heartbeats and output. Times are the monotonic clock.

    A job hangs when no rank has made a heartbeat or written anything for the timeout. One rank hangs when it has made
    heartbeats before, or most ranks have, and for the timeout it has neither made one nor written anything while
    another rank's heartbeats continued. Output of the others alone proves nothing about a silent rank: during an
    evaluation on rank 0 the other ranks wait for it, and where only rank 0 prints the others are always silent.
    """

    def __init__(self, timeout_s: float, ranks: Iterable[int], now_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_s = dict.fromkeys(ranks, now_s)  # of each running rank: its last heartbeat or output
        self._counts = dict.fromkeys(self._last_s, 0)
        self._job_last_s = now_s  # of all ranks, those that have ended too
        self._last_beat_s = -math.inf  # of all ranks
        self._no_hang_until_s = -math.inf  # heartbeats up to then prove nothing against any rank

    @property
    def counts(self) -> dict[int, int]:
        """The heartbeats of each rank that still runs."""
        return {rank: self._counts[rank] for rank in self._last_s}

    def beat(self, rank: int, count: int, now_s: float) -> None:
        """Note the heartbeats of a rank; a number that stands still is not progress."""
        if count == self._counts[rank]:
            return
        self._counts[rank] = count
        self._last_beat_s = now_s
        self.output(rank, now_s)

    def output(self, rank: int, now_s: float) -> None:
        """Note that a rank wrote something."""
        self._job_last_s = now_s
        if rank in self._last_s:
            self._last_s[rank] = now_s

    def hold(self, now_s: float) -> None:
        """Note that ranks wait for the launcher, or that it was away: their standstill counts from now on."""
        self._last_s = dict.fromkeys(self._last_s, now_s)
        self._job_last_s = now_s

    def ended(self, rank: int, now_s: float) -> None:
        """Forget a rank that has ended, which is progress of the job."""
        self._job_last_s = now_s
        self._last_s.pop(rank, None)

    def hung_ranks(self, now_s: float) -> list[int]:
        """Return the ranks that hang, [] while none does; all running ranks when nothing moves."""
        if now_s - self._job_last_s > self._timeout_s:
            return sorted(self._last_s)
        if self._last_beat_s <= self._no_hang_until_s:  # asked after every event: not to look at all ranks each time
            return []
        # Where most ranks make heartbeats, one that never did hangs at its start; else they are some ranks' affair.
        is_usual = 2 * sum(map(bool, self._counts.values())) > len(self._counts)
        since_s = {rank: last_s for rank, last_s in self._last_s.items() if is_usual or self._counts[rank]}
        self._no_hang_until_s = min(since_s.values(), default=now_s) + self._timeout_s
        return sorted(rank for rank, last_s in since_s.items() if self._last_beat_s - last_s > self._timeout_s)


def odd_one_out(stacks: Mapping[int, str], counts: Mapping[int, int], hung: Collection[int]) -> int | None:
    """Return which of the `hung` ranks the others most likely wait for.

    The one that has made fewer heartbeats than all others, else the one whose main thread stands where no other does.
    None when the ranks look alike. stacks and counts are those of all running ranks: where heartbeats are made by some
    of them only, the others' zero says nothing, unless it is the only zero among several ranks.
    """
    if len(hung) == 1:
        return next(iter(hung))
    beating = {rank: count for rank, count in counts.items() if rank in hung and count}
    without = [rank for rank in hung if not counts.get(rank)]
    if len(without) == 1 and len(beating) > 1:
        return without[0]
    behind = min(beating.values(), default=0)
    slowest = [rank for rank, count in beating.items() if count == behind]
    if len(slowest) == 1 and len(beating) > 1:
        return slowest[0]
    places = {rank: _place(text) for rank, text in stacks.items() if rank in hung}
    how_many = Counter(places.values())
    alone = [rank for rank, place in places.items() if how_many[place] == 1]
    return alone[0] if len(alone) == 1 and len(how_many) == 2 and len(places) > 2 else None


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
