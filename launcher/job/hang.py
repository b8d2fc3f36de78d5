"""Has the job stopped making progress, and which rank do the others wait for?"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.agent.wire import DumpStacks, Stacks
from launcher.base.private_files import write_private
from launcher.base.timeouts import timeouts
from launcher.job.collectives import Account, Stuck, find_stuck, named_ranks, streams_of
from launcher.job.events import Watcher
from launcher.job.node import Node, Rank
from launcher.plan.plan import JobPlan

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_COMPARED_FRAMES = 3
_NO_STACK = "  (no Python stack)"
_PACKAGE = str(Path(__file__).resolve().parent.parent)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3[.\d]*/|^<frozen ")  # not the script's
_NOTHING_STUCK = "no rank has been waiting in a collective"


class HangWatch:
    """Knows whether ranks hang, by their heartbeats and output. Times are the monotonic clock.

    A job hangs when no rank has made a heartbeat or written anything for the timeout. One rank hangs when it has made
    heartbeats before, or most ranks have, and for the timeout it has neither made one nor written anything while
    another rank's heartbeats continued. Output of the others alone proves nothing about a silent rank: during an
    evaluation on rank 0 the other ranks wait for it, and where only rank 0 prints the others are always silent.
    """

    def __init__(self, timeout_s: float, ranks: Sequence[Rank], now_s: float) -> None:
        self._timeout_s = timeout_s
        self._ranks = ranks
        self._job_moved_s = now_s  # the last progress of any rank, those that have ended too
        self._last_beat_s = -math.inf  # of all ranks
        self._no_hang_until_s = -math.inf  # heartbeats up to then prove nothing against any rank

    def beat(self, rank: Rank, count: int, now_s: float) -> None:
        """Record the heartbeats of a rank; an unchanged number is not progress."""
        if count == rank.num_heartbeats:
            return
        rank.num_heartbeats = count
        self._last_beat_s = now_s
        self._move(rank, now_s)

    def ended(self, now_s: float) -> None:
        """Record that a rank has ended, which is progress of the job."""
        self._job_moved_s = now_s

    def hold(self, now_s: float) -> None:
        """Record that ranks wait for the launcher, or that it was away: their silence counts from now on."""
        for rank in self._ranks:
            rank.moved_s = now_s
        self._job_moved_s = now_s

    def hung_ranks(self, now_s: float) -> list[Rank]:
        """Return the ranks that hang, [] while none does; all running ranks when nothing moves."""
        running = [rank for rank in self._ranks if rank.is_running]
        for rank in running:
            if rank.wrote_s > rank.moved_s:
                self._move(rank, rank.wrote_s)
        if now_s - self._job_moved_s > self._timeout_s:
            return running
        if self._last_beat_s <= self._no_hang_until_s:
            return []
        # Where most ranks make heartbeats, one that never did hangs at its start; else they are some ranks' affair.
        is_usual = 2 * sum(rank.num_heartbeats > 0 for rank in self._ranks) > len(self._ranks)
        watched = [rank for rank in running if is_usual or rank.num_heartbeats]
        self._no_hang_until_s = min((rank.moved_s for rank in watched), default=now_s) + self._timeout_s
        return [rank for rank in watched if self._last_beat_s - rank.moved_s > self._timeout_s]

    def _move(self, rank: Rank, now_s: float) -> None:
        rank.moved_s = now_s
        self._job_moved_s = max(self._job_moved_s, now_s)


def find_straggler(hung: Sequence[Rank], stuck: Stuck | None = None) -> Rank | None:
    """Return which of the ranks that hang the others most likely wait for.

    stuck: the collective that holds the ranks up: what it says is known, all else is guessed. The one that has made
    fewer heartbeats than all others, else the one whose stack is like no other's. None when the ranks look alike. Where
    heartbeats are made by some ranks only, the others' zero says nothing, unless it is the only zero among several
    ranks.
    """
    named = [rank for rank in hung if stuck is not None and rank.number == stuck.culprit]
    if named or len(hung) == 1:
        return (named or hung)[0]
    beating = [rank for rank in hung if rank.num_heartbeats]
    without = [rank for rank in hung if not rank.num_heartbeats]
    if len(without) == 1 and len(beating) > 1:
        return without[0]
    behind = min((rank.num_heartbeats for rank in beating), default=0)
    slowest = [rank for rank in beating if rank.num_heartbeats == behind]
    if len(slowest) == 1 and len(beating) > 1:
        return slowest[0]
    frames = {rank: _innermost_frames(rank.stack) for rank in hung if rank.stack is not None}
    how_many = Counter(frames.values())
    alone = [rank for rank, found in frames.items() if how_many[found] == 1]
    return alone[0] if len(alone) == 1 and len(how_many) == 2 and len(frames) > 2 else None


def _innermost_frames(stack: str) -> tuple[tuple[str, str], ...]:
    """Return the innermost frames of the main thread, which faulthandler writes last."""
    main = stack[stack.rfind("hread 0x") :]
    return tuple((frame["file"], frame["name"]) for frame in _FRAME.finditer(main))[:_COMPARED_FRAMES]


def place_of(stack: str) -> str:
    """Return where the main thread of a stack is, such as "train.py:88 in load_batch": in the user's code if it can be.

    "" for a stack without Python frames.
    """
    main = stack[stack.rfind("hread 0x") :]
    frames = list(_FRAME.finditer(main))
    own = [each for each in frames if not _LIBRARY.search(each["file"]) and not each["file"].startswith(_PACKAGE)]
    if not frames:
        return ""
    frame = (own or frames)[0]
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['name']}"


def account_of(rank: Rank) -> Account:
    """Return what is known of a rank after the last request for stacks."""
    return Account(
        rank.number,
        rank.streams,
        is_silent=bool(rank.why_silent),
        why_silent=rank.why_silent,
        place=place_of(rank.stack or ""),
        phase=rank.phase,
        is_running=rank.is_running,
    )


def name_hang(hung: Sequence[Rank], ranks: Sequence[Rank], stuck: Stuck | None, timeout_s: float) -> tuple[Rank, str]:
    """Return the rank that is reported as the one that hangs, and why: what follows "rank 3 " in a sentence.

    hung: those without progress, of all `ranks` of the run. stuck: the collective that holds ranks up.
    """
    silence = f"no progress for {timeout_s:g} s"
    if stuck is None:
        straggler = find_straggler(hung)
        rank = straggler or hung[0]
        reason = silence + (f", {rank.phase}" if rank.phase else "") + ("" if straggler else ", all ranks alike")
        return rank, reason
    running = {rank.number: rank for rank in ranks if rank.is_running}
    if stuck.culprit in running:
        return running[stuck.culprit], f"hangs: {stuck.reason}; {silence}"
    waiting = [running[number] for number in stuck.waiting if number in running] or list(hung)
    rank = find_straggler(waiting) or waiting[0]
    reason = stuck.reason
    if stuck.culprits:
        have = "has" if len(stuck.culprits) == 1 else "have"
        reason = f"waits in {stuck.collective} for {named_ranks(stuck.culprits)}, which {have} exited"
    return rank, f"hangs: {reason}; {silence}"


def format_stacks(stacks: dict[int, str], summary: Sequence[str] = ()) -> str:
    """Return the stacks of all ranks as one text, rank by rank, below the lines of a summary."""
    head = ["\n".join(summary) + "\n"] if summary else []
    return "\n".join([*head, *(f"rank {rank}:\n{stacks[rank] or _NO_STACK}" for rank in sorted(stacks))])


def summary_of(text: str) -> str:
    """Return the summary at the head of what `format_stacks` wrote, "" where it has none."""
    return re.split(r"(?m)^(?=rank \d+:$)", text, maxsplit=1)[0].strip()


def group_by_stack(text: str) -> list[tuple[list[int], str]]:
    """Return what `format_stacks` wrote as (ranks with the same stack, that stack), the largest group last.

    Thread numbers differ from process to process and are left out of the comparison.
    """
    groups: dict[str, tuple[list[int], str]] = {}
    for part in re.split(r"(?m)^(?=rank \d+:$)", text):
        head, _, stack = part.partition("\n")
        if re.fullmatch(r"rank \d+:", head):
            key = re.sub(r"0x[0-9a-f]+", "0x", stack).strip()
            groups.setdefault(key, ([], stack.rstrip()))[0].append(int(head[len("rank ") : -1]))
    return sorted(groups.values(), key=lambda group: len(group[0]))


# ---- Stack traces of all ranks ----


class StackCollector:
    """Collects one stack trace of each running rank, as often as it is requested."""

    def __init__(self, plan: JobPlan, watcher: Watcher, put: Callable[[Callable[[], object]], object]) -> None:
        """put: has a file of the run written."""
        self._put = put
        self._path = plan.run_folder / "stacks.txt"
        self._watcher = watcher
        self._deadline_s: float | None = None  # while they are being collected
        self.stuck: Stuck | None = None  # the collective that holds ranks up, by the stacks that came last

    def request(self, nodes: Sequence[Node], *, native: bool = False) -> None:
        """Let every rank that runs write its stacks. native: those of native code, too."""
        self._deadline_s = time.monotonic() + (timeouts().native_stacks_s if native else timeouts().stacks_s)
        for node in nodes:
            for rank in node.ranks.values():
                rank.stack, rank.streams, rank.why_silent = None, {}, ""
            if node.has_running_ranks:
                node.send(DumpStacks(native))

    @staticmethod
    def take(rank: Rank, answer: Stacks) -> None:
        """Keep the answer of a rank."""
        rank.stack, rank.why_silent = answer.text, answer.why_silent
        rank.streams = streams_of(answer.collectives or {})

    def is_done(self, ranks: Sequence[Rank]) -> bool:
        """Whether all stacks are there now, or the time for it is over; they are shown then. True once a request."""
        if self._deadline_s is None:
            return False
        if any(rank.is_running and rank.stack is None for rank in ranks) and time.monotonic() < self._deadline_s:
            return False
        self._deadline_s = None
        self.stuck = find_stuck([account_of(rank) for rank in ranks])
        summary = self.stuck.lines if self.stuck is not None else ()
        if not summary and any(rank.streams for rank in ranks):
            summary = (_NOTHING_STUCK,)
        text = format_stacks({rank.number: rank.stack for rank in ranks if rank.stack is not None}, summary)
        self._put(lambda: self._show(text))
        return True

    def _show(self, text: str) -> None:
        try:
            write_private(self._path, text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._watcher.warning(f"{self._path}: {error.strerror}")
        self._watcher.stacks(text, str(self._path))
