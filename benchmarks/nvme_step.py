"""The optimizer step with states on disk, in turns with its transfers alone and its computing alone.

python benchmarks/nvme_step.py [--folder .] [--layers 24] [--rounds 7] [--output FILE]
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch
from common import Section, argument_parser, measure_in_turns, median, rounds_text, spread, table
from torch import Tensor, nn

import launcher
from launcher.storage.store import AioSettings, Extent, Store, Transfer, aligned_buffer

WIDTH = 2048
NUM_READ, NUM_WRITTEN = 4, 3  # master, gradient and two states; the gradient is not written back
AIO = AioSettings(block_size_bytes=1 << 20, queue_depth=8, num_threads=1)


class Layers(nn.Module):
    """Square layers without biases, of WIDTH."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """x: bf16 [batch, WIDTH] -> scalar."""
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x.float().square().mean()


class Steps:
    """An engine of which only `step` is timed, until everything it writes is on the disk."""

    def __init__(self, num_layers: int, offload: dict[str, Any]) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 1_000_000,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": WIDTH * WIDTH, "offload_optimizer": offload},
        }
        torch.manual_seed(0)
        self._engine = launcher.initialize(model=Layers(num_layers), config=config)[0]
        swaps = [unit.swap for unit in self._engine._sharded.units]
        self._disks = {swap._disk for swap in swaps if swap is not None}
        self._x = torch.ones(1, WIDTH, dtype=torch.bfloat16)

    def step(self) -> float:
        """Return the seconds of one optimizer step."""
        self._engine.backward(self._engine(self._x))
        self._settle()
        start_s = time.perf_counter()
        self._engine.step()
        self._settle()
        return time.perf_counter() - start_s

    def _settle(self) -> None:
        for disk in self._disks:
            disk.drain(max_writes=0)


class Transfers:
    """The reads and writes of a step, with the same memory and settings, and nothing else."""

    def __init__(self, folder: str, num_layers: int) -> None:
        self._store = Store(folder, AIO)
        num_bytes = WIDTH * WIDTH * 4
        self._units = [[self._store.reserve(num_bytes) for _ in range(NUM_READ)] for _ in range(num_layers)]
        # One unit is read, one would be updated, one is written.
        self._memories = [[aligned_buffer(num_bytes) for _ in range(NUM_READ)] for _ in range(3)]
        for unit in self._units:  # what was never written would be read without asking the disk
            _wait(self._start(self._store.write, unit, 0))

    def close(self) -> None:
        """Remove the file."""
        self._store.close()

    def run(self) -> float:
        """Return the seconds of all reads and writes, each unit's writes beside the next one's reads."""
        start_s = time.perf_counter()
        reads = self._start(self._store.read, self._units[0], 0)
        writes: list[Transfer] = []
        for number, unit in enumerate(self._units):
            _wait(reads)
            if number + 1 < len(self._units):
                reads = self._start(self._store.read, self._units[number + 1], number + 1)
            _wait(writes)
            writes = self._start(self._store.write, unit[:NUM_WRITTEN], number)
        _wait(writes)
        return time.perf_counter() - start_s

    def _start(
        self, move: Callable[[Extent, memoryview], Transfer], extents: Sequence[Extent], number: int
    ) -> list[Transfer]:
        memories = self._memories[number % len(self._memories)]
        return [move(extent, memory) for extent, memory in zip(extents, memories, strict=False)]


def _wait(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__, rounds=7)
    parser.add_argument("--folder", default=".", help="on the disk to be measured")
    parser.add_argument("--layers", type=int, default=24, help="of 4.2 million parameters each")
    options = parser.parse_args()
    page = Section("Optimizer step on disk", "torch")
    there = {"device": "nvme", "nvme_path": options.folder}
    pipelined = {**there, "pipeline_read": True, "pipeline_write": True}
    with redirect_stdout(io.StringIO()):
        transfers = Transfers(options.folder, options.layers)
        candidates = {
            "step, pipeline_read and pipeline_write": Steps(options.layers, pipelined).step,
            "step, neither": Steps(options.layers, there).step,
            "its transfers alone": transfers.run,
            "its computing alone (states in host memory)": Steps(options.layers, {"device": "cpu"}).step,
        }
    samples = measure_in_turns(candidates, options.rounds)
    transfers.close()
    *_, moving, computing = (median(values) for values in samples.values())
    bound_s = max(moving, computing)
    numel = options.layers * WIDTH * WIDTH
    rows = [
        [name, f"{median(values):.3f}", spread(values), f"**{median(values) / bound_s:.2f}**"]
        for name, values in samples.items()
    ]
    text = (
        f"{numel / 1e6:.0f} million parameters in {options.layers} units, bf16, AdamW, one rank; per step"
        f" {4 * NUM_READ * numel / 1e9:.1f} GB are read and {4 * NUM_WRITTEN * numel / 1e9:.1f} GB written.\n\n"
        f"{table(['', 's', 'quartiles', 'of the longer one alone'], rows)}"
    )
    page.write(rounds_text(options.rounds) + "; ratios of medians", text, options.output)


if __name__ == "__main__":
    main()
