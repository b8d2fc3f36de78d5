"""Which collective do ranks wait in, and for whom: concluded from what all ranks say that they have entered.

Ranks of a group enter its collectives in one order, so a collective is known by its number in a stream: a process group
of torch, or one kind of collective in a group of the engine, which counts these apart. A collective ends on no rank
before all have entered it: the rank that others wait for is one that has not, and that waits in no other itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# Ranks are asked within moments of each other: in a healthy job one may have entered what another is about to enter.
_MIN_WAIT_S = 1.0
# Whose ranks all give tensors of one size; others differ by rank, such as a gather's output, which only its root has.
_ALIKE = (
    "all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base",
)  # fmt: skip
_MAX_RANGES = 8  # of ranks that are named


class Kind(str, Enum):
    """Why a collective does not end."""

    MISSING = "missing"  # a rank has not entered it
    SILENT = "silent"  # a rank does not answer, and may not have entered it
    DIFFERS = "differs"  # ranks have entered different collectives at this number
    CIRCLE = "circle"  # ranks wait for each other in different groups
    NETWORK = "network"  # all have entered it


@dataclass(frozen=True)
class Call:
    """One collective, as a rank has entered it."""

    number: int  # in its stream, from 1 on
    operation: str  # "all_reduce"; of the engine: "the gather of layers.3"
    size: str = ""  # "4,096 × float32"; "" where it is not known

    def differs_from(self, other: Call) -> bool:
        """Whether the two cannot be the same collective."""
        has_sizes = self.operation in _ALIKE and bool(self.size and other.size)
        return self.operation != other.operation or (has_sizes and self.size != other.size)


@dataclass(frozen=True)
class Stream:
    """What a rank says of the collectives of one stream."""

    name: str  # alike on all ranks
    group: str  # for messages: "the world"; "" where the operation says it
    ranks: tuple[int, ...]
    num_entered: int = 0
    waits_in: int | None = None  # the first one that has not ended; None: all have, as far as is known
    waits_s: float = 0.0  # since that one was entered
    calls: Mapping[int, Call] = field(default_factory=dict)  # the last ones, by number


@dataclass(frozen=True)
class Account:
    """What is known of one rank. `is_silent`: it was asked, and has not answered."""

    rank: int
    streams: Mapping[str, Stream] = field(default_factory=dict)
    is_silent: bool = False
    why_silent: str = ""  # "stopped by a signal: state T in /proc"
    place: str = ""  # "train.py:88 in load_batch"
    phase: str = ""
    is_running: bool = True

    @property
    def last(self) -> str:
        """The collective that it has entered last, in words; "" where none is known."""
        calls = [(stream, max(stream.calls)) for stream in self.streams.values() if stream.calls]
        if not calls:
            return ""
        stream, number = max(calls, key=lambda pair: (pair[0].group == "the world", pair[1]))
        return _text_of(stream.calls[number], stream.group, has_size=False)

    def whereabouts(self, *, has_last: bool = True) -> str:
        """Return what it does, in words: place, phase, last collective."""
        if not self.is_running:
            return "it has exited"
        at = f"at {self.place}" if self.place else ""
        last = f"after {self.last}" if has_last and self.last else ""
        facts = [at, f"in the phase {self.phase}" if self.phase else "", last]
        return "it is " + ", ".join(filter(None, facts)) if any(facts) else ""


@dataclass(frozen=True)
class Stuck:
    """A collective that does not end, and whom its ranks wait for."""

    kind: Kind
    collective: str  # "all_reduce #217 of the world (4,096 × float32)"
    waiting: tuple[int, ...]
    culprits: tuple[int, ...]  # the ranks that they wait for; (): no single ones
    reason: str  # of the first culprit, or of them all: what follows "rank 3 "
    lines: tuple[str, ...] = ()  # whole sentences, for a summary

    @property
    def culprit(self) -> int | None:
        return self.culprits[0] if self.culprits else None


@dataclass(frozen=True)
class _Wait:
    """A stream in which ranks wait for the collective `number`."""

    name: str
    number: int
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    silent: tuple[int, ...]
    strangers: tuple[int, ...]  # ranks of other launchers, of which nothing is known
    calls: Mapping[int, Call]  # at this number, by rank
    group: str

    @property
    def text(self) -> str:
        return _text_of(self.calls[self.waiting[0]], self.group)


def find_stuck(accounts: Sequence[Account]) -> Stuck | None:
    """Return the collective that holds the ranks up; None where none does, or nothing is known.

    accounts: of all ranks, those that have ended too.
    """
    by_rank = {account.rank: account for account in accounts}
    waits = list(_waits(by_rank))
    if not waits:
        return None
    targets = {wait.name: set(wait.missing or wait.silent) for wait in waits}
    held = {rank for wait in waits if targets[wait.name] for rank in wait.waiting}
    # What the engine says of a collective comes before what torch says of the same: it names the parameters.
    waits.sort(key=lambda wait: (not wait.missing, -len(wait.waiting), wait.group != ""))
    for wait in waits:
        roots = sorted(targets[wait.name] - held)
        if roots:
            return (_missing if wait.missing else _silent)(wait, roots, by_rank)
    differing = next((wait for wait in waits if not targets[wait.name] and _parts_of(wait)), None)
    if differing is not None:
        return _differing(differing, by_rank)
    return _circle([wait for wait in waits if targets[wait.name]]) if held else _network(waits[0])


def _waits(by_rank: Mapping[int, Account]) -> Iterator[_Wait]:
    """Yield each stream in which ranks have waited for a while, with the first number that has not ended."""
    named: dict[str, dict[int, Stream]] = {}
    for rank, account in by_rank.items():
        for name, stream in account.streams.items():
            named.setdefault(name, {})[rank] = stream
    for name, streams in named.items():
        waiting = {
            rank: stream.waits_in
            for rank, stream in streams.items()
            if stream.waits_in in stream.calls and stream.waits_s >= _MIN_WAIT_S
        }
        if not waiting:
            continue
        number = min(filter(None, waiting.values()))
        first = next(streams[rank] for rank, waits_in in waiting.items() if waits_in == number)
        known = [by_rank[rank] for rank in first.ranks if rank in by_rank]
        absent = [each for each in known if each.rank not in streams or streams[each.rank].num_entered < number]
        yield _Wait(
            name,
            number,
            tuple(sorted(rank for rank, waits_in in waiting.items() if waits_in == number)),
            tuple(each.rank for each in absent if not (each.is_silent and each.is_running)),
            tuple(each.rank for each in absent if each.is_silent and each.is_running),
            tuple(rank for rank in first.ranks if rank not in by_rank),
            {rank: stream.calls[number] for rank, stream in streams.items() if number in stream.calls},
            first.group,
        )


def _missing(wait: _Wait, roots: Sequence[int], by_rank: Mapping[int, Account]) -> Stuck:
    others = [rank for rank in wait.missing if rank != roots[0]]
    nor = f", nor {'has' if len(others) == 1 else 'have'} {named_ranks(others)}" if others else ""
    where = by_rank[roots[0]].whereabouts()
    which = f"which {named_ranks(wait.waiting)} {_verb(wait.waiting)} in"
    reason = f"has not entered {wait.text}, {which}{nor}" + (f"; {where}" if where else "")
    lines = [f"rank {roots[0]} {reason}"]
    for rank in others[:_MAX_RANGES]:
        lines.append(f"rank {rank} has not entered it; {by_rank[rank].whereabouts()}".rstrip("; "))
    return Stuck(Kind.MISSING, wait.text, wait.waiting, tuple(roots), reason, tuple(lines))


def _silent(wait: _Wait, roots: Sequence[int], by_rank: Mapping[int, Account]) -> Stuck:
    why = by_rank[roots[0]].why_silent
    reason = (
        f"does not answer{f' ({why})' if why else ''}; {named_ranks(wait.waiting)} {_verb(wait.waiting)} for it in"
        f" {wait.text}"
    )
    lines = [f"rank {rank} does not answer{_in_brackets(by_rank[rank].why_silent)}" for rank in roots[1:_MAX_RANGES]]
    return Stuck(Kind.SILENT, wait.text, wait.waiting, tuple(roots), reason, (f"rank {roots[0]} {reason}", *lines))


def _parts_of(wait: _Wait) -> list[tuple[Call, tuple[int, ...]]]:
    """Return the different collectives at the number of a wait with their ranks, the most first; [] for one alone."""
    parts: list[tuple[Call, list[int]]] = []
    for rank, call in sorted(wait.calls.items()):
        alike = next((ranks for other, ranks in parts if not other.differs_from(call)), None)
        if alike is None:
            parts.append((call, [rank]))
        else:
            alike.append(rank)
    parts.sort(key=lambda part: -len(part[1]))
    return [(call, tuple(ranks)) for call, ranks in parts] if len(parts) > 1 else []


def _differing(wait: _Wait, by_rank: Mapping[int, Account]) -> Stuck:
    parts = _parts_of(wait)
    (usual, most), (odd, few) = parts[0], parts[-1]
    is_clear = len(few) < len(most)  # else it is not known which of them is right
    culprits = few if is_clear else ()
    where = by_rank[few[0]].whereabouts(has_last=False) if is_clear else ""
    own, others = _text_of(odd, wait.group), _text_of(usual, wait.group)
    which = f"where {named_ranks(most)} {'has' if len(most) == 1 else 'have'} entered {others}"
    reason = f"has entered {own}, {which}" + (f"; {where}" if where else "")
    line = "; ".join(
        f"{named_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} entered {_text_of(call, wait.group)}"
        for call, ranks in parts[:_MAX_RANGES]
    )
    if not is_clear:
        reason = f"waits for ranks that have entered another collective: {line}"
    ranks = tuple(rank for rank in wait.waiting if rank not in culprits)
    lines = (f"rank {few[0]} {reason}",) if is_clear else (f"ranks have entered different collectives: {line}",)
    return Stuck(Kind.DIFFERS, others, ranks, culprits, reason, lines)


def _circle(waits: Sequence[_Wait]) -> Stuck:
    lines = []
    for wait in waits[:_MAX_RANGES]:
        who, for_whom = named_ranks(wait.waiting), named_ranks(wait.missing or wait.silent)
        lines.append(f"{who} {_verb(wait.waiting)} in {wait.text} for {for_whom}")
    reason = f"waits in a circle: {'; '.join(lines)}"
    waiting = tuple(sorted({rank for wait in waits for rank in wait.waiting}))
    return Stuck(Kind.CIRCLE, waits[0].text, waiting, (), reason, ("ranks wait in a circle:", *lines))


def _network(wait: _Wait) -> Stuck:
    all_ranks, doubt = "all its ranks", "is it the network between them?"
    if wait.strangers:  # each node has its own launcher
        all_ranks, doubt = "all its ranks here", f"{named_ranks(wait.strangers)} may be missing"
    reason = f"waits in {wait.text}, which {all_ranks} have entered and which does not end: {doubt}"
    line = f"{wait.text} does not end, and {all_ranks} have entered it: {doubt}"
    return Stuck(Kind.NETWORK, wait.text, wait.waiting, (), reason, (line,))


# ---- Words ----


def _text_of(call: Call, group: str, *, has_size: bool = True) -> str:
    of = f" of {group}" if group else ""
    return f"{call.operation} #{call.number}{of}" + (_in_brackets(call.size) if has_size else "")


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _verb(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0-2, 5", with the end left out where there are very many."""
    ordered = sorted(ranks)
    starts = [rank for rank in ordered if rank - 1 not in ordered]
    ends = [rank for rank in ordered if rank + 1 not in ordered]
    parts = [f"{start}-{end}" if end > start else str(start) for start, end in zip(starts, ends, strict=True)]
    more = " and others" if len(parts) > _MAX_RANGES else ""
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(parts[:_MAX_RANGES])}{more}"


# ---- What a rank has said. Anything may stand in its file ----


def streams_of(answer: Mapping[str, Any]) -> dict[str, Stream]:
    """Return what a rank has answered, see `launcher.compat.collectives`; what is malformed is left out."""
    found = {}
    for entry in answer.get("streams", ()) if isinstance(answer.get("streams"), list) else ():
        try:
            calls = [Call(int(number), str(operation), str(size)) for number, operation, size in entry["calls"]]
            waits_in = entry["waits_in"]
            found[str(entry["name"])] = Stream(
                str(entry["name"]),
                str(entry["group"]),
                tuple(map(int, entry["ranks"])),
                int(entry["num_entered"]),
                None if waits_in is None else int(waits_in),
                float(entry["waits_s"]),
                {call.number: call for call in calls},
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return found
