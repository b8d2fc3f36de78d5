"""How long a step takes with optimizer and parameters in host memory: ours, and where it is installed DeepSpeed's.

    launch --num_gpus 2 benchmarks/offload_time.py [--rounds 15] [--model mlp] [--output FILE]

Everything else is as in step_time.py: copies of one model, the same batches, engines in turns in one job.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from common import NOT_INSTALLED, Section, argument_parser, is_installed, median, rounds_text, spread, table
from step_time import DEVICE, STEPS_A_TURN, EngineLoop, build_model, make_batch, measure, setting

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


def contestants(model_name: str) -> dict[str, EngineLoop]:
    """Build every engine around a copy of one model."""
    model = build_model(model_name).to(DEVICE)
    batch_size = len(make_batch(model_name, 0)[0])
    initializers = {"launch": launcher.initialize}
    if is_installed("deepspeed"):
        import deepspeed

        initializers["DeepSpeed"] = deepspeed.initialize
    return {
        f"{maker} {name}": EngineLoop(initialize, copy.deepcopy(model), batch_size, {"stage": stage, **zero})
        for maker, initialize in initializers.items()
        for name, (stage, zero) in SETTINGS.items()
        if maker == "launch" or "ratio" not in str(zero)  # DeepSpeed has `ratio` at stage 3 only
    }


def section(name: str, rounds: int) -> str:
    """Measure one model and return its part of the page."""
    turns = measure(contestants(name), name, rounds)
    rows = []
    for maker in ("launch", "DeepSpeed"):
        for kind, (stage, _) in SETTINGS.items():
            own = turns.get(f"{maker} {kind}")
            if own is None:
                continue
            others = [turns[f"{maker} stage {stage}"], turns.get(f"DeepSpeed {kind}")]
            ratios = ["-" if other is None else f"{_ratio(own.wall_s, other.wall_s):.2f}" for other in others]
            milliseconds = [1e3 * value for value in own.wall_s]
            times = [f"{median(milliseconds):.1f} ms", spread(milliseconds)]
            rows.append([f"{maker} {kind}", *times, *ratios, f"{median(own.cpu_s):.2f} s", f"{own.loss:.7f}"])
    if not is_installed("deepspeed"):
        rows.append(["DeepSpeed", NOT_INSTALLED])
    header = ["engine", "step", "quartiles", "over not offloaded", "over DeepSpeed's", "CPU", "last loss"]
    return f"### Offload of {name.upper()}\n\n{table(header, rows)}\n"


def _ratio(own: list[float], other: list[float]) -> float:
    """Return the median ratio of turns in the same round: they met the same moment of the machine."""
    return median([value / base for value, base in zip(own, other, strict=True)])


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__, rounds=15)
    parser.add_argument("--model", default="mlp", help="as in step_time.py; default: %(default)s")
    options = parser.parse_args()
    page = Section("Offload to host memory", "torch", "deepspeed")
    part = section(options.model, options.rounds)
    if dist.get_rank() == 0:
        text = (
            f"{setting()}. AdamW: ours by the engine's own kernel; DeepSpeed's by torch's fused one where nothing is"
            " offloaded,\nby its own DeepSpeedCPUAdam where the optimizer is. Ratios are medians of those within a"
            " round."
        )
        samples = rounds_text(options.rounds, f"{STEPS_A_TURN} steps each, engines in turns in one job")
        page.write(samples, f"{text}\n\n{part}", options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
