"""Every stage, precision, world size, accumulation and clipping beside a plain single-process loop.

    python benchmarks/parity_table.py [--steps 30] [--worlds 1,2,4] [--stages 0,1,2,3] [--worst]
        [--output FILE]

The model has tied and frozen parameters, and in every other row parameters that its forward does not read. Runs are
held against the loop of tests/harness/train/parity.py, which trains on one process and adds in the order in which ranks
and micro-batches do: every bit should agree. fp32 runs also stand beside a loop that takes the whole batch at once,
whose sums round differently. fp16 runs use a loss scale that overflows several times. --worst prints one row for each
precision, stage and world size. Exits with 1 when bits differ, or when the difference from the whole batch at once is
more than twice the goal: rounding alone may miss the goal, a wrong sum misses it by far.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from common import Goal, Section, argument_parser, goals_table, table
from harness.train.parity import (
    RESTLESS_SCALE,
    Case,
    largest,
    train_engine,
    train_fp32,
    train_mixed,
    weight_distance,
    worst_relative,
)
from harness.train.ranks import run_on_ranks

PRECISIONS = ("fp32", "bf16", "fp16")
WHOLE_BATCH_GOAL = 1e-6
WHOLE_BATCH_LIMIT = 2 * WHOLE_BATCH_GOAL
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
    def whole(self) -> float:
        """The larger difference from the loop that takes the whole batch at once."""
        return largest((self.whole_losses, self.whole_weights))

    @property
    def is_good(self) -> bool:
        """Whether the row is what the engine promises: the same bits, and no more than rounding beside them."""
        return self.losses == self.weights == 0.0 and self.whole <= WHOLE_BATCH_LIMIT

    @property
    def outcome(self) -> str:
        """What the row says of the two goals."""
        if not self.losses == self.weights == 0.0:
            return "**missed**: other bits"
        if self.whole > WHOLE_BATCH_GOAL:
            return f"**missed** by {self.whole - WHOLE_BATCH_GOAL:.1e}"
        return "met"

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
        return [*place, str(self.num_skipped), *shown, self.outcome]


def cases(stages: list[int], num_steps: int) -> Iterator[Case]:
    """Yield every row's case, without its world size."""
    choices = itertools.product(PRECISIONS, stages, (1, 3), (0.5, 0.0), MODELS)
    for precision, stage, accumulation, clipping, unused in choices:
        fp16 = RESTLESS_SCALE if precision == "fp16" else {}
        yield Case(stage, precision, accumulation, num_steps, clipping=clipping, unused=unused, fp16=fp16)


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
    return replace(rows[0], **{name: largest(getattr(row, name) for row in rows) for name in names})


def distance_of_plain_loops(num_steps: int) -> float:
    """Return how far two plain loops are apart that differ in torch's kernel of AdamW alone: what rounding does."""
    case = Case(0, "fp32", 1, num_steps, clipping=0.5)
    loop, fused = train_fp32(case, fused=False), train_fp32(case, fused=True)
    return largest((worst_relative(loop.losses, fused.losses), weight_distance(loop.weights, fused.weights)))


def goals(rows: list[Row], num_steps: int) -> list[Goal]:
    """Return what was asked of all rows together."""
    same = largest(value for row in rows for value in (row.losses, row.weights))
    found = [
        Goal("beside the loop that adds in the same order", "the same bits", f"{same:.1e}", same == 0.0, "other bits")
    ]
    apart = distance_of_plain_loops(num_steps)
    for world_size in sorted({row.world_size for row in rows}):
        ours = [row.whole for row in rows if row.world_size == world_size and row.case.precision == "fp32"]
        if ours:
            worst = largest(ours)
            why = (
                f"by {worst - WHOLE_BATCH_GOAL:.1e}; two plain loops with different AdamW kernels are {apart:.1e} apart"
            )
            name = f"beside the whole batch at once, fp32, {world_size} rank{'s' * (world_size > 1)}, {num_steps} steps"
            asked = f"at most {WHOLE_BATCH_GOAL:g} relative"
            found.append(Goal(name, asked, f"{worst:.1e}", worst <= WHOLE_BATCH_GOAL, why))
    return found


def report(rows: list[Row], num_steps: int, *, worst: bool) -> str:
    """Return the text of the section."""
    names = ["precision", "stage", "ranks"] + ([] if worst else ["accumulation", "clipping", "model"])
    names += ["skipped", "losses", "weights", "losses, whole batch", "weights, whole batch", "goals"]
    shown = rows
    if worst:
        by_place = itertools.groupby(rows, key=lambda row: (row.world_size, row.case.precision, row.case.stage))
        shown = [worst_of(list(together)) for _, together in by_place]
    texts = [
        "Largest relative difference of any loss and of any final weight (2-norm) from a plain loop on one process "
        "that adds in the same order\nand, in fp32, from one that takes the whole batch at once. The loop that adds in "
        "the same order checks the engine's gradient norms\nagainst its own to 1e-6 and then clips by the engine's: "
        "the last bit of a norm depends on the order of its sum.",
        goals_table(goals(rows, num_steps)),
        "Each row is the worst of accumulation 1 and 3, clipping at 0.5 and off, a model with tied and frozen "
        "parameters and one with unused\nones too."
        if worst
        else "",
        table(names, [row.cells(worst=worst) for row in shown]),
        "`skipped`: steps whose gradients overflowed, as the loss scale of these fp16 runs is made to do.",
    ]
    return "\n\n".join(text for text in texts if text)


def main() -> int:
    """Train everything and write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--worlds", default="1,2,4", help="numbers of ranks; default: %(default)s")
    parser.add_argument("--stages", default="0,1,2,3", help="default: %(default)s")
    parser.add_argument("--worst", action="store_true", help="one row for each precision, stage and world size")
    options = parser.parse_args()
    page = Section("Parity with a plain loop", "torch")
    torch.set_num_threads(1)  # as the ranks: with another number some of torch's sums run in another order
    stages, worlds = ([int(part) for part in text.split(",")] for text in (options.stages, options.worlds))
    begun_s = time.monotonic()
    rows = [compare(case, world_size) for world_size in worlds for case in cases(stages, options.steps)]
    samples = f"{len(rows)} runs of {options.steps} steps in {time.monotonic() - begun_s:.0f} s; no figure is a time"
    page.write(samples, report(rows, options.steps, worst=options.worst), options.output)
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
