"""The real DeepSpeed loads a mixture of experts that was written here, and continues. Started as a module."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from harness.train.deepspeed_loads import fork_ranks
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, EXPERTS, EP_SIZE, SAMPLES = 8, 4, 2, 10
NUM_STEPS, AFTER = 2, range(2, 5)
STAGES = (0, 1, 2)


class Mixture(nn.Module):
    """Two layers of experts, all of whose tokens find one, between linear ones."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        options = {"num_experts": EXPERTS, "ep_size": EP_SIZE, "drop_tokens": False, "use_rts": False}
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer(WIDTH, nn.Linear(WIDTH, WIDTH), k=1, **options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """x: [samples, WIDTH] -> the loss."""
        y, balance = torch.tanh(self.first(x)), x.new_zeros(())
        for layer in self.layers:
            output, loss, _ = layer(y)
            y, balance = y + output, balance + loss
        return F.mse_loss(self.last(y), x.roll(1, -1)) + 0.01 * balance


def build(layer: Callable[..., nn.Module]) -> Mixture:
    torch.manual_seed(7)
    return Mixture(layer)


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "steps_per_print": 1_000_000,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }


def trained(engine: Any, rank: int, steps: range) -> list[float]:
    """Take steps; return the losses of this rank's samples."""
    losses = []
    for step in steps:
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _on_rank(rank: int) -> None:
    """Load and continue each stage's checkpoint; write the losses of this rank."""
    import deepspeed
    from deepspeed.moe.layer import MoE

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # as deepspeed_runs
    deepspeed.init_distributed(dist_backend="gloo")
    folder, found = Path(sys.argv[1]), {}
    for stage in STAGES:
        model = build(MoE)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()  # what is not loaded is noticed
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_of(stage))[0]
        engine.load_checkpoint(str(folder / f"theirs-{stage}"))
        found[stage] = trained(engine, rank, AFTER)
    (folder / f"losses-{rank}").write_text(json.dumps(found))


def main() -> None:
    """Fork the ranks from one process that has imported DeepSpeed."""
    import_module("deepspeed")
    fork_ranks(_on_rank)


if __name__ == "__main__":
    main()
