"""Errors are caught by scripts that catch what DeepSpeed raises: ValueError, AssertionError, KeyError, RuntimeError."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn

import launcher
from launcher.base.errors import LauncherError
from launcher.checkpoint_files.place import place_of
from launcher.config.equations import solve_batch
from launcher.config.load import load_config
from launcher.moe import MoE
from launcher.parallel.pipeline.specs import LayerSpec
from launcher.zero.leaves import set_z3_leaf_modules

WITHOUT_MODEL: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "a value": (ValueError, lambda: load_config({"gradient_clipping": "high"})),
    "a key given twice": (ValueError, lambda: load_config('{"train_batch_size": 1, "train_batch_size": 1}')),
    "a key that is not known": (ValueError, lambda: load_config({"zero_optimization": {"stge": 1}})),
    "two precisions": (AssertionError, lambda: load_config({"fp16": {"enabled": True}, "bf16": {"enabled": True}})),
    "batch sizes": (AssertionError, lambda: load_config({"train_batch_size": 33}, world_size=2)),
    "no samples": (AssertionError, lambda: load_config({"train_batch_size": 0})),
    "no batch size": (AssertionError, lambda: solve_batch(None, None, 2, 2)),
    "old and new name": (AssertionError, lambda: load_config({"bf16": {}, "bfloat16": {}})),
    "no leaf": (ValueError, lambda: set_z3_leaf_modules(nn.Linear(2, 2), ["Conv2d"])),
    "no folder": (ValueError, lambda: place_of("")),
    "no model": (AssertionError, lambda: launcher.initialize(config={})),
    "no module": (RuntimeError, lambda: LayerSpec(int)),  # type: ignore[arg-type]
    "experts": (AssertionError, lambda: MoE(4, nn.Linear(4, 4), num_experts=3, ep_size=2)),
}


@pytest.mark.parametrize("case", WITHOUT_MODEL)
def test_what_deepspeed_raises_catches_ours(case: str) -> None:
    kind, call = WITHOUT_MODEL[case]
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, LauncherError)
    assert caught.value.diagnostics


def test_a_wrong_value_is_no_failed_assertion() -> None:
    with pytest.raises(ValueError, match="gradient_clipping") as caught:
        load_config({"gradient_clipping": "high"})
    assert not isinstance(caught.value, AssertionError)


class HalfUsed(nn.Module):
    """A model whose second layer computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


class Own(torch.optim.SGD):
    """A class that no test of the engine has seen."""


def _refusals(rank: int, world_size: int, folder: Path) -> None:
    base = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 0}
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    stage = {"zero_optimization": {"stage": 2, "ignore_unused_parameters": False}}
    checked = {"checkpoint": {"tag_validation": "Fail"}}
    engine = launcher.initialize(model=HalfUsed(), config={**base, **sgd, **stage, **checked})[0]
    inference = launcher.initialize(model=nn.Linear(2, 2), config=base)[0]
    other = nn.Linear(2, 2)

    def step_unused() -> None:
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()

    calls: list[tuple[type[Exception], Callable[[], Any]]] = [
        (AssertionError, lambda: engine.no_sync().__enter__()),
        (AssertionError, lambda: engine.backward(engine(torch.ones(1, 2)))),
        (AssertionError, step_unused),
        (AssertionError, lambda: engine.save_checkpoint(folder, f"of-{rank}")),
        (AssertionError, lambda: inference.backward(inference(torch.ones(1, 2)).sum())),
        (ValueError, lambda: engine._zero3_consolidated_16bit_state_dict()),
        (ValueError, lambda: engine.set_train_batch_size(3)),
        (KeyError, lambda: engine.get_sequence_parallel_group()),
        (
            AssertionError,
            lambda: launcher.initialize(model=other, config={**base, **stage}, optimizer=Own(other.parameters(), 0.1)),
        ),
    ]
    caught: list[Exception] = []
    for kind, call in calls:
        try:
            call()
        except kind as error:
            caught.append(error)
    assert len(caught) == len(calls), caught
    assert all(isinstance(error, LauncherError) for error in caught), caught
    assert not any(str(error).startswith(("'", '"')) for error in caught), (
        caught
    )  # KeyError would show its message quoted


def test_calls_of_an_engine(tmp_path: Path) -> None:
    run_on_ranks(2, _refusals, tmp_path)
