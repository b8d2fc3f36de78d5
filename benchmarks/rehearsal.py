"""Rehearsals beside real runs: bytes of each phase, collectives one by one; and a model that fits nowhere here.

    python benchmarks/rehearsal.py [--models mlp,llama] [--worlds 1,2,4] [--large 32] [--output FILE]

A real run is followed operation by operation: what is counted is what torch allocates (`tests/rehearse` holds the count
against torch's profiler). The rehearsal of its last rank runs in one process, with gloo's way of carrying out
collectives.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import BIN, Goal, Section, argument_parser, goals_table, table
from harness.train import rehearsed

from launcher.planner.rehearsal import PHASES_OF_STEP, RankRehearsal

SETTINGS: dict[str, tuple[int, str]] = {
    "stage 0": (0, ""),
    "stage 1": (1, ""),
    "stage 2": (2, ""),
    "stage 3": (3, ""),
    "stage 2, optimizer on the host": (2, "optimizer"),
    "stage 3, all on the host": (3, "all"),
}
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("llama", {"tensor_parallel": {"autotp_size": 2}}),
    "sequence": ("llama", {"sequence_parallel_size": 2}),
    "pipeline": ("llama", {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 4}),
    "experts": ("mixtral", {"expert_parallel": {"enabled": True, "autoep_size": 2}}),
}
LLAMA = """\
import sys, torch, launcher
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=int(sys.argv[1])))
engine, *_ = launcher.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
})
while True:
    ids = torch.randint(0, 32000, (1, 4096))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
"""


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--models", default=",".join(rehearsed.MODELS), help="comma-separated names")
    parser.add_argument("--worlds", default="1,2,4", help="comma-separated numbers of ranks")
    parser.add_argument("--large", type=int, default=32, help="layers of the Llama 7 B that rank 5 of 1,024 rehearses")
    arguments = parser.parse_args()
    section = Section("Rehearsals beside real runs", "torch", "transformers")
    worlds = [int(world) for world in arguments.worlds.split(",")]
    rows, errors, num_unlike, num_cases = [], [], 0, 0
    for name in arguments.models.split(","):
        cells = []
        for stage, offload in SETTINGS.values():
            worst, alike = 0.0, True
            for world_size in worlds:
                error, is_alike = _compared(name, rehearsed.setting(stage, offload), world_size)
                worst, alike = max(worst, error), alike and is_alike
                num_unlike += not is_alike
                num_cases += 1
            errors.append(worst)
            cells.append(f"{100 * worst:.2f} %{'' if alike else ', other collectives'}")
        rows.append([name, *cells])
    mesh_rows = []
    for axis, (name, keys) in MESHES.items():
        found = [_compared(name, rehearsed.setting(1, **keys), world) for world in worlds if world > 1]
        if found:
            errors.append(max(error for error, _ in found))
            num_unlike += sum(not is_alike for _, is_alike in found)
            num_cases += len(found)
            mesh_rows.append([axis, name, f"{100 * errors[-1]:.2f} %"])
    large, seconds = _large(arguments.large)
    numel = f"Llama of {arguments.large} layers, width 4,096"
    goals = [
        Goal("bytes by phase, rehearsed beside real", "≤ 2 %", f"{100 * max(errors):.2f} %", max(errors) <= 0.02),
        Goal("sequences of collectives that differ", "0", f"{num_unlike} of {num_cases}", num_unlike == 0),
        Goal(f"{numel}, rank 5 of 1,024, stage 3", "≤ 60 s", f"{seconds:.0f} s", seconds <= 60),
        Goal("its memory", "≤ 2 GiB", f"{large.resident_bytes / 2**30:.2f} GiB", large.resident_bytes <= 2 * 2**30),
    ]
    text = [
        goals_table(goals),
        f"The largest difference of a phase's bytes on {arguments.worlds} ranks, bf16, AdamW:",
        table(["model", *SETTINGS], rows),
        "Meshes of 2 ranks along the axis, stage 1:",
        table(["axis", "model", "largest difference"], mesh_rows),
    ]
    section.write("One run of each: bytes are counted, not timed", "\n\n".join(text), arguments.output)


def _compared(name: str, config: dict[str, Any], world_size: int) -> tuple[float, bool]:
    """Return the largest relative difference of a phase's bytes, and whether all collectives are alike."""
    with tempfile.TemporaryDirectory() as folder:
        found, real = rehearsed.rehearse_and_follow(Path(folder), name, config, world_size)
    errors = []
    for phase in PHASES_OF_STEP:
        ours, theirs = (sum(each.peaks[phase].values()) for each in (found, real))
        errors.append(abs(ours - theirs) / theirs)
    return max(errors), rehearsed.collectives_of(found) == rehearsed.collectives_of(real)


def _large(num_layers: int) -> tuple[RankRehearsal, float]:
    """Rehearse a model that this machine could not hold, as a user does; return what was found, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        script, output = Path(folder, "train.py"), Path(folder, "found.json")
        script.write_text(LLAMA)
        launch = [sys.executable, "-m", "launcher"] if not (BIN / "launch").exists() else [str(BIN / "launch")]
        command = [*launch, "rehearse", "--ranks", "1024", "--rank", "5", "--json", str(output), str(script)]
        begun_s = time.monotonic()
        subprocess.run([*command, str(num_layers)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - begun_s
        (rank,) = json.loads(output.read_text())["ranks"]
    return RankRehearsal.from_json(json.dumps(rank)), seconds


if __name__ == "__main__":
    main()
