"""Settings tried in short real runs: what one run has found, which micro-batch is the largest, which setting is best.

A trial is a job of its own: the user's script under a patch of its config, for a few optimizer steps.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from launcher.planner.speed import kept_file

MARK = "@launch-trial "  # of the line of a rank's output that holds its report
FACTORS = "factors"  # kind of the file that keeps them
UNKNOWN_PHASE = "an unknown phase"  # of a rank that was killed
QUICKER = 1.02  # than the script's own config: less may be noise, and is no reason to change a config
_LEAST_OWN_SHARE = 1e-3  # of a part's seconds that the other parts do not explain: less determines no factor
_MOST_SWEEPS, _CONVERGED = 10_000, 1e-12


@dataclass(frozen=True)
class Trial:
    """A setting to be tried."""

    label: str
    patch: Mapping[str, Any]  # of the script's config; {}: as it is
    micro_batch: int
    accumulation: int
    predicted_bytes: int | None = None
    predicted_s: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # of predicted_s, such as "compute"


@dataclass(frozen=True)
class Outcome:
    """What a trial has come to: a time, or a reason for there being none."""

    trial: Trial
    step_s: float | None = None  # of an optimizer step; the slowest rank counts
    peak_bytes: int | None = None  # of the rank that needs most
    oom_phase: str | None = None  # in which a rank had no memory left
    refused: str | None = None  # why the engine does not run the setting

    def samples_per_s(self, data_ranks: int) -> float:
        """Return how many samples all ranks train on in a second, 0 where there was no step."""
        if not self.step_s:
            return 0.0
        return self.trial.micro_batch * self.trial.accumulation * data_ranks / self.step_s


@dataclass(frozen=True)
class ConfigFacts:
    """What an engine of a script was asked for."""

    stage: int
    optimizer: str  # where it is: none, cpu or nvme
    param: str
    micro_batch: int
    accumulation: int
    data_ranks: int
    has_pipeline: bool
    keeps_batch: bool  # the config has `train_batch_size`


@dataclass
class RankTrial:
    """What one rank has found."""

    rank: int
    node: int
    host: str
    device: str
    facts: ConfigFacts | None = None  # None: no engine was asked for
    steps_s: list[float] = field(default_factory=list)  # of each optimizer step after the first
    peak_bytes: int = 0  # allocated on the device; on a CPU, resident beyond what there was before the script
    reserved_bytes: int | None = None  # of the device, by torch's allocator
    oom_phase: str | None = None
    refused: str | None = None
    has_loader: bool = False  # the engine makes the batches
    input_shape: list[int] | None = None  # of the first tensor that the engine's first forward got

    def as_line(self) -> str:
        """Return everything as the line of a rank's output that `reports_in` finds."""
        return f"{MARK}{json.dumps(asdict(self))}"


def reports_in(texts: Iterable[str]) -> list[RankTrial]:
    """Return what ranks have reported in their outputs, by rank. A line that was cut is left out."""
    found = []
    for line in (line for text in texts for line in text.splitlines() if line.startswith(MARK)):
        try:
            values = json.loads(line.removeprefix(MARK))
        except ValueError:
            continue
        facts = values.pop("facts")
        found.append(RankTrial(**values, facts=None if facts is None else ConfigFacts(**facts)))
    return sorted(found, key=lambda each: each.rank)


def outcome_of(trial: Trial, reports: Sequence[RankTrial]) -> Outcome:
    """Return what the reports of all ranks together say. A rank out of memory comes before what that did to others."""
    peak_bytes = max((each.peak_bytes for each in reports), default=None)
    oom_phase = next((each.oom_phase for each in reports if each.oom_phase is not None), None)
    refused = next((each.refused for each in reports if each.refused is not None), None)
    if oom_phase is not None or refused is not None:
        return Outcome(trial, None, peak_bytes, oom_phase, None if oom_phase is not None else refused)
    slowest_s = [max(times) for times in zip(*(each.steps_s for each in reports), strict=False)]
    return Outcome(trial, statistics.median(slowest_s) if slowest_s else None, peak_bytes)


def repeated(first: Outcome, again: Outcome) -> Outcome:
    """Return what two runs of a trial together say: the quicker one, as load of others only adds; or why one failed."""
    failed = next((each for each in (first, again) if each.step_s is None), None)
    return failed or min(first, again, key=lambda each: each.step_s or 0.0)


def best(outcomes: Sequence[Outcome], data_ranks: int) -> Outcome | None:
    """Return the quickest, or the first where none is more than 2 % quicker: the script's own. None: none ran."""
    ran = [each for each in outcomes if each.step_s]
    if not ran:
        return None
    quickest = max(ran, key=lambda each: each.samples_per_s(data_ranks))
    own = outcomes[0]
    return quickest if quickest.samples_per_s(data_ranks) > QUICKER * own.samples_per_s(data_ranks) else own


# ---- The largest micro-batch ----


