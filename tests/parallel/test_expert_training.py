"""Experts sharded over ranks train as one process does that has all of them and sees the samples of all ranks."""

from __future__ import annotations

import functools
import importlib.util
from collections import Counter
from typing import Any

import pytest
import torch
from harness.train import mixtures
from harness.train.behind import Waits, runs_behind_host
from harness.train.decoder import PARITY_STEPS
from harness.train.ranks import run_on_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import launcher
from launcher.zero.step import first_bad_gradient


def _engine(kind: str, ep_size: int, stage: int, **others: Any) -> Any:
    is_own_layer = kind.startswith("moe")
    model = mixtures.build(kind, ep_size if is_own_layer else 1)
    settings = mixtures.config(stage, 0 if is_own_layer else ep_size, **others)
    return launcher.initialize(model=model, config=settings)[0]


def _trained(
    rank: int, world_size: int, kind: str, ep_size: int, stage: int, num_steps: int, others: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], int]:
    """Return this rank's share of the losses, the whole weights, and how many parameters of experts it has."""
    engine = _engine(kind, ep_size, stage, **others)
    num_own = sum(int(getattr(p, "ds_numel", p.numel())) for p in engine.parameters() if launcher.moe.is_moe_param(p))
    accumulation, losses = engine.gradient_accumulation_steps(), []
    for step in range(num_steps):
        total = 0.0
        for part in range(accumulation):
            loss = mixtures.loss_of(engine, mixtures.batch(kind, step * accumulation + part, rank))
            engine.backward(loss)
            engine.step()
            total += loss.item() / (world_size * accumulation)
        losses.append(total)
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()
    return losses, weights, num_own


def _several(rank: int, world_size: int, runs: list[tuple[Any, ...]]) -> list[Any]:
    return [_trained(rank, world_size, *run) for run in runs]


@functools.cache
def _plain(kind: str, num_ranks: int, num_steps: int, accumulation: int) -> tuple[list[float], dict[str, Tensor]]:
    return mixtures.plain(kind, num_ranks, num_steps, accumulation)


def _check(world_size: int, runs: list[tuple[Any, ...]]) -> None:
    of_ranks = run_on_ranks(world_size, _several, runs)
    for index, (kind, ep_size, stage, num_steps, others) in enumerate(runs):
        accumulation = others.get("gradient_accumulation_steps", 1)
        losses, weights = _plain(kind, world_size, num_steps, accumulation)
        found = [of_rank[index] for of_rank in of_ranks]
        where = f"{kind}, {world_size} ranks, experts over {ep_size}, stage {stage}, {others}"
        total = [sum(parts) for parts in zip(*(each[0] for each in found), strict=True)]
        assert total == pytest.approx(losses, rel=1e-6), where
        for _, own, _ in found:
            assert own.keys() == weights.keys(), where
            for name, value in weights.items():
                if name.endswith("k_proj.bias"):
                    continue  # its gradient is rounding alone
                difference = (own[name] - value).norm() / value.norm().clamp(min=1e-3)
                assert difference <= 3e-6, f"{name} differs by {difference}: {where}"
        assert len({each[2] for each in found}) == 1
        assert found[0][2] * ep_size == sum(
            value.numel() for name, value in weights.items() if "experts." in name and "shared" not in name
        )


@pytest.mark.parametrize("num_steps", PARITY_STEPS)
def test_two_ranks_with_different_experts(num_steps: int) -> None:
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    _check(
        2,
        [
            ("moe", 2, 0, num_steps, {}),
            ("moe", 2, 3, num_steps, {}),
            ("moe with capacity", 2, 1, num_steps, {}),
            ("listed", 2, 2, num_steps, {"gradient_accumulation_steps": 2}),
            ("listed", 2, 2, num_steps, offload),
        ],
    )


@pytest.mark.parametrize("num_steps", PARITY_STEPS)
def test_two_replicas_of_two_sets_of_experts(num_steps: int) -> None:
    _check(
        4,
        [
            ("moe", 2, 0, num_steps, {}),
            ("moe", 2, 2, num_steps, {"gradient_accumulation_steps": 2}),
            ("moe with capacity", 2, 3, num_steps, {}),
            ("listed", 2, 1, num_steps, {}),
            ("listed", 2, 3, num_steps, {"gradient_accumulation_steps": 2}),
            ("listed", 4, 2, num_steps, {}),
        ],
    )


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_mixtures_of_hugging_face_unmodified() -> None:
    _check(2, [(kind, 2, 1, 5, {}) for kind in mixtures.FAMILIES])


