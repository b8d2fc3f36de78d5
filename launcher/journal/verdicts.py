"""What is wrong with a run, with the evidence and the next step: rules over the records of its journal.

Fed record by record, it is the same engine in the launcher while a job runs and over a journal that is complete. What
takes time from steps has to show in several windows in a row (`evidence`): below 5 % of an iteration it is nothing,
from 10 % a warning, from 20 % critical. No rule names a rank by how long it waits: who waits is a victim. No torch.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from launcher.journal.checks import DEADBAND, LOOKS, RULES, WINDOW_CHECKS, Finding, Rule, State
from launcher.journal.evidence import RankEvidence, Record, Window, median

_GONE_AFTER = 3  # windows in which it is not so
_FORMING = 3  # windows in which it is so: what it may explain waits
_SEVERITIES = ("warning", "critical")


Key = tuple[str, "int | None", "str | None"]


@dataclass(frozen=True)
class Verdict:
    """One thing that is wrong."""

    name: str  # of the rule
    severity: str  # "warning" or "critical"
    text: str  # one sentence with the evidence
    next: str  # what to do
    rank: int | None = None  # None: it is about no single rank
    host: str | None = None
    since_step: int | None = None
    share: float | None = None  # of an iteration; None: it is no matter of time
    until_step: int | None = None  # when it was gone; None: it still is so

    @property
    def key(self) -> Key:
        """What tells two verdicts apart."""
        return self.name, self.rank, self.host

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `verdict` record."""
        return asdict(self)


@dataclass
class _Case:
    """What is, or may become, a verdict."""

    rule: Rule
    since_step: int | None
    shares: deque[float] = field(default_factory=deque)  # of the windows in a row, as they are judged
    raw: deque[float] = field(default_factory=deque)  # and as they are told
    last: Finding | None = None
    num_missed: int = 0
    severity: str | None = None  # None: not a verdict yet

    def add(self, finding: Finding) -> None:
        """Take what another window has found."""
        self.num_missed, self.last = 0, finding
        self.shares.append(finding.share)
        if finding.raw is not None:
            self.raw.append(finding.raw)
        if len(self.shares) < self.rule.num_windows:
            return
        middle = median(self.shares)
        severity = "critical" if middle >= self.rule.critical else "warning" if middle >= self.rule.warning else None
        if severity == "critical" or self.severity is None:  # it does not get milder while it holds
            self.severity = severity or self.severity

    def verdict(self) -> Verdict:
        """Return it in words."""
        finding, rule = self.last, self.rule
        assert finding is not None
        share = median(self.raw) if self.raw else None
        facts = {**finding.facts, "percent": f"{share or 0.0:.0%}"}
        return Verdict(
            rule.name,
            self.severity or "warning",
            rule.sentence.format_map(facts),
            rule.next,
            finding.rank,
            finding.host,
            finding.step or self.since_step,
            None if share is None else round(share, 4),
        )


