"""Faults that `--fault` rehearses: their kinds, and what the option's text means."""

from __future__ import annotations

from launcher.base.record import Record

PREEMPT = "preempt"
KINDS = {
    "kill": "the rank is killed by SIGKILL",
    "hang": "its main thread stops for good",
    "slow": "each following step takes twice its time",
    "diskfull": "its files cannot grow beyond 4 KiB from then on: saves fail with `File too large`",
    PREEMPT: "the job gets the notice of preemption, as from a scheduler",
    "input": "each following batch comes a step's time late",
    "gc": "each following step has pauses of the garbage collector as long as itself",
    "nan": "the output of a module is NaN in the next forward",
}


class Fault(Record):
    """One fault."""

    kind: str
    step: int  # after which it is done
    rank: int | None = None  # None: the last one

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}" + ("" if self.rank is None else f":{self.rank}")


def parse_fault(text: str) -> Fault:
    """Return what `kill@20:1` means. Raises: ValueError."""
    kind, at, rest = text.partition("@")
    step, colon, rank = rest.partition(":")
    if kind not in KINDS:
        raise ValueError(f"there is no fault {kind!r:.40}: it is one of {', '.join(KINDS)}")
    is_number = [part.isascii() and part.isdigit() and len(part) < 16 for part in (step, rank if colon else "0")]
    if not at or not all(is_number) or int(step) < 1:
        raise ValueError(f"expected {kind}@STEP or {kind}@STEP:RANK, such as {kind}@20:1, got {text!r:.80}")
    return Fault(kind, int(step), int(rank) if colon else None)
