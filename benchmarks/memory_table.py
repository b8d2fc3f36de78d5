"""Model-state bytes a rank, counted at every phase of a step, beside the planner's formula.

    PYTHONPATH=.:tests python benchmarks/memory_table.py

Counted is what the engine allocates: the storages of parameters, gradients, master weights and optimizer states, and
the memory its buffer pool has lent. Prints a section of docs/benchmarks.md.
"""

from __future__ import annotations

from typing import Any

import torch
from common import machine_line, table
from harness.ranks import run_on_ranks
from torch import nn

from launcher.planner.memory import Precision, Setting, rank_memory
from launcher.planner.model import ModelFacts, Parameter

WIDTH, NUM_BLOCKS, STEPS = 600, 16, 3
BLOCK_NUMEL = WIDTH * WIDTH + WIDTH  # the bound of units: blocks are not joined
PHASES = ("initialized", "after forward", "after backward", "after step")


def build() -> nn.Module:
    """Return equal blocks and nothing else."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)))


def measure(rank: int, world_size: int, stage: int, precision: str) -> dict[str, Any]:
    """Return the counted bytes at each phase of the last step, and the most that was in flight at once."""
    import launcher

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        precision: {"enabled": True} if precision != "fp32" else {},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BLOCK_NUMEL,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            "stage3_max_reuse_distance": 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    config.pop("fp32", None)
    engine, optimizer, _, _ = launcher.initialize(model=build(), config=config)
    buffers = engine._parts.group.buffers

    def counted() -> int:
        tensors = [
            value
            for unit in engine._sharded.units
            for part in (unit.params, unit.grads)
            for value in vars(part).values()
            if isinstance(value, torch.Tensor)
        ]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values()) + 4 * optimizer.optimizer.state_numel()

    found: dict[str, Any] = {"initialized": counted()}
    x = torch.ones(2, WIDTH, dtype=engine._parts.policy.precision.param_dtype)
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


def main() -> None:
    """Measure and print."""
    model = ModelFacts("blocks", "", tuple(Parameter(n, p.numel()) for n, p in build().named_parameters()))
    rows = []
    for world_size in (2, 4):
        for precision in ("fp32", "bf16", "fp16"):
            for stage in (0, 1, 2, 3):
                sizes = {"max_unit_numel": BLOCK_NUMEL, "prefetch_numel": WIDTH * WIDTH, "kept_numel": 0}
                setting = Setting(stage, Precision.of(precision), persistent_numel=0, **sizes)
                planned = rank_memory(model, setting, world_size)
                found = max(run_on_ranks(world_size, measure, stage, precision), key=lambda one: one["after step"])
                states = planned.model_states
                # Before the first step there are no optimizer states yet.
                without = states - 8 * model.num_params // (world_size if stage else 1)
                over = [f"{100 * (found[phase] / states - 1):+.1f} %" for phase in PHASES[1:]]
                over.insert(0, f"{100 * (found['initialized'] / without - 1):+.1f} %")
                in_flight = f"{found['peak in flight'] / 2**20:.1f} of {planned.in_flight / 2**20:.1f} MiB"
                whole = f"{found['peak whole']:.0f} units" if stage == 3 else "all"
                rows.append(
                    [f"{stage}", precision, f"{world_size}", f"{states / 2**20:.1f} MiB", *over, in_flight, whole]
                )
    print("## Memory of model states\n")
    print(machine_line("torch"))
    print(
        f"{NUM_BLOCKS} equal blocks, {model.num_params / 1e6:.1f} M parameters, AdamW. Counted allocations of a rank"
        " over the planner's formula,\nat each phase; the most that was in flight (whole units, gradients on their way)"
        " beside the planner's bound;\nparameters whole at once."
        " `PYTHONPATH=.:tests python benchmarks/memory_table.py`.\n"
    )
    header = ["stage", "precision", "ranks", "formula", *PHASES, "in flight, of at most", "whole at once"]
    print(table(header, rows) + "\n")


if __name__ == "__main__":
    main()