class Verdicts:
    """The verdicts on one start of a job. Use from one thread."""

    def __init__(self) -> None:
        self._state = State()
        self._cases: dict[Key, _Case] = {}  # of windows
        self._held: dict[Key, Verdict] = {}  # as they were last told
        self._over: dict[Key, Verdict] = {}
        self._step = 0

    def feed(self, rank: int | None, record: Record) -> None:
        """Add a record of a rank's journal; rank None: of the launcher's. Fields that are not as they should be count
        as none.
        """
        add = (_OF_LAUNCHER if rank is None else _OF_RANKS).get(record["kind"])
        if add is None:
            return
        time_s = record.get("time_s")
        if isinstance(time_s, (int, float)):
            self._state.evidence.now_s = max(self._state.evidence.now_s, time_s)
        try:
            window = add(self._state, rank, record)
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
        ):  # a record of another version, or of a script
            return
        if window is not None:
            self._judge(window)

    def current(self, now_s: float | None = None) -> list[Verdict]:
        """Return what is wrong now, the worst first. now_s: seconds since the epoch; None: that of the last record."""
        now_s = self._state.evidence.now_s if now_s is None else now_s
        self._state.evidence.looked_s = now_s
        found = {key: case.verdict() for key, case in self._cases.items() if case.severity is not None}
        for look in LOOKS:
            for finding in look(self._state, now_s):
                case = _Case(replace(RULES[finding.rule], num_windows=1), finding.step)
                case.add(finding)
                if case.severity is not None:
                    since = self._held.get((finding.rule, finding.rank, finding.host))
                    verdict = case.verdict()
                    step = verdict.since_step or (self._step if since is None else since.since_step)
                    found[verdict.key] = replace(verdict, since_step=step)
        forming = {case.rule.name for case in self._cases.values() if len(case.shares) >= _FORMING}
        names = {key[0] for key in found} | forming
        found = {key: each for key, each in found.items() if not names & {*RULES[each.name].yields_to}}
        for key, each in self._held.items():
            if key not in found:
                self._over[key] = replace(each, until_step=self._step)
        self._held = found
        return sorted(found.values(), key=_order)

    def gone(self, key: Key) -> Verdict | None:
        """Return a verdict that is no longer so."""
        return self._over.get(key)

    def all(self, now_s: float | None = None) -> list[Verdict]:
        """Return what is wrong, and behind it what was and is gone."""
        current = self.current(now_s)
        return current + sorted((each for key, each in self._over.items() if key not in self._held), key=_order)

    def _judge(self, window: Window) -> None:
        self._step = max(self._step, window.last_step)
        found: dict[Key, Finding] = {}
        for check in WINDOW_CHECKS:
            for finding in check(self._state, window):
                key = finding.rule, finding.rank, finding.host
                if finding.share >= DEADBAND and (key not in found or found[key].share < finding.share):
                    found[key] = finding
        self._state.add(window)
        for key in [key for key in self._cases if key not in found]:
            case = self._cases[key]
            case.num_missed += 1
            if case.num_missed >= (_GONE_AFTER if case.severity else 2 if len(case.shares) >= _FORMING else 1):
                del self._cases[key]
        for key, finding in found.items():
            case = self._cases.get(key) or self._cases.setdefault(key, self._new_case(finding, window))
            case.add(finding)

    @staticmethod
    def _new_case(finding: Finding, window: Window) -> _Case:
        rule = RULES[finding.rule]
        case = _Case(rule, finding.step or window.first_step)
        case.shares, case.raw = deque(maxlen=rule.num_windows), deque(maxlen=rule.num_windows)
        return case


def _order(verdict: Verdict) -> tuple[int, float]:
    return -_SEVERITIES.index(verdict.severity), -(verdict.share if verdict.share is not None else math.inf)


# ---- What each kind of record adds ----


def _add_job(state: State, _rank: int | None, record: Record) -> None:
    evidence = state.evidence
    evidence.world_size = int(record["world_size"])
    evidence.hosts = {rank: str(host["name"]) for host in record["hosts"] for rank in host["ranks"]}
    for number, rank in evidence.ranks.items():
        rank.host = evidence.hosts.get(number, "")


def _add_progress(state: State, _rank: int | None, record: Record) -> None:
    for number, heartbeats, step, _loss, phase, *_ in record["ranks"]:
        rank = state.evidence.rank(number)
        beats = heartbeats or step
        if beats is not None and beats != rank.beats:
            rank.beats, rank.moved_s = beats, float(record["time_s"])
        rank.phase = phase or ""


def _add_exit(state: State, _rank: int | None, record: Record) -> None:
    state.evidence.rank(record["rank"]).is_over = True


def _add_raised(state: State, _rank: int | None, record: Record) -> None:
    text = f"{record['type']}: {record['message'] or ''}".splitlines()[0]
    state.raised.setdefault(record["rank"], text[:200].removesuffix(": "))


