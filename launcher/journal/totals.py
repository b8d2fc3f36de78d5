"""What a job has done in all, over all its starts: steps, tokens a second, MFU, energy, goodput. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from launcher.base.units import counted, format_count
from launcher.journal.evidence import Record, number
from launcher.journal.records import FORWARD, useful_phases

_MAX_PIECES = 4096


@dataclass(frozen=True)
class Training:
    """What the ranks of a job have trained."""

    num_steps: int
    steps_per_s: float
    samples_per_s: float | None  # of all ranks; None: not known
    tokens_per_s: float | None
    mfu: float | None
    joules_per_token: float | None
    goodput: float  # see `records.useful_phases`

    def text(self) -> str:
        """Return it as one line."""
        rate = f"{self.steps_per_s:.3g} steps/s"
        if self.tokens_per_s:
            rate = f"{format_count(self.tokens_per_s)} tokens/s"
        elif self.samples_per_s:
            rate = f"{format_count(self.samples_per_s)} samples/s"
        words = [counted(self.num_steps, "step"), rate]
        words += [] if self.mfu is None else [f"MFU {self.mfu:.1%}"]
        words += [] if self.joules_per_token is None else [f"{self.joules_per_token:.3g} J/token"]
        return " · ".join([*words, f"goodput {self.goodput:.0%}"])


@dataclass
class _Totals:
    """Of one rank."""

    num_steps: int = 0
    duration_s: float = 0.0
    samples: int = 0
    tokens: int = 0
    first_energy_j: float | None = None
    energy_j: float = 0.0  # of the starts before, and since the first sample of this one


@dataclass
class Totals:
    """Adds up the records of a job. One for all its starts; use from one thread."""

    _ranks: dict[int, _Totals] = field(default_factory=dict)
    _begun_s: float | None = None
    _now_s: float = 0.0
    _reference: int | None = None  # the rank whose time counts: the first that takes steps
    _pieces: list[tuple[int, int, float]] = field(
        default_factory=list
    )  # last step, how many, useful seconds; of all ranks
    _is_new_try: bool = True
    _step_flops: float = 0.0  # of a rank: one counts, for all
    _peak_flops: float = 0.0  # of a device, FLOP/s

    def feed(self, rank: int | None, record: Record) -> None:
        """Add a record of a rank; rank None: of the launcher."""
        kind, time_s = record["kind"], number(record, "time_s")
        self._now_s = max(self._now_s, time_s)
        if kind == "job" and rank is None:
            self._is_new_try = True
            self._begun_s = self._begun_s or time_s
            for each in self._ranks.values():
                each.first_energy_j = None
        elif rank is not None and kind == "step":
            self._add_step(rank, record)
        elif rank is not None and kind == "sample":
            self._add_energy(self._rank(rank), record)
        elif rank is not None and kind == "flops":
            self._step_flops = number(record, "flops") * (number(record, "micro_batches") or 1)
        elif rank is not None and kind == "engine":
            self._peak_flops = number(record, "peak_flops") or self._peak_flops

    def _rank(self, rank: int) -> _Totals:
        return self._ranks.setdefault(rank, _Totals())

    def _add_step(self, rank: int, record: Record) -> None:
        totals, num_steps, phases = self._rank(rank), number(record, "num_steps"), record.get("phases")
        duration_s = number(record, "duration_s")
        if not isinstance(phases, dict) or num_steps < 1 or duration_s <= 0:
            return
        totals.num_steps += num_steps
        totals.duration_s += duration_s
        totals.samples += number(record, "samples")
        totals.tokens += number(record, "tokens")
        self._reference = rank if self._reference is None else self._reference
        step = number(record, "step")
        if self._is_new_try:  # what it does again was of no use
            self._is_new_try = False
            self._pieces = [piece for piece in self._pieces if piece[0] <= step - num_steps]
        useful_s = sum(number(phases, name) for name in useful_phases(has_forward=FORWARD in phases))
        self._pieces.append((step, num_steps if rank == self._reference else 0, useful_s))
        if len(self._pieces) > _MAX_PIECES:
            pairs = zip(self._pieces[::2], self._pieces[1::2], strict=False)
            self._pieces = [(b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs] + self._pieces[len(self._pieces) & ~1 :]

    @staticmethod
    def _add_energy(totals: _Totals, record: Record) -> None:
        energy_j: Any = record.get("energy_j")
        if not isinstance(energy_j, (int, float)):
            return
        if totals.first_energy_j is not None:
            totals.energy_j += max(0.0, energy_j - totals.first_energy_j)
        totals.first_energy_j = energy_j

    def training(self) -> Training | None:
        """Return what was trained; None where no rank has told a step."""
        if self._reference is None:
            return None
        reference = self._ranks[self._reference]
        tokens, samples = (sum(getattr(each, name) for each in self._ranks.values()) for name in ("tokens", "samples"))
        energy_j = sum(each.energy_j for each in self._ranks.values())
        spent, peak = self._step_flops * reference.num_steps, self._peak_flops
        wall_s = max(self._now_s - (self._begun_s or self._now_s), reference.duration_s)
        return Training(
            num_steps=sum(piece[1] for piece in self._pieces),
            steps_per_s=reference.num_steps / reference.duration_s,
            samples_per_s=samples / reference.duration_s if samples else None,
            tokens_per_s=tokens / reference.duration_s if tokens else None,
            mfu=spent / (peak * reference.duration_s) if peak and spent else None,
            joules_per_token=energy_j / tokens if energy_j and tokens else None,
            goodput=min(1.0, sum(piece[2] for piece in self._pieces) / len(self._ranks) / wall_s),
        )
