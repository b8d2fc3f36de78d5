"""`save_16bit_model` and what Hugging Face's libraries call in its place: the whole model, from shards, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.ranks import run_on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn

import launcher
from launcher.base.errors import EngineError
from launcher.engine import weights as weights_module
from launcher.zero.gathered import GatheredParameters

WIDTH = 32
GATHER = "stage3_gather_16bit_weights_on_model_save"


class Tied(nn.Module):
    """An embedding whose weight is the head's, a frozen layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.head.weight = self.embedding.weight
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.frozen.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.norm(self.again(self.frozen(self.embedding(tokens)))))
        return hidden


def _engine(stage: int, gather: bool) -> Any:
    torch.manual_seed(0)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, GATHER: gather}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine = launcher.initialize(model=Tied(), config=config)[0]
    engine.backward(engine(torch.arange(4)).float().square().mean())
    engine.step()
    return engine


def _noting(gathered: list[nn.Parameter]) -> Any:
    """Return what gathers as `GatheredParameters` does, and notes what."""

    def gather(params: list[nn.Parameter]) -> GatheredParameters:
        gathered.extend(params)
        return GatheredParameters(params)

    return gather


def _saved(rank: int, world_size: int, stage: int, folder: str) -> dict[str, Tensor]:
    """Save in every form; return the engine's own state dict."""
    engine = _engine(stage, gather=True)
    assert engine.zero_gather_16bit_weights_on_model_save() is True
    assert engine.save_16bit_model(folder) is True
    assert engine.save_16bit_model(folder, "model.safetensors") is True
    gathered: list[nn.Parameter] = []
    with mock.patch.object(weights_module, "GatheredParameters", _noting(gathered)):
        assert engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True) is True
        trained_alone = engine.module_state_dict(exclude_frozen_parameters=True, prefix="model.")
        of_rank0 = engine.module_state_dict(exclude_frozen_parameters=True, rank0_only=True)
    assert (stage == 3) is bool(gathered)
    assert all(param.requires_grad for param in gathered)
    if stage == 3:
        weights = engine._zero3_consolidated_16bit_state_dict()
        trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        assert (weights is None and trained is None) if rank else set(weights) - set(trained) == FROZEN
    else:
        with pytest.raises(EngineError, match="stage 3"):
            engine._zero3_consolidated_16bit_state_dict()
    state: dict[str, Tensor] = engine.state_dict()
    assert set(trained_alone) == {f"model.{name}" for name in set(state) - FROZEN}
    assert set(of_rank0) == (set() if rank else set(state) - FROZEN)
    return state


FROZEN = {"frozen.weight", "frozen.bias", "again.weight"}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_file_has_the_state_dict_of_the_model(stage: int, tmp_path: Path) -> None:
    state = run_on_ranks(2, _saved, stage, str(tmp_path))[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "pytorch_model.bin", "trained.bin"]
    read = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert read["embedding.weight"].dtype == torch.bfloat16
    for found in (read, load_file(tmp_path / "model.safetensors")):
        assert set(found) == set(state)
        assert all(torch.equal(found[name], value) for name, value in state.items())
    assert read["head.weight"].data_ptr() == read["embedding.weight"].data_ptr()
    assert set(torch.load(tmp_path / "trained.bin", weights_only=True)) == set(state) - FROZEN
    assert Tied().to(torch.bfloat16).load_state_dict(read)


def _not_gathered(rank: int, world_size: int, folder: str) -> tuple[bool, bool]:
    engine = _engine(3, gather=False)
    return engine.zero_gather_16bit_weights_on_model_save(), engine.save_16bit_model(folder)


def test_at_stage_3_nothing_is_written_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert run_on_ranks(2, _not_gathered, str(tmp_path / "new")) == [(False, False)] * 2
    assert not (tmp_path / "new").exists()


def _failing(rank: int, world_size: int, folder: str) -> str:
    engine = _engine(3, gather=True)
    with pytest.raises(EngineError) as caught:
        engine.save_16bit_model(folder)
    return str(caught.value)


def test_every_rank_learns_that_the_file_was_not_written(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("no folder")
    first, second = run_on_ranks(2, _failing, str(place))
    assert f"{place}/pytorch_model.bin: the weights were not written" in first
    assert "see the error of rank 0" in second