def _add_end(state: State, _rank: int | None, record: Record) -> None:
    state.ended = record


def _add_step(state: State, number: int | None, record: Record) -> Window | None:
    assert number is not None
    _check_step(record)
    rank = state.evidence.rank(number)
    rank.record_s = float(record["duration_s"])
    loss, norm, step = record.get("loss"), record.get("norm"), int(record["step"])
    scale = record.get("loss_scale")
    rank.loss_scale = scale if isinstance(scale, (int, float)) else None
    rank.largest_scale = max(rank.largest_scale, rank.loss_scale or 0.0)
    is_scaled = rank.loss_scale is not None and bool(record.get("skipped"))  # then an overflow is no fault
    is_finite = not isinstance(loss, str) and (not isinstance(norm, str) or is_scaled)
    if not is_finite:
        _note_nonfinite(state, rank, record, "loss" if isinstance(loss, str) else "norm")
    elif loss is not None or norm is not None:
        rank.num_finite += 1
        rank.finite_step = step
        if isinstance(loss, (int, float)):
            rank.losses.add(step, loss)
    return state.evidence.add_step(number, record)


def _check_step(record: Record) -> None:
    """Raises: ValueError for a record that no step has written."""
    values = [record["duration_s"], record["num_steps"], *record["phases"].values(), record.get("memory_bytes") or 0]
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
        raise ValueError("a number is none")
    if record["duration_s"] <= 0 or record["num_steps"] < 1:
        raise ValueError("a record of no step")


def _note_nonfinite(state: State, rank: RankEvidence, record: Record, what: str) -> None:
    """Note that a loss or a norm was not finite. The first time counts, until it is finite again."""
    if rank.nonfinite is None or rank.num_finite:
        rank.nonfinite, rank.last_finite = (
            (int(record["step"]), what),
            int(record.get("last_finite") or rank.finite_step),
        )
        # The clock of the rank's host may be another one.
        looked_s = state.evidence.looked_s
        rank.nonfinite_s = float(record["time_s"]) if looked_s is None else looked_s
    rank.num_finite = 0


def _add_nonfinite(state: State, number: int | None, record: Record) -> None:
    assert number is not None
    rank = state.evidence.rank(number)
    if record.get("module"):
        kind = "the gradient of" if record["what"] == "gradient" else "module"
        rank.modules.append((int(record["step"]), f"{kind} {record['module']}"))
    else:
        _note_nonfinite(state, rank, record, str(record["what"]))


def _add_save(state: State, number: int | None, record: Record) -> None:
    assert number is not None
    rank = state.evidence.rank(number)
    rank.saves.append((float(record["time_s"]), float(record["duration_s"])))


def _add_sample(state: State, number: int | None, record: Record) -> None:
    assert number is not None
    rank = state.evidence.rank(number)
    before, rank.last_sample = rank.last_sample, record
    rank.clock_phase = str(record.get("phase") or "")
    rank.gc_longest_s = float(record.get("gc_longest_s") or 0.0)
    throttled = record.get("throttled")
    rank.throttled = (rank.throttled[0] + 1, str(throttled)) if throttled else (0, "")
    waited_s, then_s = record.get("cpu_wait_s"), (before or {}).get("cpu_wait_s")
    passed_s = float(record["time_s"]) - float((before or record)["time_s"])
    if isinstance(waited_s, (int, float)) and before is None:
        rank.waits_for_cpu = None
    if isinstance(waited_s, (int, float)) and isinstance(then_s, (int, float)) and passed_s > 0:
        rank.waits_for_cpu = min(1.0, max(0.0, waited_s - then_s) / passed_s)


_OF_LAUNCHER = {
    "job": _add_job, "progress": _add_progress, "exit": _add_exit, "raised": _add_raised, "end": _add_end,
}  # fmt: skip
_OF_RANKS = {"step": _add_step, "nonfinite": _add_nonfinite, "save": _add_save, "sample": _add_sample}
