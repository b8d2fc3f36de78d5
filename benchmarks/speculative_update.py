"""Whether `super_offload` hides the update: steps beside a device that is a double, which sleeps in place of computing.

    launch --num_gpus 1 benchmarks/speculative_update.py [--rounds 20] [--layers 24] [--width 2048] [--milliseconds 8]
                                                         [--output FILE]

A device computes while the host's cores, and its memory, are free. Here each layer sleeps that long, forward and
backward, and hands out a gradient that is there already, on a machine without a device. In turns: steps that wait for
the norm, steps of `super_offload`, and passes without a step; the update is what a step that waits takes beyond such a
pass. Three devices take different times for a layer: beside a slow one the update is hidden; beside a quick one the
step takes what the thread has not come to.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from common import Goal, Section, argument_parser, goals_table, measure_in_turns, median, rounds_text, spread, table
from torch import Tensor, nn

import launcher

WAITS, SPECULATIVE, PASS = "waits for the norm", "super_offload", "forward and backward alone"
LIMIT = 1.10
QUICKER = (2, 8)  # so many times as quick as the slow device


class _Layer(torch.autograd.Function):
    """A layer's work on a device: twice as long in backward as in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], ctx.gradient, None, None


class Model(nn.Module):
    """Layers that sleep."""

    def __init__(self, num_layers: int, width: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))
        self.gradient = torch.full((width, width), 1e-3, dtype=torch.bfloat16)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _Layer.apply(x, layer.weight, self.gradient, self.seconds)
        return x.float().square().mean()


class Loop:
    """An engine and its steps."""

    def __init__(self, num_layers: int, width: int, seconds: float, *, is_speculative: bool) -> None:
        torch.manual_seed(0)
        offload = {"device": "cpu", "super_offload": is_speculative}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "steps_per_print": 0,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": width * width, "offload_optimizer": offload},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }
        self.engine = launcher.initialize(model=Model(num_layers, width, seconds), config=config)[0]
        self._x = torch.randn(1, width, dtype=torch.bfloat16)

    def timed(self, *, steps: bool) -> float:
        """Return the seconds of one pass, with its step or without."""
        begun_s = time.perf_counter()
        self.engine.backward(self.engine(self._x))
        if steps:
            self.engine.step()
        else:
            self.engine.zero_grad()
        return time.perf_counter() - begun_s


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__ or "", rounds=20)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--milliseconds", type=float, default=8.0, help="of a layer's forward on the slow device")
    arguments = parser.parse_args()
    section = Section("Updates beside backward", "torch")
    rows, goals = [], []
    for factor in (1, *QUICKER):
        milliseconds = arguments.milliseconds / factor
        samples = steps_of(arguments.layers, arguments.width, milliseconds / 1e3, arguments.rounds)
        pass_s, waiting_s, own_s = (median(samples[name]) for name in (PASS, WAITS, SPECULATIVE))
        least_s = max(pass_s, waiting_s - pass_s)
        times = (f"{median(each) * 1e3:.0f} ({spread([1e3 * one for one in each])})" for each in samples.values())
        rows.append([f"{milliseconds:g} ms", *times, f"{waiting_s / least_s:.2f}", f"{own_s / least_s:.2f}"])
        if factor == 1:
            what = f"step, over the longer one of compute and update, at {milliseconds:g} ms"
            goals.append(
                Goal(
                    what,
                    f"≤ {LIMIT:.2f}",
                    f"{own_s / least_s:.2f}",
                    own_s <= LIMIT * least_s,
                    f"one that waits: {waiting_s / least_s:.2f}",
                )
            )
        what = f"step, over one that waits, at {milliseconds:g} ms"
        goals.append(Goal(what, "≤ 1.00", f"{own_s / waiting_s:.2f}", own_s <= waiting_s))
    head = ["a layer's forward", *(f"{name}, ms" for name in samples), f"{WAITS} / longer", f"{SPECULATIVE} / longer"]
    numel = arguments.layers * arguments.width**2
    text = (
        f"{numel / 1e6:.0f} M parameters in {arguments.layers} units; medians and quartiles. The last columns: over the"
        f" longer one of compute and update.\n\n{table(head, rows)}\n\n{goals_table(goals)}"
    )
    section.write(rounds_text(arguments.rounds, "steps in turns"), text, arguments.output)


def steps_of(num_layers: int, width: int, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps that wait, of speculative ones, and of passes without a step."""
    gc.collect()  # the loops before these have gone
    sizes = num_layers, width, seconds
    waiting, speculative = Loop(*sizes, is_speculative=False), Loop(*sizes, is_speculative=True)
    samples = measure_in_turns(
        {
            WAITS: lambda: waiting.timed(steps=True),
            SPECULATIVE: lambda: speculative.timed(steps=True),
            PASS: lambda: waiting.timed(steps=False),
        },
        rounds,
    )
    waiting.engine.destroy()
    speculative.engine.destroy()
    return samples


if __name__ == "__main__":
    main()
