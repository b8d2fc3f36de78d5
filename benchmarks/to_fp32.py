"""Whole fp32 weights out of a sharded checkpoint: time and memory, beside DeepSpeed's script on DeepSpeed's checkpoint.

    python benchmarks/to_fp32.py [--layers 38] [--rounds 3] [--folder DIR] [--output FILE]

Two ranks save the same model at stage 2 in bf16, without optimizer states, which neither script reads. Then each script
runs in a process of its own, as a user runs it, with what it reads in the page cache. It needs about 16 bytes a
parameter in --folder, and for DeepSpeed's script as much memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import (
    TORCHRUN,
    Goal,
    Section,
    argument_parser,
    goals_table,
    is_installed,
    measure_in_turns,
    median,
    rounds_text,
    spread,
    table,
)

HIDDEN, VOCAB = 1024, 32_768
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
LIMIT_BYTES = 200 * 2**20  # over the interpreter with torch and the largest tensor
FORMS = {"pytorch_model.bin": [], "model.safetensors": ["--safe_serialization"]}


def build(num_layers: int) -> Any:
    """Return the weights of a GPT, without its forward."""
    import torch
    from torch import nn

    with torch.device("cpu"):
        layers = [nn.Linear(HIDDEN, 12 * HIDDEN, dtype=torch.bfloat16) for _ in range(num_layers)]
        return nn.ModuleList([nn.Embedding(VOCAB, HIDDEN, dtype=torch.bfloat16), *layers])


def save(engine: str, num_layers: int, folder: str) -> None:
    """Save a checkpoint; on each rank."""
    if engine == "deepspeed":
        import deepspeed

        config = {**CONFIG, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        model = build(num_layers)
        deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0].save_checkpoint(folder)
    else:
        import launcher

        launcher.initialize(model=build(num_layers), config=CONFIG)[0].save_checkpoint(folder)


def saved(engine: str, num_layers: int, folder: Path) -> Path:
    """Have two ranks save a checkpoint; return its folder."""
    command = [*TORCHRUN, "--nproc-per-node", "2", __file__, "--save", engine, str(num_layers), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return folder


class Runs:
    """Runs a script, each time into an empty folder, and notes how long it took and how much memory it had."""

    def __init__(self, folder: Path, arguments: list[str], output: Path) -> None:
        self._command = [sys.executable, "zero_to_fp32.py", ".", str(output), *arguments]
        self._folder, self._output = folder, output
        self.peaks: list[float] = []  # bytes

    def __call__(self) -> float:
        shutil.rmtree(self._output, ignore_errors=True)
        os.sync()
        begun_s = time.perf_counter()
        self.peaks.append(peak_bytes(self._command, self._folder))
        took_s = time.perf_counter() - begun_s
        shutil.rmtree(self._output)
        return took_s


def peak_bytes(command: list[str], folder: Path) -> float:
    """Run a command; return the most memory it had, mapped files with it.

    Linux counts what this process has until the command's program is loaded, so it must not import torch.
    """
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return usage.ru_maxrss * 1024.0


def section(num_layers: int, rounds: int, folder: Path) -> str:
    """Measure; return the table and the goals."""
    numel, largest = VOCAB * HIDDEN + num_layers * 12 * (HIDDEN + 1) * HIDDEN, 4 * max(VOCAB, 12 * HIDDEN) * HIDDEN
    engines = {"launch": "launcher"} | ({"DeepSpeed": "deepspeed"} if is_installed("deepspeed") else {})
    places = {name: saved(engine, num_layers, folder / engine) for name, engine in engines.items()}
    interpreter = median([peak_bytes([sys.executable, "-c", "import torch"], folder) for _ in range(rounds)])
    runs = {
        f"{name}, {form}": Runs(place, arguments, folder / "out")
        for name, place in places.items()
        for form, arguments in FORMS.items()
    }
    samples = measure_in_turns(runs, rounds)
    rows = [
        [name, f"{median(took_s):.2f} s", spread(took_s), f"{(max(runs[name].peaks) - interpreter) / 2**20:.0f} MiB"]
        for name, took_s in samples.items()
    ]
    goals = [
        Goal(
            f"peak memory over the interpreter, {form}",
            f"≤ {(largest + LIMIT_BYTES) / 2**20:.0f} MiB",
            f"{(max(runs[f'launch, {form}'].peaks) - interpreter) / 2**20:.0f} MiB",
            max(runs[f"launch, {form}"].peaks) - interpreter <= largest + LIMIT_BYTES,
            "see the table",
        )
        for form in FORMS
    ]
    facts = (
        f"{numel / 1e6:.0f} M parameters, {4 * numel / 1e9:.2f} GB in fp32, the largest tensor"
        f" {largest / 2**20:.0f} MiB; an interpreter with torch has {interpreter / 2**20:.0f} MiB.\n"
        "Whole processes: `import torch` is part of each time. Ours waits until the output is on the disk (fsync) and"
        " verifies checksums; DeepSpeed's does neither."
    )
    header = ["script, output", "median", "quartiles", "most memory over the interpreter"]
    return "\n\n".join([facts, table(header, rows), goals_table(goals)])


def main() -> None:
    """Measure and write the section, or save as one of its ranks."""
    if sys.argv[1:2] == ["--save"]:
        save(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--layers", type=int, default=38, help="of 12.6 M parameters each (default 38: 512 M in all)")
    parser.add_argument("--folder", help="on the disk to measure with (default: a temporary one)")
    options = parser.parse_args()
    page = Section("Weights in fp32 out of a checkpoint", "torch", "xxhash", "deepspeed")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        text = section(options.layers, options.rounds, Path(folder))
    page.write(rounds_text(options.rounds), text, options.output)


if __name__ == "__main__":
    main()
