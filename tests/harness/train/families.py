"""One job that trains models of many families, plainly and through the engine at several settings, and compares.

Every rank runs `python -m harness.train.families FOLDER NAME ...`. Rank 0 appends a line of JSON to
FOLDER/results.jsonl as each run begins and as it ends. A run that raises ends the job, as its ranks are no longer in
step. The caller runs the remaining families in a new job: see `compare_families`.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.train.adamw import engines_adamw
from harness.train.catalogue import Family, family_of, kind_of
from harness.train.tiny import loss_of
from torch import Tensor

NUM_RANKS, NUM_STEPS = 2, 3
PLAIN = "plain torch"
LR, WEIGHT_DECAY = 1e-3, 0.01
ON_CPU = {"device": "cpu"}
RECOMPUTED = {"3 + recompute": False, "3 + reentrant": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "3 + offload": {"stage": 3, "offload_optimizer": ON_CPU, "offload_param": ON_CPU},
}


def config_of(setting: str) -> dict[str, Any]:
    """Return the engine's configuration. At stage 3 every parameter is sharded, however small."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **SETTINGS.get(setting, {"stage": 3})},
    }


def seed_all(seed: int) -> None:
    """Have what models draw in a forward depend on this number alone."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def forward(model: Any, inputs: Any, step: int, rank: int) -> Tensor:
    """Return the loss of one rank in one step."""
    seed = step * NUM_RANKS + rank
    batch = inputs(seed)
    seed_all(seed)
    return loss_of(model(**batch))


# A gradient this far below the model's largest is rounding and nothing else: that of a key's bias, which moves all
# logits of a softmax alike. AdamW makes full steps of it all the same, so that such elements are not compared.
ROUNDING = 1e-6


@dataclass
class Expected:
    """What plain torch arrives at."""

    losses: list[list[float]]  # [step][rank]
    weights: dict[str, Tensor]  # final
    is_rounding: dict[str, Tensor]  # of a weight's elements, whether their gradient was nothing but rounding


def train_plain(family: Family) -> tuple[Expected, dict[str, Any]]:
    """Train on one process with the data of all ranks; return what comes of it, and facts of the model.

    Raises: ValueError for a loss that is not finite.
    """
    model = family.build()
    inputs = family.inputs(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = engines_adamw(trained, lr=LR, betas=(0.9, 0.999), weight_decay=WEIGHT_DECAY)
    losses, largest = [], {param: torch.zeros_like(param) for param in trained}
    for step in range(NUM_STEPS):
        of_step = []
        for rank in range(NUM_RANKS):
            loss = forward(model, inputs, step, rank)
            (loss / NUM_RANKS).backward()
            of_step.append(loss.item())
        for param in trained:
            if param.grad is not None:
                torch.maximum(largest[param], param.grad.abs(), out=largest[param])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_step)
    if not all(math.isfinite(loss) for of_step in losses for loss in of_step):
        raise ValueError("the loss is not finite")
    limit = ROUNDING * max(grad.max().item() for grad in largest.values() if grad.numel())
    params = dict(model.named_parameters(remove_duplicate=False))
    weights = {name: value for name, value in model.state_dict().items() if name in params}
    is_rounding = {
        name: (largest[param] > 0) & (largest[param] < limit) for name, param in params.items() if param in largest
    }
    facts = {
        "class": type(model).__name__,
        "kind": kind_of(family.name, model),
        "parameters": sum(param.numel() for param in model.parameters()),
    }
    return Expected(losses, weights, is_rounding), facts


def train_engine(family: Family, setting: str, rank: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train through the engine; return this rank's losses, and on rank 0 the final weights."""
    import launcher

    model = family.build()
    inputs = family.inputs(model)
    if setting in RECOMPUTED:
        model.gradient_checkpointing_enable({"use_reentrant": RECOMPUTED[setting]})
    engine, _, _, _ = launcher.initialize(model=model, config=config_of(setting))
    losses = []
    for step in range(NUM_STEPS):
        loss = forward(engine, inputs, step, rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = engine.state_dict(rank0_only=True)
    engine.destroy()
    return losses, weights


def worst_loss(found: list[list[float]], expected: list[list[float]]) -> float:
    """Return the largest relative difference of two tables of losses."""
    pairs = [pair for rows in zip(found, expected, strict=True) for pair in zip(*rows, strict=True)]
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


def worst_weight(found: dict[str, Tensor], expected: Expected) -> tuple[float, str]:
    """Return the largest relative 2-norm difference of a parameter, and its name."""
    worst, where = 0.0, ""
    for name, value in expected.weights.items():
        if name not in found:
            return float("inf"), f"{name}, which is not in the engine's state dict"
        difference = (found[name].double() - value.double()).masked_fill(
            expected.is_rounding.get(name, torch.tensor(False)), 0.0
        )
        relative = difference.norm().item() / max(value.double().norm().item(), 1e-12)
        if not relative <= worst:  # also for nan
            worst, where = relative, name
    return worst, where


class Runs:
    """The runs of one job on one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, dist.get_rank()

    def note(self, **line: Any) -> None:
        """Append a line to the results, on rank 0."""
        if self.rank == 0:
            with (self.folder / "results.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def family(self, name: str, settings: list[str]) -> None:
        """Train one family at the settings, and compare each with plain torch."""
        self.note(begins=[name, PLAIN])
        outcome: dict[str, Any] = {}
        expected: Any = None
        if self.rank == 0:
            try:
                expected, outcome = train_plain(family_of(name))
            except Exception as found:  # noqa: BLE001  # it is the outcome
                outcome = {"error": f"{type(found).__name__}: {found}"}
        outcomes = [outcome]
        dist.broadcast_object_list(outcomes)
        self.note(family=name, setting=PLAIN, **outcomes[0])
        if "error" in outcomes[0]:
            return
        for setting in settings:
            self.note(begins=[name, setting])
            self.compare(family_of(name), setting, expected)
            gc.collect()

    def compare(self, family: Family, setting: str, expected: Expected) -> None:
        """Train through the engine, and note how far it is from what is expected, on rank 0."""
        losses, weights = train_engine(family, setting, self.rank)
        of_ranks: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(of_ranks, losses)
        if self.rank == 0:
            by_step = [list(row) for row in zip(*of_ranks, strict=True)]
            weight, where = worst_weight(weights, expected)
            self.note(
                family=family.name,
                setting=setting,
                loss=worst_loss(by_step, expected.losses),
                weight=weight,
                where=where,
            )


def main() -> None:
    """Run the families that the command line names, each as NAME or NAME@SETTING,SETTING."""
    import launcher

    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    launcher.init_distributed()
    runs = Runs(folder)
    for entry in names:
        name, _, chosen = entry.partition("@")
        try:
            runs.family(name, chosen.split(",") if chosen else list(SETTINGS))
        except Exception as error:  # noqa: BLE001  # it is the outcome; the other rank may wait for this one
            text = f"{type(error).__name__}: {error}"
            outcome = {"error": text, "traceback": traceback.format_exc()}
            (folder / f"error_of_rank_{runs.rank}.json").write_text(json.dumps(outcome))
            os._exit(1)


if __name__ == "__main__":
    main()