def _without_a_token(rank: int, world_size: int) -> tuple[list[int], float, float]:
    engine = _engine("moe", 2, 2)
    loss = engine(mixtures.batch("moe", 0, rank))
    engine.backward(loss)
    counts = engine.module.counts[0].tolist()
    weight = engine.module.layers[0].deepspeed_moe.experts.deepspeed_experts[0].up.weight
    grad, before = launcher.zero.safe_get_full_grad(weight), weight.detach().clone()
    engine.step()
    after = launcher.zero.safe_get_full_fp32_param(weight)
    engine.destroy()
    assert grad is not None
    assert after is not None
    return counts, float(grad.norm()), float((after - before * (1 - mixtures.LR * mixtures.DECAY)).norm())


def test_an_expert_without_a_token_has_a_gradient_of_zero() -> None:
    (counts, norm, moved), (others, other_norm, _) = run_on_ranks(2, _without_a_token)
    assert counts[0] + others[0] == 0
    assert sum(counts) == sum(others) == mixtures.SAMPLES * mixtures.TOKENS
    assert norm == 0
    assert moved < 1e-6  # weight decay acts on it
    assert other_norm > 0


def _bad_gradient(rank: int, world_size: int) -> str | None:
    engine = _engine("listed", 2, 2)
    engine.backward(mixtures.loss_of(engine, mixtures.batch("listed", 0, rank)))
    for name, param in engine.module.named_parameters():
        if name.startswith("layers.1.mlp.experts.3."):
            launcher.zero.safe_set_full_grad(param, torch.full_like(param, torch.inf))
    found = first_bad_gradient(engine._sharded.units, engine._parts.mesh.data)
    engine.destroy()
    return found


def test_a_gradient_that_is_not_finite_is_named_by_the_rank_that_has_the_expert() -> None:
    for name in run_on_ranks(2, _bad_gradient):
        assert name is not None
        assert name.startswith("layers.1.mlp.experts.3.")


def _evaluated(rank: int, world_size: int, kind: str) -> tuple[Tensor, Tensor]:
    sharded, whole = _engine(kind, 2, 1), mixtures.build(kind)
    samples = mixtures.batch(kind, 0, rank)
    sharded.eval()
    whole.eval()
    with torch.no_grad():
        found = sharded(samples[: 1 + rank]), whole(samples[: 1 + rank])  # ranks with different numbers of tokens
    sharded.destroy()
    return found


@pytest.mark.parametrize("kind", ["moe", "moe with capacity", "listed"])
def test_ranks_with_different_numbers_of_tokens(kind: str) -> None:
    for found, wanted in run_on_ranks(2, _evaluated, kind):
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)


def _in_bf16(rank: int, world_size: int) -> list[list[float]]:
    losses = []
    for ep_size in (1, 2):
        engine = _engine("listed", ep_size, 2, bf16={"enabled": True})
        own = []
        for step in range(10):
            loss = engine(mixtures.batch("listed", step, rank).bfloat16())
            engine.backward(loss)
            engine.step()
            own.append(loss.item())
        losses.append(own)
        engine.destroy()
    return losses


def test_in_16_bits_as_with_all_experts_on_every_rank() -> None:
    for whole, sharded in run_on_ranks(2, _in_bf16):
        assert sharded[0] == pytest.approx(whole[0], rel=0.01)
        assert sharded == pytest.approx(whole, rel=0.15)  # a router may choose otherwise where two experts are close


def _trained_by_block(rank: int, world_size: int, *, recomputes: bool) -> list[float]:
    engine = _engine("listed", 2, 1)
    run = functools.partial(checkpoint, use_reentrant=False) if recomputes else lambda block, y: block(y)
    losses = []
    for step in range(3):
        x = mixtures.batch("listed", step, rank)
        model = engine.module
        y = torch.relu(model.first(x))
        for layer in model.layers:
            y = y + run(layer["mlp"], y)[0]
        loss = model.last(y).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def _with_and_without(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    found = [_trained_by_block(rank, world_size, recomputes=recomputes) for recomputes in (True, False)]
    return found[0], found[1]


def test_blocks_that_are_recomputed() -> None:
    for recomputed, kept in run_on_ranks(2, _with_and_without):
        assert recomputed == kept


def _waits(rank: int, world_size: int, kind: str) -> Counter[str]:
    waits = Waits()
    with runs_behind_host(None):
        engine = _engine(kind, 2, 1)
        model = engine.module
        with waits.counting():
            torch.autograd.grad(model(mixtures.batch(kind, 0, rank)), model.first.weight)  # not the engine's own steps
        engine.destroy()
    return waits.counts


@pytest.mark.parametrize("kind", ["moe", "listed"])
def test_a_layer_without_drops_reads_all_its_sizes_at_once(kind: str) -> None:
    num_layers = 2
    assert run_on_ranks(2, _waits, kind) == [Counter({"tolist": num_layers})] * 2
