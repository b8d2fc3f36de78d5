"""Every stage, precision, world size, accumulation and clipping beside a plain single-process loop.

    PYTHONPATH=tests python benchmarks/parity_table.py [--steps 30] [--worlds 1,2,4] [--stages 0,1,2,3] [--worst]
        [--output FILE]

The model has tied and frozen parameters, and in every other row parameters that its forward does not read. Runs are
held against the loop of tests/harness/parity.py, which trains on one process and adds in the order in which ranks and
micro-batches do: every bit should agree. fp32 runs also stand beside a loop that takes the whole batch at once, whose
sums round differently. fp16 runs use a loss scale that overflows several times. --worst prints one row for each
precision, stage and world size. Exits with 1 when a row is worse than its bound.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import machine_line, table, write_page
from harness.parity import (
    RESTLESS_SCALE,
    Case,
    train_engine,
    train_fp32,
    train_mixed,
    weight_distance,
    worst_relative,
)
from harness.ranks import run_on_ranks

PRECISIONS = ("fp32", "bf16", "fp16")
# Two plain fp32 loops that differ in the kernel of AdamW alone are 8e-7 apart after 30 steps.
WHOLE_BATCH_BOUND = 2e-6
MODELS = {False: "tied, frozen", True: "tied, frozen, unused"}


@dataclass(frozen=True)
class Row:
    """One run, or the worst of several."""

    case: Case
    world_size: int
    num_skipped: int
    losses: float
    weights: float
    whole_losses: float  # beside the whole batch at once; 0 where that is not compared
    whole_weights: float

    @property
    def is_good(self) -> bool:
        return self.losses == self.weights == 0.0 and max(self.whole_losses, self.whole_weights) <= WHOLE_BATCH_BOUND

    def cells(self, *, worst: bool) -> list[str]:
        """Return the row of the table."""
        case = self.case
        place = [case.precision, str(case.stage), str(self.world_size)]
        if not worst:
            place += [str(case.accumulation), f"{case.clipping:g}" if case.clipping else "off", MODELS[case.unused]]
        differences = [self.losses, self.weights, self.whole_losses, self.whole_weights]
        shown = [f"{value:.1e}" if value else "0" for value in differences]
        if case.precision != "fp32":
            shown[2:] = ["", ""]
        return [*place, str(self.num_skipped), *shown, "yes" if self.is_good else "**no**"]


def cases(stages: list[int], num_steps: int) -> Iterator[Case]:
    """Yield every row's case, without its world size."""
    choices = itertools.product(PRECISIONS, stages, (1, 3), (0.5, 0.0), MODELS)
    for precision, stage, accumulation, clipping, unused in choices:
        fp16 = RESTLESS_SCALE if precision == "fp16" else {}
        yield Case(stage, precision, accumulation, num_steps, clipping, unused=unused, fp16=fp16)


def compare(case: Case, world_size: int) -> Row:
    """Train both ways; return the largest relative difference of any loss and any final weight."""
    found, *others = run_on_ranks(world_size, train_engine, case)
    for other in others:
        if weight_distance(other.weights, found.weights) != 0.0:
            raise AssertionError(f"ranks differ: {case}")
    expected = train_mixed(case, world_size, found.grad_norms)
    if found.scales != expected.scales:
        raise AssertionError(f"loss scales differ: {case}")
    whole = (0.0, 0.0)
    if case.precision == "fp32":
        plain = train_fp32(case)
        whole = worst_relative(found.losses, plain.losses), weight_distance(found.weights, plain.weights)
    num_skipped = sum(not math.isfinite(norm) for norm in found.grad_norms)
    same = worst_relative(found.losses, expected.losses), weight_distance(found.weights, expected.weights)
    return Row(case, world_size, num_skipped, *same, *whole)


def worst_of(rows: list[Row]) -> Row:
    """Return the first row with the largest differences of all."""
    names = ("num_skipped", "losses", "weights", "whole_losses", "whole_weights")
    return replace(rows[0], **{name: max(getattr(row, name) for row in rows) for name in names})


def report(rows: list[Row], num_steps: int, took_s: float, *, worst: bool) -> str:
    """Return the section of docs/benchmarks.md."""
    names = ["precision", "stage", "ranks"] + ([] if worst else ["accumulation", "clipping", "model"])
    names += ["skipped", "losses", "weights", "losses, whole batch", "weights, whole batch", "within"]
    shown = rows
    if worst:
        by_place = itertools.groupby(rows, key=lambda row: (row.world_size, row.case.precision, row.case.stage))
        shown = [worst_of(list(together)) for _, together in by_place]
    num_bad = sum(not row.is_good for row in rows)
    texts = [
        "## Parity with a plain loop",
        machine_line("torch"),
        "Largest relative difference of any loss and of any final weight (2-norm) from a plain loop on one process "
        "that adds in the same order (bound: the same bits) and, in fp32, from one that takes the whole batch at once "
        f"(bound: {WHOLE_BATCH_BOUND:g}).",
        "Each row is the worst of accumulation 1 and 3, clipping at 0.5 and off, a model with tied and frozen "
        "parameters and one with unused ones too."
        if worst
        else "",
        table(names, [row.cells(worst=worst) for row in shown]),
        f"{len(rows)} runs of {num_steps} steps in {took_s:.0f} s; {num_bad} out of bounds. `skipped`: steps whose "
        "gradients overflowed, as the loss scale of these fp16 runs is made to do.",
    ]
    return "\n\n".join(text for text in texts if text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--worlds", default="1,2,4")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--worst", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as the ranks: with another number some of torch's sums run in another order
    stages, worlds = ([int(part) for part in text.split(",")] for text in (options.stages, options.worlds))
    begun_s = time.monotonic()
    rows = [compare(case, world_size) for world_size in worlds for case in cases(stages, options.steps)]
    text = report(rows, options.steps, time.monotonic() - begun_s, worst=options.worst)
    write_page(text, options.output)
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
