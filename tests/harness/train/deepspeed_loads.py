"""The real DeepSpeed loads checkpoints that were written here, and continues. Started as a module.

The samples of a step are the same for any number of ranks, in as many micro steps as that takes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from harness.train.deepspeed_runs import (
    ACCUMULATION,
    NUM_RANKS,
    NUM_STEPS,
    NUM_STEPS_AFTER,
    batch_of,
    build_model,
    config_of,
    parameter_groups,
)
from torch import Tensor, nn

# Ranks -> samples of a micro step, micro steps of a step: 24 samples in all.
BATCHES = {1: (6, 4), 2: (6, 2), 3: (4, 2)}


def samples_of(rank: int, num_ranks: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's share of what `NUM_RANKS` ranks see in a step, by micro step."""
    micro_steps = range(step * ACCUMULATION, (step + 1) * ACCUMULATION)
    batches = [batch_of(each, micro_step) for micro_step in micro_steps for each in range(NUM_RANKS)]
    tokens, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    size, accumulation = BATCHES[num_ranks]
    own = range(rank * size * accumulation, (rank + 1) * size * accumulation, size)
    return [(tokens[first : first + size], targets[first : first + size]) for first in own]


def trained(engine: Any, rank: int, num_ranks: int, steps: range) -> list[float]:
    """Take steps; return the loss of each, of this rank's samples."""
    losses = []
    for step in steps:
        of_step = []
        for batch in samples_of(rank, num_ranks, step):
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            of_step.append(float(loss))
        losses.append(sum(of_step) / len(of_step))
    return losses


def groups_of(name: str, model: nn.Module) -> list[Any]:
    """Return what the optimizer of a run gets."""
    groups = parameter_groups(model)
    return [param for group in groups for param in group["params"]] if name.endswith("one-group") else groups


def sized(config: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return a config with the batch of so many ranks."""
    size, accumulation = BATCHES[num_ranks]
    return {**config, "train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": accumulation}


def _run(rank: int, num_ranks: int, case: dict[str, Any]) -> dict[str, Any]:
    import deepspeed
    import torch.distributed as dist

    model = build_model()
    config = sized(config_of(case["stage"], case["precision"], case["options"]), num_ranks)
    if case["is_universal"]:
        config["checkpoint"] = {"load_universal": True}
    if case["folder"] is not None:
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad or not case["is_universal"]:
                    param.zero_()  # what is not loaded is noticed; DeepSpeed's universal form has no frozen ones
    engine = deepspeed.initialize(model=model, model_parameters=groups_of(case["name"], model), config=config)[0]
    found: dict[str, Any] = {}
    first = 0
    if case["folder"] is not None:
        path, client_state = engine.load_checkpoint(case["folder"])
        first = NUM_STEPS
        found = {
            "path": path,
            "epoch": client_state["epoch"],
            "counters": [engine.global_steps, engine.skipped_steps],
            "lrs": engine.get_lr(),
            "schedule": engine.lr_scheduler.state_dict(),
            "scale": float(getattr(getattr(engine.optimizer, "loss_scaler", None), "cur_scale", 1.0)),
        }
    losses = torch.tensor(trained(engine, rank, num_ranks, range(first, NUM_STEPS + NUM_STEPS_AFTER)))
    dist.all_reduce(losses)
    engine.destroy()
    return {**found, "losses": (losses / num_ranks).tolist()}


def _on_rank(rank: int) -> None:
    """Run the cases in the file on the command line; write what rank 0 found beside it."""
    import deepspeed
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # as deepspeed_runs
    deepspeed.init_distributed(dist_backend="gloo")
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    num_ranks, path = int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
    found = {name: _run(rank, num_ranks, case) for name, case in json.loads(path.read_text()).items()}
    if rank == 0:
        path.with_suffix(".found").write_text(json.dumps(found))
    dist.destroy_process_group()


def fork_ranks(body: Callable[[int], None]) -> NoReturn:
    """Run `body` in a fork for each rank; end as they do."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=body, args=(rank,)) for rank in range(int(os.environ["WORLD_SIZE"]))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


def main() -> None:
    """Fork the ranks from one process that has imported DeepSpeed."""
    import_module("deepspeed")
    fork_ranks(_on_rank)


if __name__ == "__main__":
    main()
