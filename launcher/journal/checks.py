"""The rules of verdicts as data: what each is about, its condition on the evidence, its sentence, and what to do.

A check of a window says what is so in that window; `verdicts` waits until it is so in several in a row. A check of the
state says what holds now, and has its own patience.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from launcher.base.progress import BETWEEN_STEPS
from launcher.base.units import format_bytes, format_duration
from launcher.journal.evidence import Evidence, RankEvidence, Record, Window, mean, median, median_low, spread
from launcher.journal.records import COMMUNICATION, DATA, FORWARD, GC, PHASES, SAVE, SCRIPT

DEADBAND, WARNING, CRITICAL = 0.05, 0.10, 0.20  # shares of an iteration

_NOISE_OF_LOAD = 0.2  # of the time in which a rank waits for a processor
_EXPLAINED = 0.8  # of its victims' waiting, by a straggler
_LEAST_EXCESS_S = 0.002  # of a step: below it is what any call of Python may take
_LEAST_STEP_S = 0.02  # of steps that are shorter much is overhead, whatever one does
_NUM_PACES = 8  # windows that say how quick a run is when it is well
_SLOWER = 1.25  # than then
_LEAST_SAVES, _LEAST_SAVE_S, _LEAST_SPAN_S = 3, 0.5, 20.0
_LEAST_FLOORS, _RISING, _LEAST_RISE, _LEAST_RISE_BYTES = 16, 0.85, 0.05, 32 << 20
_SATURATED = 0.6  # a rise whose second half is less than so much of the first one's levels off
_SPIKES = 3  # records in a row
_FINITE_AGAIN = 5
_TOLD_S = 10.0
_SETTLED_STEPS = 50  # a loss scale is found within them
_PATIENCE_S = 3.0  # for other ranks to tell whether their loss is finite: their records come once a second
_SILENT_S, _STILL_S = 20.0, 40.0  # one rank alone; all of them
_SILENT_STEPS = 20
_THROTTLED = 2  # samples in a row


@dataclass(frozen=True)
class Finding:
    """What a check has found."""

    rule: str
    share: float  # of an iteration, with which severity is chosen; 1: it is so, or it is not
    rank: int | None = None
    host: str | None = None
    facts: dict[str, str] = field(default_factory=dict)  # of the sentence
    step: int | None = None  # since when, where the finding itself knows
    raw: float | None = None  # the share that is told, where noise was taken off


@dataclass(frozen=True)
class Rule:
    """One rule. sentence: with the facts of a finding, and {percent}, its share."""

    name: str
    about: str
    sentence: str
    next: str
    num_windows: int = 1  # in a row in which it must be so
    warning: float = WARNING
    critical: float = CRITICAL
    yields_to: tuple[str, ...] = ()  # rules that explain it: it is not told beside them


@dataclass
class State:
    """What checks look at: the evidence, and the windows so far as far as they are compared with."""

    evidence: Evidence = field(default_factory=Evidence)
    first: list[Window] = field(default_factory=list)  # how the run was when it was well
    noise: float = 0.0  # how much the pace changes from one window to the next, as a share
    shares: dict[int, float] = field(default_factory=dict)  # by rank: how much slower than others, in the last window
    changes: deque[float] = field(default_factory=lambda: deque(maxlen=16))  # of these, from window to window
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    loss: float | None = None  # of the last window, the median of ranks
    ended: Record | None = None
    raised: dict[int, str] = field(default_factory=dict)

    @property
    def unevenness(self) -> float:
        """How much the differences between ranks change from one window to the next, as a share."""
        return median(self.changes) if self.changes else 0.0

    def note_shares(self, shares: dict[int, float]) -> None:
        """Note how much slower than the others each rank is in a window, as a share."""
        changes = [abs(share - self.shares[rank]) for rank, share in shares.items() if rank in self.shares]
        if changes:
            self.changes.append(median(changes))
        self.shares = shares

    def add(self, window: Window) -> None:
        """Take a window into what later ones are compared with."""
        if len(self.first) < _NUM_PACES:
            self.first.append(window)
        self.paces.append(window.iteration_s)
        losses = [loss for loss in window.losses if loss is not None and math.isfinite(loss)]
        self.loss = median(losses) if losses else None
        changes = [abs(after - before) for before, after in itertools.pairwise(self.paces)]
        self.noise = median(changes) / median(self.paces) if changes else 0.0


# ---- Of a window ----


def check_ranks(state: State, window: Window) -> Iterator[Finding]:
    """Find ranks that are slower than the median of the others, and hosts all of whose ranks are."""
    if len(window.ranks) < 2:
        return
    waits, saves = window.waits(), window.phase(SAVE)
    own = [step - wait - save for step, wait, save in zip(window.step_s, waits, saves, strict=True)]
    ordered_own, ordered_waits = sorted(own), sorted(waits)
    usual_wait = median_low(window.waits_for_cpu)
    excesses = [each - _median_of_others(ordered_own, each) for each in own]
    state.note_shares({rank: each / window.iteration_s for rank, each in zip(window.ranks, excesses, strict=True)})
    slow: dict[int, tuple[float, float]] = {}  # by place in the window: adjusted share, seconds
    for place, excess_s in enumerate(excesses):
        # What a rank waits for a processor more than the others is its host's load; what all wait makes noise.
        waits_more = max(0.0, window.waits_for_cpu[place] - usual_wait)
        usable_s = excess_s - waits_more * window.step_s[place]
        share = usable_s / window.iteration_s - state.unevenness - _NOISE_OF_LOAD * window.waits_for_cpu[place]
        if share < DEADBAND or excess_s < _LEAST_EXCESS_S:
            continue
        waited_s = _median_of_others(ordered_waits, waits[place]) - waits[place]
        if excess_s >= _EXPLAINED * waited_s:
            slow[place] = share, excess_s
    if slow:
        ordered = {
            name: sorted(values) for name, values in window.phases.items() if name not in (*window.wait_phases, SAVE)
        }
        found = {place: _slow_rank(state, window, place, ordered, *each) for place, each in slow.items()}
        yield from _by_host(window, found)


def _slow_rank(
    state: State, window: Window, place: int, ordered: dict[str, list[float]], share: float, excess_s: float
) -> Finding:
    """Return what is to be said of a slow rank: the phase with most of its excess decides. ordered: phases, sorted."""
    rank = window.ranks[place]
    own = {name: window.phases[name][place] for name in ordered}
    excesses = {name: own[name] - _median_of_others(values, own[name]) for name, values in ordered.items()}
    phase = max(excesses, key=excesses.__getitem__, default=SCRIPT)
    rule = {DATA: "input", GC: "gc"}.get(phase, "straggler")
    where = state.evidence.where(rank)
    facts = {
        "where": where,
        "who": where,
        "what": "the next batch",
        "excess": _time(excess_s),
        "phase": _phase_text(window, phase),
    }
    facts |= {"time": _time(window.phase(phase)[place]), "longest": _longest_pause(state, [rank])}
    return Finding(rule, share, rank, window.hosts[place] or None, facts, raw=excess_s / window.iteration_s)


def _by_host(window: Window, slow: dict[int, Finding]) -> Iterator[Finding]:
    """Yield one finding of a host in place of those of all its ranks."""
    hosts: dict[str, list[int]] = {}
    for place, host in enumerate(window.hosts):
        hosts.setdefault(host, []).append(place)
    named: set[int] = set()
    for host, places in hosts.items():
        found = [slow[place] for place in places if place in slow]
        if (
            len(hosts) < 2
            or len(places) < 2
            or len(found) < len(places)
            or {each.rule for each in found} - {"straggler"}
        ):
            continue
        named.update(places)
        least = min(found, key=lambda each: each.share)
        facts = {**least.facts, "where": f"host {host}", "who": f"host {host}"}
        yield Finding("slow_host", least.share, None, host, facts, raw=least.raw)
    yield from (finding for place, finding in slow.items() if place not in named)


def check_input(state: State, window: Window) -> Iterator[Finding]:
    """Find that all ranks wait for their batches, or for the script where none has a DataLoader."""
    name = DATA if DATA in window.phases else SCRIPT if FORWARD in window.phases else None
    if name is None or window.iteration_s < _LEAST_STEP_S or not window.knows_waits_for_cpu:
        return
    time_s = window.usual(name)
    share = time_s / window.iteration_s
    what = "the next batch" if name == DATA else "the script itself, between its steps"
    facts = {"who": "each rank" if len(window.ranks) > 1 else "the rank", "what": what, "time": _time(time_s)}
    # Where processors are short, those who read are short of them, too.
    noise = median_low(window.waits_for_cpu) if name == DATA else state.unevenness
    yield Finding("input", share - noise, facts=facts, raw=share)


def check_communication(state: State, window: Window) -> Iterator[Finding]:
    """Find that also the rank that waits least spends much of its time in collectives: nobody else explains it."""
    if len(window.ranks) < 2 or window.wait_phases != (COMMUNICATION,) or window.iteration_s < _LEAST_STEP_S:
        return
    if not window.knows_waits_for_cpu:
        return
    shares = [wait / step for wait, step in zip(window.phase(COMMUNICATION), window.step_s, strict=True) if step]
    share = min(shares, default=0.0)
    facts = {"time": _time(share * window.iteration_s)}
    # While one rank waits for a processor, the others wait for it in a collective.
    load = max(window.waits_for_cpu)
    yield Finding("communication", share - state.noise - load, facts=facts, raw=share)


def check_gc(state: State, window: Window) -> Iterator[Finding]:
    """Find pauses of garbage collectors: where ranks wait for each other, those of all ranks add up."""
    pauses = window.phase(GC)
    total_s, most_s = sum(pauses), max(pauses, default=0.0)
    share = min(1.0, total_s / window.iteration_s)
    if share < DEADBAND or total_s < _LEAST_EXCESS_S:
        return
    rank = None
    if most_s > total_s / 2 and len(pauses) > 1:
        rank = window.ranks[pauses.index(most_s)]
    who = "all ranks, one after the other," if rank is None else state.evidence.where(rank)
    who = "the rank" if len(pauses) == 1 else who
    longest = _longest_pause(state, window.ranks if rank is None else [rank])
    host = None if rank is None else window.hosts[window.ranks.index(rank)] or None
    yield Finding("gc", share, rank, host, {"who": who, "time": _time(total_s), "longest": longest}, raw=share)


def check_pace(state: State, window: Window) -> Iterator[Finding]:
    """Find that steps take longer than at first, and which phase has grown."""
    if len(state.first) < _NUM_PACES:
        return
    before = [each.iteration_s for each in state.first]
    usual_s = median(before)
    if window.iteration_s < max(_SLOWER * usual_s, 1.1 * max(before)) or window.iteration_s < _LEAST_STEP_S / 2:
        return
    growth = {name: window.usual(name) - median(each.usual(name) for each in state.first) for name in PHASES}
    phase = max(growth, key=growth.__getitem__)
    raw = 1 - usual_s / window.iteration_s
    load = median(window.waits_for_cpu)
    more = max(0.0, load - min(median(each.waits_for_cpu) for each in state.first))
    share = raw - state.noise - more - _NOISE_OF_LOAD * load
    facts = {"now": _time(window.iteration_s), "usual": _time(usual_s), "phase": _phase_text(window, phase)}
    yield Finding("slowdown", share, facts=facts, raw=raw)


def check_skipped(state: State, window: Window) -> Iterator[Finding]:
    """Find that many steps update nothing: the loss scale is too high again and again."""
    first = min((rank.first_step or 0 for rank in state.evidence.ranks.values()), default=0)
    if window.first_step - first >= _SETTLED_STEPS:
        yield Finding("loss_scale", window.skipped, facts={"what": f"{window.skipped:.0%} of the steps update nothing"})


def check_losses(state: State, window: Window) -> Iterator[Finding]:
    """Find a rank whose loss is far from that of all others: its data is other data."""
    known = [(place, loss) for place, loss in enumerate(window.losses) if loss is not None and math.isfinite(loss)]
    if len(known) < 3:
        return
    ordered = sorted(loss for _, loss in known)
    middle, usual = median(ordered), spread(ordered)
    # Records of ranks come at other times: the mean of one covers up to a second more, or less, than those of others.
    moved = 0.0 if state.loss is None else abs(state.loss - middle)
    for place, loss in known:
        others = _median_of_others(ordered, loss)
        if abs(loss - middle) > max(8 * usual, abs(others) / 2, moved):
            rank = window.ranks[place]
            facts = {
                "where": state.evidence.where(rank),
                "what": f"is {loss:.4g} where that of the others is {others:.4g}",
            }
            yield Finding("bad_data", 1.0, rank, window.hosts[place] or None, facts)


# ---- Of the state ----


def look_losses(state: State, now_s: float) -> Iterator[Finding]:
    """Find losses that are not finite, or far above what they were: of one rank, or of the run."""
    ranks = state.evidence.ranks
    told = [rank.nonfinite_s for rank in ranks.values() if rank.nonfinite]
    since_s = now_s - max(told, default=0.0)  # all of them at once are no longer bad
    bad = {number: rank for number, rank in ranks.items() if _is_bad(rank, since_s)}
    if bad:
        yield from _nonfinite(state, bad, now_s)
        return
    with_loss = [number for number, rank in ranks.items() if rank.losses.has_any]
    spiked = [number for number in with_loss if ranks[number].losses.num_spikes >= _SPIKES]
    if not spiked:
        return
    step, loss, before = ranks[spiked[0]].losses.begun
    if 2 * len(spiked) > len(with_loss):
        yield Finding("loss_spike", 1.0, facts={"loss": f"{loss:.4g}", "before": f"{before:.4g}"}, step=step)
        return
    for number in spiked:
        step, loss, before = ranks[number].losses.begun
        facts = {
            "where": state.evidence.where(number),
            "what": f"is {loss:.4g} and was {before:.4g}, that of others is not",
        }
        yield Finding("bad_data", 1.0, number, ranks[number].host or None, facts, step)


def _is_bad(rank: RankEvidence, since_s: float) -> bool:
    """Whether a rank has told a number that is not finite, and not since then several that are, for a while."""
    return bool(rank.nonfinite) and (rank.num_finite < _FINITE_AGAIN or since_s < _TOLD_S)


def _nonfinite(state: State, bad: dict[int, RankEvidence], now_s: float) -> Iterator[Finding]:
    """Yield the ranks on which it began, where those are few; else that it is so."""
    first = min(rank.nonfinite[0] for rank in bad.values() if rank.nonfinite)
    # A GPU's numbers are not looked at in each step: of one that was finite before, and not after, it is not known.
    sources = [number for number, rank in bad.items() if rank.last_finite < first]
    # The norm is that of all ranks: a loss says more.
    sources = [number for number in sources if (bad[number].nonfinite or (0, ""))[1] == "loss"] or sources
    ranks = state.evidence.ranks
    with_loss = [number for number, rank in ranks.items() if rank.losses.has_any or number in bad]
    since_s = now_s - min(rank.nonfinite_s for rank in bad.values())
    patience_s = _PATIENCE_S + max(rank.record_s for rank in ranks.values())
    is_waiting = any(number not in bad and rank.finite_step < first for number, rank in ranks.items())
    if is_waiting and since_s < patience_s and state.ended is None:
        return
    module = next((name for number in sources if (name := bad[number].first_module)), None)
    what = next(rank.nonfinite[1] for rank in (bad[number] for number in sources) if rank.nonfinite)
    where = f"; first in {module}" if module else ""
    if 2 * len(sources) > len(with_loss) or what == "norm":
        named = "gradient norm" if what == "norm" else what
        yield Finding("nan", 1.0, facts={"what": named, "module": where}, step=first)
        return
    for number in sources[:_SPIKES]:
        facts = {"where": state.evidence.where(number), "what": f"is not finite where that of the others is{where}"}
        yield Finding("bad_data", 1.0, number, bad[number].host or None, facts, first)


def look_scale(state: State, _now_s: float) -> Iterator[Finding]:
    """Find a loss scale that cannot get smaller."""
    for rank in state.evidence.ranks.values():
        if (
            rank.loss_scale is not None
            and rank.loss_scale <= 1.0 < rank.largest_scale  # a scale of 1 may be what was asked for
            and rank.step - (rank.first_step or 0) > _SETTLED_STEPS
        ):
            yield Finding("loss_scale", 1.0, facts={"what": f"it is {rank.loss_scale:g}"})
            return


def look_saves(state: State, _now_s: float) -> Iterator[Finding]:
    """Find saves that take much of the time of training."""
    slow: dict[int, tuple[float, float]] = {}  # share, mean seconds
    means: dict[int, float] = {}
    for number, rank in state.evidence.ranks.items():
        if len(rank.saves) < _LEAST_SAVES:
            continue
        times = [duration_s for _, duration_s in rank.saves][1:]
        span_s, means[number] = rank.saves[-1][0] - rank.saves[0][0], mean(times)
        if span_s >= _LEAST_SPAN_S and means[number] >= _LEAST_SAVE_S and sum(times) / span_s >= DEADBAND:
            slow[number] = sum(times) / span_s, means[number]
    if not slow:
        return
    worst = max(slow, key=slow.__getitem__)
    share, mean_s = slow[worst]
    others = [mean for number, mean in means.items() if number != worst]
    is_alone = bool(others) and mean_s > 2 * median(others)
    facts = {"who": state.evidence.where(worst) if is_alone else "the training", "time": _time(mean_s)}
    named = worst if is_alone else None
    yield Finding("slow_saves", share, named, state.evidence.hosts.get(worst) if is_alone else None, facts, raw=share)


def look_memory(state: State, _now_s: float) -> Iterator[Finding]:
    """Find memory whose least use rises from window to window, and does not level off."""
    rising: dict[int, tuple[float, float]] = {}
    for number, rank in state.evidence.ranks.items():
        floors = rank.floors[len(rank.floors) // 4 :]  # the growth of the first steps ends
        if len(rank.floors) < _LEAST_FLOORS:
            continue
        rise, middle = floors[-1] - floors[0], floors[len(floors) // 2]
        num_rises = sum(after > before for before, after in itertools.pairwise(floors))
        is_steady = num_rises >= _RISING * (len(floors) - 1) and floors[-1] - middle >= _SATURATED * (
            middle - floors[0]
        )
        if is_steady and rise >= max(_LEAST_RISE * floors[0], _LEAST_RISE_BYTES):
            rising[number] = floors[0], floors[-1]
    if not rising:
        return
    worst = max(rising, key=lambda number: rising[number][1] - rising[number][0])
    before, after = rising[worst]
    facts = {
        "where": state.evidence.where(worst),
        "before": format_bytes(int(before)),
        "after": format_bytes(int(after)),
    }
    if len(rising) > 1:
        facts["where"] += f" and {len(rising) - 1} more"
    yield Finding("memory", 1.0, worst, state.evidence.hosts.get(worst) or None, facts)


def look_clocks(state: State, _now_s: float) -> Iterator[Finding]:
    """Find hosts whose processors, or GPUs, are slowed down by heat or power."""
    hosts: dict[str, tuple[int, str]] = {}
    for number, rank in state.evidence.ranks.items():
        if rank.throttled[0] >= _THROTTLED:
            hosts.setdefault(state.evidence.hosts.get(number, ""), (number, rank.throttled[1]))
    for host, (number, why) in hosts.items():
        where = f"{host}, {state.evidence.where(number)}" if host else state.evidence.where(number)
        yield Finding("clocks", 1.0, number, host or None, {"where": where, "why": why})


def look_progress(state: State, now_s: float) -> Iterator[Finding]:
    """Find a rank that has stopped: while the others move, or behind all of them where they wait for it."""
    running = {
        number: rank for number, rank in state.evidence.ranks.items() if rank.beats is not None and not rank.is_over
    }
    if len(running) < 2 or state.ended is not None:
        return
    usual_s = median(state.paces) if state.paces else 0.0
    alone_s, all_s = (max(limit_s, _SILENT_STEPS * usual_s) for limit_s in (_SILENT_S, _STILL_S))
    last = max(rank.moved_s for rank in running.values())
    silent = [number for number, rank in running.items() if last - rank.moved_s >= alone_s]
    others = "the others have moved since"
    if not silent and now_s - last >= all_s:
        found = _behind(state, running)
        silent, others = ([], "") if found is None else ([found[0]], found[1])
    if len(silent) != 1:
        return
    (number,) = silent
    rank = running[number]
    facts = {
        "where": state.evidence.where(number),
        "time": format_duration(now_s - rank.moved_s),
        "others": others,
        "phase": f" ({rank.phase})" if rank.phase else "",
    }
    yield Finding("silent", 1.0, number, rank.host or None, facts, rank.step or None)


def _behind(state: State, running: dict[int, RankEvidence]) -> tuple[int, str] | None:
    """Return the rank that the others wait for while none moves, and what they do; None where they are alike."""
    least = min(rank.beats or 0 for rank in running.values())
    behind = [number for number, rank in running.items() if rank.beats == least]
    steps = {rank.beats for rank in running.values()}
    if len(behind) == 1 and len(steps) == 2:
        return behind[0], "the others are a step further, and wait"
    if len(steps) > 1:  # they have not moved in step
        return None
    idle = [number for number, rank in running.items() if rank.phase == BETWEEN_STEPS]
    if len(idle) == 1:
        return idle[0], "the others have begun the next step, and wait"
    busy = [number for number, rank in running.items() if rank.clock_phase and not state.evidence.waits_now(rank)]
    if len(busy) == 1:
        return busy[0], "the others wait in a collective"
    return None


def look_end(state: State, _now_s: float) -> Iterator[Finding]:
    """Say which failure was the first, once the run has ended."""
    failure = (state.ended or {}).get("failure")
    if not isinstance(failure, dict):
        return
    rank, host = failure.get("rank"), str(failure.get("host") or "")
    where = state.evidence.where(rank) if rank is not None else f"host {host}"
    reason = str(failure.get("reason") or failure.get("kind") or "")
    raised = state.raised.get(rank) if rank is not None else None
    facts = {"where": where, "reason": f"{reason}; {raised}" if raised else reason}
    rule = "hang" if failure.get("kind") == "rank hangs" else "failure"
    moved = {number: each for number, each in state.evidence.ranks.items() if each.beats is not None}
    found = _behind(state, moved) if "all ranks alike" in reason and len(moved) > 1 else None
    if found is not None:
        rank, host = found[0], state.evidence.hosts.get(found[0], host)
        facts |= {"where": state.evidence.where(rank), "reason": f"{reason}; {found[1]}"}
    step = state.evidence.ranks[rank].step if rank in state.evidence.ranks else None
    yield Finding(rule, 1.0, rank, host or None, facts, step or None)


WINDOW_CHECKS: tuple[Callable[[State, Window], Iterator[Finding]], ...] = (
    check_ranks, check_input, check_communication, check_gc, check_pace, check_skipped, check_losses,
)  # fmt: skip
LOOKS: tuple[Callable[[State, float], Iterator[Finding]], ...] = (
    look_losses, look_scale, look_saves, look_memory, look_clocks, look_progress, look_end,
)  # fmt: skip

_EXPLAINING = ("straggler", "slow_host", "input", "gc", "slow_saves", "communication", "clocks")

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "failure",
            "the first failure of a run, which all others followed from",
            "{where} failed first: {reason}",
            "its traceback or last lines are above and in its log",
            warning=0.0,
            critical=0.0,
        ),
        Rule(
            "hang",
            "a rank that made no progress for `--hang-timeout`",
            "{where} hangs: {reason}",
            "its stack is above; launch stacks shows those of a job that runs",
            warning=0.0,
            critical=0.0,
        ),
        Rule(
            "silent",
            "one rank has stopped while all others move or wait for it",
            "{where} has made no progress for {time}{phase}: {others}",
            "launch stacks JOB shows where it is; --hang-timeout S ends such a job",
            warning=0.0,
            critical=0.0,
        ),
        Rule(
            "nan",
            "the loss or the gradient norm is not finite",
            "the {what} is not finite{module}",
            "a lower learning rate, gradient clipping, or bf16 in place of fp16; resume from the checkpoint before it",
            warning=0.0,
            critical=0.0,
            yields_to=("bad_data",),
        ),
        Rule(
            "bad_data",
            "one rank's loss is far from that of all others, or it alone is not finite",
            "the loss of {where} {what}",
            "look at what this rank reads: its shard of the data, its files, the memory of its host",
            num_windows=5,
            warning=0.0,
            critical=0.0,
        ),
        Rule(
            "loss_spike",
            "the loss is far above its running median, for several records",
            "the loss is {loss}, and was {before}",
            "a lower learning rate or gradient clipping; look at the batches of these steps; resume from before them",
            warning=0.0,
            critical=2.0,
            yields_to=("nan", "bad_data"),
        ),
        Rule(
            "loss_scale",
            "many steps update nothing, or the loss scale of fp16 is at its minimum",
            "the loss scale has collapsed: {what}",
            "bf16 needs no loss scale; else a lower learning rate, or gradient clipping",
            num_windows=3,
            warning=0.2,
            critical=0.5,
            yields_to=("nan",),
        ),
        Rule(
            "straggler",
            "one rank is slower than the median of the others, which wait for it",
            "{where} is slow: {excess} more than the others in each step ({percent} of it), in {phase}",
            "compare its host with the others: launch check, launch probe; --exclude leaves it out",
            num_windows=5,
        ),
        Rule(
            "slow_host",
            "all ranks of a host are slower than the others",
            "{where} is slow: its ranks take {excess} more than the others in each step ({percent} of it), in {phase}",
            "launch check and launch probe compare hosts; --exclude leaves it out",
            num_windows=5,
        ),
        Rule(
            "input",
            "ranks wait for data, or for the script's own work between steps",
            "{who} waits {time} of each step ({percent}) for {what}",
            "more num_workers of the DataLoader, prefetch_factor, or data prepared once, near the ranks",
            num_windows=5,
        ),
        Rule(
            "communication",
            "also the rank that waits least spends much of a step in collectives",
            "{percent} of each step ({time}) is communication that no computing hides",
            "a larger micro-batch or more accumulation, overlap_comm, a lower ZeRO stage; launch probe measures links",
            num_windows=5,
            warning=0.35,
            critical=0.55,
            yields_to=("straggler", "slow_host"),
        ),
        Rule(
            "gc",
            "pauses of Python's garbage collector",
            "garbage collection of {who} takes {time} of each step ({percent}){longest}",
            "gc.freeze() after the start, or gc.disable() and gc.collect() at the same step on all ranks",
            num_windows=5,
        ),
        Rule(
            "slow_saves",
            "saves of checkpoints take much of the time",
            "{who} waits {percent} of the time for saves of checkpoints, {time} each",
            "save less often, a quicker disk, or saves beside the training (checkpoint.async_save)",
            yields_to=(),
        ),
        Rule(
            "memory",
            "memory rises from window to window, also after each drop, and does not level off",
            "the memory of {where} creeps up: {before} at first, {after} now",
            "look for tensors that are kept from step to step: losses that are summed with their graph, growing lists",
            warning=0.0,
            critical=2.0,
        ),
        Rule(
            "clocks",
            "processors or GPUs are slowed down by heat or power",
            "the clocks of {where} are lowered: {why}",
            "look at the cooling and the power of that host",
            warning=0.0,
            critical=2.0,
        ),
        Rule(
            "slowdown",
            "steps take longer than at first",
            "steps take {now}, and took {usual} at first: {phase} has grown",
            "what has changed since? other programs on the hosts, longer sequences, a fuller disk",
            num_windows=8,
            warning=0.2,
            critical=0.4,
            yields_to=_EXPLAINING,
        ),
    )
}


def _median_of_others(ordered: Sequence[float], value: float) -> float:
    """Return the median of a sorted list without one value that is in it."""
    place, num_others = bisect_left(ordered, value), len(ordered) - 1
    low, high = ((num_others - 1) // 2, num_others // 2)
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2


def _phase_text(window: Window, phase: str) -> str:
    """Return the words for a phase. Without the engine the forward pass is part of the script's own time."""
    if phase == SCRIPT:
        return "the script's own work" if FORWARD in window.phases else "the forward pass or the script's own work"
    return {DATA: "waiting for data", GC: "garbage collection", SAVE: "saves"}.get(phase, f"the {phase}")


def _longest_pause(state: State, ranks: Sequence[int]) -> str:
    longest_s = max((state.evidence.ranks[rank].gc_longest_s for rank in ranks), default=0.0)
    return f", the longest pause {_time(longest_s)}" if longest_s else ""


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
