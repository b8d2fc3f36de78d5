"""How long a step takes with optimizer and parameters in host memory: ours, and where it is installed DeepSpeed's.

    launch --num_gpus 2 benchmarks/offload_time.py [--rounds 15] [--model mlp] [--output FILE]

Everything else is as in step_time.py: copies of one model, the same batches, engines in turns in one job.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from common import machine_line, median, spread, table, write_page
from step_time import DEVICE, EngineLoop, build_model, make_batch, measure

import launcher

HOST = {"device": "cpu"}
# name -> (stage, what is offloaded); the first of a stage is what the others are compared with
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 2": (2, {}),
    "stage 2, optimizer offloaded": (2, {"offload_optimizer": HOST}),
    "stage 2, 0.4 of the optimizer offloaded": (2, {"offload_optimizer": {**HOST, "ratio": 0.4}}),
    "stage 3": (3, {}),
    "stage 3, optimizer and parameters offloaded": (3, {"offload_optimizer": HOST, "offload_param": HOST}),
}


def contestants(name: str) -> dict[str, EngineLoop]:
    """Build every engine around a copy of one model."""
    model = build_model(name).to(DEVICE)
    batch_size = len(make_batch(name, 0)[0])
    initializers = {"launch": launcher.initialize}
    try:
        import deepspeed

        initializers["DeepSpeed"] = deepspeed.initialize
    except ImportError:
        pass
    return {
        f"{maker} {setting}": EngineLoop(initialize, copy.deepcopy(model), batch_size, {"stage": stage, **zero})
        for maker, initialize in initializers.items()
        for setting, (stage, zero) in SETTINGS.items()
        if maker == "launch" or "ratio" not in str(zero)  # DeepSpeed has `ratio` at stage 3 only
    }


def section(name: str, rounds: int) -> str:
    """Measure one model and return its part of the page."""
    turns = measure(contestants(name), name, rounds)
    rows = []
    for maker in ("launch", "DeepSpeed"):
        for setting, (stage, _) in SETTINGS.items():
            own = turns.get(f"{maker} {setting}")
            if own is None:
                continue
            others = [turns[f"{maker} stage {stage}"], turns.get(f"DeepSpeed {setting}")]
            ratios = ["-" if other is None else f"{_ratio(own.wall_s, other.wall_s):.2f}" for other in others]
            milliseconds = [1e3 * value for value in own.wall_s]
            times = [f"{median(milliseconds):.1f} ms", spread(milliseconds)]
            rows.append([f"{maker} {setting}", *times, *ratios, f"{median(own.cpu_s):.2f} s", f"{own.loss:.7f}"])
    header = ["engine", "step", "quartiles", "over not offloaded", "over DeepSpeed's", "CPU", "last loss"]
    return f"### {name.upper()}\n\n{table(header, rows)}\n\n"


def _ratio(own: list[float], other: list[float]) -> float:
    """Return the median ratio of turns in the same round: they met the same moment of the machine."""
    return median([value / base for value, base in zip(own, other, strict=True)])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    part = section(options.model, options.rounds)
    if dist.get_rank() == 0:
        setting = (
            f"{dist.get_world_size()} ranks on {DEVICE.type}, {dist.get_backend()}, fp32,"
            f" OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '?')}, AdamW, no clipping."
            f" Medians of {options.rounds} rounds of 3 steps, engines in turns in one job; ratios are taken within a"
            " round.\n`launch --num_gpus 2 benchmarks/offload_time.py`."
        )
        text = f"## Offload to host memory\n\n{machine_line('torch', 'deepspeed')}\n{setting}\n\n{part}"
        write_page(text, options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
