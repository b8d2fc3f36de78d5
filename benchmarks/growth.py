"""How initialization and the host's share of a step grow with the number of units, at a world size of 1,024.

    python benchmarks/growth.py [--units 10,100,1000] [--rounds 5] [--output FILE]

One process plays rank 0 of a world whose collectives do nothing (torch's fake process group), so that what is left is
planning, hooks and bookkeeping. Beside it: the plain model without any wrapper, and FSDP2.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import Section, argument_parser, median, rounds_text, table
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import launcher

WORLD_SIZE = 1024
WIDTH = 512
LAYER_NUMEL = WIDTH * WIDTH + WIDTH


class Layers(nn.Module):
    """Equal layers, one unit each."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """x: [1, WIDTH] -> scalar."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean()


def _ours(model: nn.Module, stage: int) -> Callable[[Tensor], None]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        # The bound keeps layers from being joined to larger units.
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": LAYER_NUMEL,
        },
    }
    engine = launcher.initialize(model=model, config=config)[0]

    def step(x: Tensor) -> None:
        engine.backward(engine(x))
        engine.step()

    return step


def _plain(model: nn.Module) -> Callable[[Tensor], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    def step(x: Tensor) -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _fsdp2(model: Layers) -> Callable[[Tensor], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: Tensor) -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CANDIDATES: dict[str, Callable[[Any], Callable[[Tensor], None]]] = {
    "no wrapper": _plain,
    "FSDP2": _fsdp2,
    "launch stage 2": lambda model: _ours(model, 2),
    "launch stage 3": lambda model: _ours(model, 3),
}


def measure(num_units: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the seconds of initialization and of a step (median, engines in turns) of each candidate."""
    torch.manual_seed(0)
    model = Layers(num_units)
    built: dict[str, tuple[float, Callable[[Tensor], None]]] = {}
    for name, build in CANDIDATES.items():
        copied = copy.deepcopy(model)
        start_s = time.perf_counter()
        step = build(copied)
        built[name] = (time.perf_counter() - start_s, step)
    steps: dict[str, list[float]] = {name: [] for name in built}
    x = torch.randn(1, WIDTH)
    for number in range(-2, rounds):
        for name in built if number % 2 else reversed(built):
            start_s = time.perf_counter()
            built[name][1](x)
            if number >= 0:
                steps[name].append(time.perf_counter() - start_s)
    return {name: (built[name][0], median(steps[name])) for name in built}


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--units", default="10,100,1000")
    options = parser.parse_args()
    counts = [int(text) for text in options.units.split(",")]
    page = Section("Growth", "torch")
    logging.getLogger("launcher").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    found = {count: measure(count, options.rounds) for count in counts}
    rows = []
    for name in CANDIDATES:
        row = [name]
        for count in counts:
            init_s, step_s = found[count][name]
            over_ms = 1e3 * (step_s - found[count]["no wrapper"][1]) / count
            own = "" if name == "no wrapper" else f", {over_ms:.2f} ms a unit over none"
            row.append(f"{init_s:.2f} s, {1e3 * step_s:.0f} ms{own}")
        rows.append(row)
    header = ["initialization, step", *(f"{count:,} units" for count in counts)]
    text = (
        f"Rank 0 of a world of {WORLD_SIZE:,} whose collectives do nothing: planning, hooks and bookkeeping."
        f" Initialization is one sample.\n\n{table(header, rows)}"
    )
    page.write(rounds_text(options.rounds, "a step each, in turns"), text, options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
