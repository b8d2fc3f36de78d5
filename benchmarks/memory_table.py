"""Model-state bytes a rank, counted at every phase of a step, beside the planner's formula.

    python benchmarks/memory_table.py [--worlds 2,4] [--precisions fp32,bf16,fp16] [--output FILE]

Counted is what the engine allocates: the storages of parameters, gradients, master weights and optimizer states, and
the memory its buffer pool has lent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from common import Goal, Section, argument_parser, goals_table, table
from harness.train.ranks import run_on_ranks
from torch import nn

from launcher.config.load import load_config
from launcher.config.policies import DType
from launcher.planner.memory import RankMemory, rank_memory
from launcher.planner.model import ModelFacts, Parameter
from launcher.planner.settings import setting_of
from launcher.zero.states import TORCH_DTYPES

WIDTH, NUM_BLOCKS, STEPS = 600, 16, 3
BLOCK_NUMEL = WIDTH * WIDTH + WIDTH  # the bound of units: blocks are not joined
PHASES = ("initialized", "after forward", "after backward", "after step")


def build() -> nn.Module:
    """Return equal blocks and nothing else."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)))


def config_for(stage: int, precision: str) -> dict[str, Any]:
    """Return the config of one row: of its engine and of the planner."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BLOCK_NUMEL,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            "stage3_max_reuse_distance": 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    return found if precision == "fp32" else found | {precision: {"enabled": True}}


def measure(rank: int, world_size: int, stage: int, precision: str) -> dict[str, Any]:
    """Return the counted bytes at each phase of the last step, and the most that was in flight at once."""
    import launcher

    engine, optimizer, _, _ = launcher.initialize(model=build(), config=config_for(stage, precision))
    buffers = engine._parts.group.buffers

    def counted() -> int:
        tensors = [
            value
            for unit in engine._sharded.units
            for part in (unit.params, unit.grads._local, unit.grads._sum)
            for value in vars(part).values()
            if isinstance(value, torch.Tensor)
        ]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values()) + 4 * optimizer.flat.state_numel()

    found: dict[str, Any] = {"initialized": counted()}
    x = torch.ones(2, WIDTH, dtype=TORCH_DTYPES[engine._parts.policy.precision.param])
    for _ in range(STEPS):
        buffers.peak_bytes = 0
        engine._sharded.schedule.peak_live_numel = 0
        loss = engine(x).float().square().mean()
        engine.synchronize_parameters()
        found["after forward"] = counted()
        engine.backward(loss)
        engine._sharded.reducer.wait()
        found["after backward"] = counted()
        engine.step()
        engine.synchronize_parameters()
        found["after step"] = counted()
    found["peak in flight"] = buffers.peak_bytes
    found["peak whole"] = engine._sharded.schedule.peak_live_numel / max(u.numel for u in engine._sharded.units)
    return found


@dataclass(frozen=True)
class Row:
    """What one rank held, beside what the planner says."""

    stage: int
    precision: str
    world_size: int
    planned: RankMemory
    num_params: int
    found: dict[str, Any]  # of `measure`

    def over(self, phase: str) -> float:
        """Return by which part the rank holds more than the formula at a phase."""
        states = self.planned.model_states
        if phase == "initialized":  # there are no optimizer states before the first step
            states -= 8 * self.num_params // (self.world_size if self.stage else 1)
        return float(self.found[phase]) / states - 1

    @property
    def unit_bytes(self) -> int:
        """The bytes of one whole unit of parameters."""
        return BLOCK_NUMEL * DType(self.precision).itemsize

    @property
    def units_in_flight(self) -> float:
        """The most that was in flight, in units of parameters."""
        return float(self.found["peak in flight"]) / self.unit_bytes

    def cells(self) -> list[str]:
        """Return the row of the table."""
        over = [f"{100 * self.over(phase):+.1f} %" for phase in PHASES]
        peak, bound = self.found["peak in flight"] / 2**20, self.planned.in_flight / 2**20
        whole = f"{self.found['peak whole']:.0f} units" if self.stage == 3 else "all"
        states = f"{self.planned.model_states / 2**20:.1f} MiB"
        place = [f"{self.stage}", self.precision, f"{self.world_size}"]
        return [*place, states, *over, f"{peak:.1f} of {bound:.1f} MiB, {self.units_in_flight:.1f} units", whole]


def goals(rows: list[Row]) -> list[Goal]:
    """Return what was asked of all rows together."""
    found = []
    for stages in ((0, 1, 2), (3,)):
        for phase in PHASES:
            own = [row for row in rows if row.stage in stages]
            worst = max(own, key=lambda row: row.over(phase))
            least, most = min(row.over(phase) for row in own), worst.over(phase)
            units = (worst.found[phase] - worst.planned.model_states) / worst.unit_bytes
            why = (
                f"{units:.1f} units are whole then: the last one is kept because backward reads it first, "
                "and the one before it is fetched ahead"
            )
            name = f"stage{'s 0 to 2' if len(stages) > 1 else ' 3'}, {phase}"
            asked, measured = "within 2 % of the formula", f"{100 * least:+.1f} to {100 * most:+.1f} %"
            found.append(Goal(name, asked, measured, max(-least, most) <= 0.02, why))
    for world_size in sorted({row.world_size for row in rows}):
        sharded = [row for row in rows if row.stage == 3 and row.world_size == world_size]
        most = max(row.units_in_flight for row in sharded)
        whole = max(row.found["peak whole"] for row in sharded)
        why = f"parameters of {whole:.0f} units are whole, gradients of others are on their way to their owners"
        name = f"stage 3, {world_size} ranks, peak"
        found.append(Goal(name, "formula + 2 units", f"formula + {most:.1f} units", most <= 2.0, why))
    return found


def measure_all(worlds: list[int], precisions: list[str]) -> list[Row]:
    """Return a row for each world size, precision and stage: that of its rank with the most."""
    params = tuple(Parameter(name, param.numel()) for name, param in build().named_parameters())
    model = ModelFacts("blocks", "", params)
    rows = []
    for world_size in worlds:
        for precision in precisions:
            for stage in (0, 1, 2, 3):
                setting = setting_of(load_config(config_for(stage, precision)).config, world_size)
                planned = rank_memory(model, setting, world_size)
                found = max(run_on_ranks(world_size, measure, stage, precision), key=lambda one: one["after step"])
                rows.append(Row(stage, precision, world_size, planned, model.num_params, found))
    return rows


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--worlds", default="2,4", help="numbers of ranks; default: %(default)s")
    parser.add_argument("--precisions", default="fp32,bf16,fp16", help="default: %(default)s")
    options = parser.parse_args()
    page = Section("Memory of model states", "torch")
    rows = measure_all([int(text) for text in options.worlds.split(",")], options.precisions.split(","))
    header = ["stage", "precision", "ranks", "formula", *PHASES, "in flight, of at most", "whole at once"]
    text = (
        f"{NUM_BLOCKS} equal blocks, {rows[0].num_params / 1e6:.1f} M parameters, AdamW, a unit a block. Counted"
        " allocations of a rank over the planner's formula\nat each phase; the most that was in flight (whole units,"
        " gradients on their way) beside the planner's bound, and in units of\nparameters; parameters whole at once."
        f"\n\n{goals_table(goals(rows))}\n\n{table(header, [row.cells() for row in rows])}"
    )
    page.write("Bytes are counted, once each", text, options.output)


if __name__ == "__main__":
    main()
