"""Buffers keep the type they have in 16-bit runs: rotary frequencies, tables of positions, running statistics.

Losses are those of the model that transformers itself makes in bf16, whose frequencies are in fp32, with tokens as far
apart as 16 bits of an angle would show. Batch norms are compared with torch's own function.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.logs import logged
from harness.train import split_models
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import launcher

ROTARY = ("llama", "qwen3", "gpt_neox", "gemma", "gemma3", "phi3")
SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 2": {"zero_optimization": {"stage": 2}},
    "stage 3": {"zero_optimization": SHARDED},
    "Init": {"zero_optimization": SHARDED},
    "tensor": {"zero_optimization": {"stage": 0}, "tensor_parallel": {"autotp_size": 2}},
    "pipeline": {"zero_optimization": {"stage": 0}, "pipeline": {"stages": 2}},
}


def configured(name: str = "stage 0", dtype: str = "bf16", **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        dtype: {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **SETTINGS[name],
        **more,
    }


def build(name: str) -> Any:
    """Return a decoder in fp32 whose attention looks at certain tokens."""
    model = split_models.build(name)
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.3)
    return model.eval()


def far_apart() -> dict[str, Tensor]:
    """Return a batch at positions up to 5,400. The mask says that it is one document."""
    tokens = split_models.tokens(3)
    positions = (torch.arange(tokens.shape[1]) * 600).expand_as(tokens)
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions, "attention_mask": torch.ones_like(tokens)}


def _losses(rank: int, world_size: int, setting: str) -> dict[str, tuple[float, set[torch.dtype]]]:
    found = {}
    for name in ROTARY:
        config = configured(setting)
        model = build(name)
        if setting == "Init":
            launcher.zero.Init(model, config=config)
        engine = launcher.initialize(model=model, config=config)[0]
        if setting == "pipeline":
            loss = engine.eval_batch(iter([far_apart()]), num_micro_batches=1)
        else:
            loss = engine.eval()(**far_apart()).loss
        found[name] = loss.item(), {buffer.dtype for buffer in engine.module.buffers() if buffer.is_floating_point()}
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, float]]:
    """The losses of transformers' own bf16 models, and of those with frequencies in bf16."""
    pytest.importorskip("transformers")
    found = {}
    for name in ROTARY:
        path = tmp_path_factory.mktemp(name)
        model = build(name)
        model.save_pretrained(path)
        own = type(model).from_pretrained(path, dtype=torch.bfloat16).eval()
        loss = own(**far_apart()).loss.item()
        found[name] = loss, own.to(torch.bfloat16)(**far_apart()).loss.item()
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_far_apart_have_the_loss_of_transformers_own_model(
    setting: str, references: dict[str, tuple[float, float]]
) -> None:
    for losses in run_on_ranks(2, _losses, setting):
        for name, (loss, dtypes) in losses.items():
            expected, rounded = references[name]
            assert dtypes == {torch.float32}, name
            assert rounded != expected, name
            if setting == "tensor":  # its sums over ranks are of bf16 numbers
                assert loss == pytest.approx(expected, rel=4e-3), name
            else:
                assert loss == expected, (name, references[name])


# ---- running statistics ----


class Normed(nn.Module):
    """A batch norm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 3, length] -> [batch, 1]"""
        out: Tensor = self.last(self.norm(self.first(x)).mean(2))
        return out


def _normalized(rank: int, world_size: int, stage: int, dtype: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return a gradient's weight, statistics and outputs of the engine, and of torch's function on the same inputs."""
    torch.manual_seed(5)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = launcher.initialize(
        model=Normed(), config=configured(dtype=dtype, zero_optimization=zero, gradient_clipping=0.0)
    )[0]
    half = torch.bfloat16 if dtype == "bf16" else torch.float16
    mean, variance, found, expected = torch.zeros(4), torch.ones(4), [], []
    norm = engine.module.norm

    def also_by_torch(_module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        weight, bias = norm.weight.float(), norm.bias.float()
        wanted = F.batch_norm(args[0], mean, variance, weight, bias, training=norm.training)
        found.extend([output, norm.running_mean.clone(), norm.running_var.clone()])
        expected.extend([wanted, mean.clone(), variance.clone()])

    norm.register_forward_hook(also_by_torch)
    for step in range(3):
        x = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(step)).to(half)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    engine.eval()(x)
    return [each.detach().clone() for each in found], [each.detach().clone() for each in expected]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_batch_norm_has_statistics_in_fp32(stage: int, dtype: str) -> None:
    for found, expected in run_on_ranks(2, _normalized, stage, dtype):
        assert len(found) == 12
        assert {each.dtype for each in found[1::3]} == {torch.float32}
        for own, torchs in zip(found, expected, strict=True):
            assert torch.equal(own, torchs)


# ---- the hint for a model that mixes types ----


class Added(nn.Module):
    """Adds a table to what a layer made, and gives the sum to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4] -> the same."""
        out: Tensor = self.last(self.first(x) + self.table)
        return out


def test_a_forward_that_mixes_types_is_explained() -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    engine = launcher.initialize(model=Added(), config=configured())[0]
    with logged() as lines, pytest.raises(RuntimeError, match="dtype"):
        engine(x)
    (line,) = [line for line in lines if "mixed types" in line]
    assert "1 buffers have kept their type, such as table (torch.float32)" in line
    assert '"data_types": {"buffer_dtype": "bf16"}' in line
    engine = launcher.initialize(model=Added(), config=configured(data_types={"buffer_dtype": "bf16"}))[0]
    assert engine(x).dtype == torch.bfloat16