def micro_batches(most: int, samples_per_rank: int | None) -> list[int]:
    """Return the micro-batches from 1 to `most`, the smallest first.

    samples_per_rank: of an optimizer step, where that is to stay as it is: the divisors of it alone.
    """
    return [size for size in range(1, most + 1) if samples_per_rank is None or samples_per_rank % size == 0]


def with_micro_batch(micro_batch: int, facts: ConfigFacts) -> tuple[dict[str, Any], int]:
    """Return the patch for a micro-batch, and its accumulation steps.

    Where the config has `train_batch_size`, that stays the product exactly; else the accumulation stays as it is.
    """
    accumulation = facts.accumulation
    if facts.keeps_batch:
        accumulation = facts.micro_batch * facts.accumulation // micro_batch
    keys = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": accumulation}
    return keys, accumulation


def most_trials(num_allowed: int) -> int:
    """Return the most trials that halving takes, until the largest of so many values that fits is known, or none is."""
    return math.ceil(math.log2(num_allowed + 1))


def is_followed(one: RankTrial, other: RankTrial) -> bool | None:
    """Whether a script makes its batches as large as the config says, by two trials of different micro-batches.

    None: one of them got to no forward that would show it.
    """
    if one.has_loader or other.has_loader:
        return True
    if one.facts is None or other.facts is None or one.input_shape is None or other.input_shape is None:
        return None
    ratio = (one.facts.micro_batch, other.facts.micro_batch)
    sizes = zip(one.input_shape, other.input_shape, strict=False)
    return any(size * ratio[1] == its * ratio[0] for size, its in sizes if size)


# ---- What measured times say of predicted ones ----


@dataclass(frozen=True)
class Factors:
    """What predicted seconds are to be multiplied with, on the machines where they were measured."""

    measured: str  # date and time, UTC
    common: float  # of parts that have none of their own
    by_part: dict[str, float] = field(default_factory=dict)
    num_outcomes: int = 0

    def of(self, part: str) -> float:
        """Return the factor of a part."""
        return self.by_part.get(part, self.common)

    def seconds(self, parts: Mapping[str, float]) -> float:
        """Return the seconds of a step whose parts are predicted."""
        return sum(self.of(name) * seconds for name, seconds in parts.items())

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> Factors:
        """Return what `as_json` has made."""
        return cls(**json.loads(text))


def kept_factors(key: str) -> Factors | None:
    """Return what was learnt on a set of machines, by `Speed.key`; None where nothing was, or it cannot be read."""
    path = kept_file(key, FACTORS)
    try:
        return None if path is None else Factors.from_json(path.read_text())
    except (OSError, ValueError, TypeError):
        return None


def learned(outcomes: Iterable[Outcome], measured: str) -> Factors | None:
    """Return what makes the predictions fit the measured steps, None without a step that was predicted.

    Least squares of the relative error. One factor for each part, none below 0, where there are more outcomes than
    parts and these tell the parts apart; else one for all.
    """
    known = [(each.trial.parts, each.step_s) for each in outcomes if each.step_s and sum(each.trial.parts.values()) > 0]
    if not known:
        return None
    totals = [sum(parts.values()) / step_s for parts, step_s in known]
    common = sum(totals) / sum(total * total for total in totals)
    names = sorted({name for parts, _ in known for name, seconds in parts.items() if seconds > 0})
    rows = [[parts.get(name, 0.0) / step_s for name in names] for parts, step_s in known]
    by_part = {}
    if len(names) > 1 and len(rows) > len(names):
        by_part = dict(zip(names, _factors_of(rows) or [], strict=False))
    return Factors(measured, common, by_part, len(known))


def _factors_of(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Return x >= 0 for which all `rows · x` are nearest to 1; None where the rows do not determine it."""
    columns = list(zip(*rows, strict=True))
    norms = [math.sqrt(sum(value * value for value in column)) for column in columns]
    units = [[value / norm for value in column] for column, norm in zip(columns, norms, strict=True)]
    gram = [[_dot(one, other) for other in units] for one in units]
    if not _is_determined(gram):
        return None
    wanted = [sum(unit) for unit in units]
    found = [0.0] * len(units)
    # Coordinate descent: each value in turn is the best one for the others. It converges, as the rows are independent.
    for _ in range(_MOST_SWEEPS):
        change = 0.0
        for place, row in enumerate(gram):
            value = max(0.0, found[place] + (wanted[place] - _dot(row, found)) / row[place])
            change, found[place] = max(change, abs(value - found[place])), value
        if change < _CONVERGED:
            break
    return [value / norm for value, norm in zip(found, norms, strict=True)]


def _is_determined(gram: Sequence[Sequence[float]]) -> bool:
    """Whether no unit vector lies nearly in the span of those before it: by Cholesky's pivots of their products."""
    lower: list[list[float]] = []
    for place, row in enumerate(gram):
        values: list[float] = []
        for before in range(place):
            values.append((row[before] - _dot(values, lower[before])) / lower[before][before])
        pivot = row[place] - _dot(values, values)
        if pivot < _LEAST_OWN_SHARE:
            return False
        lower.append([*values, math.sqrt(pivot)])
    return True


def _dot(one: Iterable[float], other: Iterable[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=False))
