"""Runs of the real DeepSpeed that save a checkpoint, tell what they had in memory, and continue.

Each is a folder of the output: `saved/` is what `save_checkpoint` wrote, `memory.pt` what ranks had then, `losses` of
the steps after it included. Started as a module, by `harness.train.deepspeed`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NUM_RANKS = 2
NUM_STEPS = 3
NUM_STEPS_AFTER = 3
ACCUMULATION = 2
LR = 2e-2
CLIENT_STATE = {"epoch": 4, "history": [1, 2.5, "three", None, True], "nested": {"a": (1, 2)}}


class TiedModel(nn.Module):
    """Sizes that no number of ranks divides, two weights that are one, a frozen layer and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 12)
        self.frozen = nn.Linear(12, 12)
        self.hidden = nn.Linear(12, 13)
        self.norm = nn.LayerNorm(13)
        self.out = nn.Linear(13, 12)
        self.head = nn.Linear(12, 37, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([1.5]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        embedded = self.frozen(self.embed(tokens))
        hidden = self.norm(torch.tanh(self.hidden(embedded * self.scale.to(embedded.dtype))))
        logits = self.head(self.out(hidden))
        return nn.functional.cross_entropy(logits.float(), targets)


def build_model() -> TiedModel:
    torch.manual_seed(5)
    return TiedModel()


def batch_of(rank: int, micro_step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + micro_step)
    return torch.randint(37, (6,), generator=generator), torch.randint(37, (6,), generator=generator)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() < 2], "weight_decay": 0.0},
    ]


def config_of(stage: int, precision: str, options: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": ACCUMULATION,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": stage, **options.get("zero", {})},
        **{key: value for key, value in options.items() if key != "zero"},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] |= {"initial_scale_power": 8}
    return config


# Name -> stage, precision, options of the config.
RUNS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "0-fp32": (0, "fp32", {}),
    "0-bf16": (0, "bf16", {}),
    "1-fp32": (1, "fp32", {}),
    "1-bf16": (1, "bf16", {}),
    "1-bf16-sums": (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),  # by an optimizer class of its own
    "1-elastic": (1, "fp32", {"zero": {"elastic_checkpoint": True}}),
    "2-fp32": (2, "fp32", {}),
    "2-bf16": (2, "bf16", {"zero": {"round_robin_gradients": True, "parameter_alignment": True}}),
    "2-fp16": (2, "fp16", {}),
    "3-fp32": (3, "fp32", {}),
    "3-bf16": (3, "bf16", {"zero": {"sub_group_size": 100, "stage3_param_persistence_threshold": 0}}),
}


def _train(engine: Any, rank: int, first_step: int, num_steps: int) -> list[float]:
    losses = []
    for micro_step in range(first_step * ACCUMULATION, (first_step + num_steps) * ACCUMULATION):
        loss = engine(*batch_of(rank, micro_step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def _whole(engine: Any, param: nn.Parameter, key: str) -> Tensor | None:
    """Return what DeepSpeed itself says a parameter's master or state is."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() == 0:
        return _whole_without_zero(engine.optimizer, param, key)
    found = safe_get_full_fp32_param(param) if key == "weight" else safe_get_full_optimizer_state(param, key)
    return None if found is None else found.detach().clone().float()


def _whole_without_zero(optimizer: Any, param: nn.Parameter, key: str) -> Tensor:
    master = param
    if hasattr(optimizer, "fp32_groups"):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        masters = {lp: hp for lps, hps in pairs for lp, hp in zip(lps, hps, strict=True)}
        master, optimizer = masters[param], optimizer.optimizer
    found: Tensor = master if key == "weight" else optimizer.state[master][key]
    return found.detach().clone()


def _memory(engine: Any) -> dict[str, Any]:
    import deepspeed

    if getattr(engine.optimizer, "_hp_optimizer_states_linked", False):
        # It links parameters and states after the first group's first step, when those of other groups have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    weights, states = {}, {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            keys = ("weight", "exp_avg", "exp_avg_sq")
            weights[name], *moments = (_whole(engine, param, key) for key in keys)
            states[name] = dict(zip(keys[1:], moments, strict=True))
        else:
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                weights[name] = param.detach().clone().float()
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    steps = [float(state["step"]) for state in inner.state.values() if "step" in state]
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "weights": weights,
        "states": states,
        "step": steps[0],
        "lrs": engine.get_lr(),
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "micro_steps": engine.micro_steps,
        "skipped_steps": engine.skipped_steps,
        "lr_scheduler": engine.lr_scheduler.state_dict(),
        "loss_scale": float(getattr(scaler, "cur_scale", 1.0)),
        "loss_iterations": int(getattr(scaler, "cur_iter", 0)),
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers() if name != "passing"},
    }


def _run(name: str, output: Path, rank: int) -> None:
    import deepspeed
    import torch.distributed as dist

    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=parameter_groups(model), config=config_of(*RUNS[name]))[
        0
    ]
    _train(engine, rank, 0, NUM_STEPS)
    folder = output / name
    state = {**CLIENT_STATE, "table": torch.arange(5) * 0.5, "options": argparse.Namespace(width=12)}
    engine.save_checkpoint(str(folder / "saved"), client_state=state)
    memory = _memory(engine)
    losses = torch.tensor(_train(engine, rank, NUM_STEPS, NUM_STEPS_AFTER), dtype=torch.float64)
    dist.all_reduce(losses)
    memory["losses"] = (losses / dist.get_world_size()).tolist()
    if rank == 0:
        torch.save(memory, folder / "memory.pt")
    engine.destroy()


def _on_rank(rank: int) -> None:
    """Take the runs named on the command line, all by default."""
    import deepspeed
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    output, names = Path(sys.argv[1]), sys.argv[2:] or list(RUNS)
    # It would compile an operator of its own, for minutes, in the user's cache; gloo does the same.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo")
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # by torch, if not quickly
    for name in names:
        _run(name, output, rank)
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks from one process that has imported DeepSpeed, which takes seconds."""
    import_module("deepspeed")
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_on_rank, args=(rank,)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
