"""Checkpoints of sharded experts: whole in the files, loaded by ranks with any others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train import mixtures
from harness.train.ranks import run_on_ranks
from torch import Tensor

import launcher
from launcher.base.errors import EngineError
from launcher.base.timeouts import Timeouts
from launcher.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from launcher.checkpoint_files.summary import summary_of
from launcher.checkpoint_files.verify import verify
from launcher.parallel.expert import whole


def _engine(kind: str, ep_size: int, stage: int, *, freezes: bool = False, **others: Any) -> Any:
    is_own_layer = kind.startswith("moe")
    model = mixtures.build(kind, ep_size if is_own_layer else 1)
    if freezes:
        for name, param in model.named_parameters():
            param.requires_grad_("up." not in name)
    settings = mixtures.config(stage, 0 if is_own_layer or ep_size == 1 else ep_size, **others)
    return launcher.initialize(model=model, config=settings)[0]


def _step(engine: Any, kind: str, step: int, rank: int) -> float:
    loss = mixtures.loss_of(engine, mixtures.batch(kind, step, rank))
    engine.backward(loss)
    engine.step()
    return float(loss)


def _saved(
    rank: int, world_size: int, folder: str, kind: str, ep_size: int, stage: int, freezes: bool
) -> tuple[dict[str, Tensor], float]:
    """Take a step, save, take another one; return the weights as they were saved, and the loss of the second."""
    engine = _engine(kind, ep_size, stage, freezes=freezes)
    _step(engine, kind, 0, rank)
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.save_checkpoint(folder, tag="first", exclude_frozen_parameters=False)
    engine.save_16bit_model(folder, "weights.safetensors") if stage < 3 else None
    loss = _step(engine, kind, 1, rank)
    engine.destroy()
    return weights, loss


def _loaded(
    rank: int, world_size: int, folder: str, kind: str, ep_size: int, stage: int, freezes: bool
) -> tuple[dict[str, Tensor], float]:
    engine = _engine(kind, ep_size, stage, freezes=freezes)
    with torch.no_grad():
        engine.load_state_dict({name: torch.zeros_like(value) for name, value in engine.state_dict().items()})
    engine.load_checkpoint(folder, tag="first")
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    loss = _step(engine, kind, 1, rank)
    engine.destroy()
    return weights, loss


def _check_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


KINDS = [
    "moe",
    "listed",
    pytest.param(
        "mixtral",
        marks=pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers"),
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_by_some_ranks_and_loaded_by_others(kind: str, tmp_path: Path) -> None:
    num_ranks = 2 if kind == "mixtral" else 4  # each rank imports transformers, which takes seconds
    saved = run_on_ranks(num_ranks, _saved, str(tmp_path), kind, 2, 2, False)
    weights, losses = saved[0][0], [loss for _, loss in saved]
    assert set(weights) == set(mixtures.build(kind).state_dict())
    _check_same(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "first"), weights)
    assert verify(tmp_path / "first") == []
    listed = {param.name: param.shape for param in summary_of(tmp_path / "first").params}
    assert listed == {name: tuple(weights[name].shape) for name in listed}
    if kind != "moe":  # its experts are copies of one on every rank where they are not sharded
        from safetensors.torch import load_file

        _check_same(load_file(tmp_path / "weights.safetensors"), weights)
    for ep_size, stage in ((num_ranks, 1), (1, 3), (2, 0)):
        found_by = run_on_ranks(num_ranks, _loaded, str(tmp_path), kind, ep_size, stage, False)
        for (found, loss), saved_loss in zip(found_by, losses, strict=True):
            _check_same(found, weights)
            assert loss == pytest.approx(saved_loss, rel=1e-6)
    for found, _ in run_on_ranks(2, _loaded, str(tmp_path), kind, 2, 3, False):
        _check_same(found, weights)


def test_frozen_experts(tmp_path: Path) -> None:
    saved = run_on_ranks(2, _saved, str(tmp_path), "listed", 2, 1, True)
    for found, loss in run_on_ranks(2, _loaded, str(tmp_path), "listed", 1, 1, True):
        _check_same(found, saved[0][0])
        assert loss in [pytest.approx(each[1], rel=1e-6) for each in saved]


def _continued(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float]]:
    """Save by a run without expert parallelism, and continue with it."""
    first = _engine("listed", 1, 1)
    _step(first, "listed", 0, rank)
    first.save_checkpoint(folder, tag="whole")
    wanted = [_step(first, "listed", step, rank) for step in (1, 2)]
    first.destroy()
    sharded = _engine("listed", 2, 2)
    sharded.load_checkpoint(folder, tag="whole")
    found = [_step(sharded, "listed", step, rank) for step in (1, 2)]
    sharded.destroy()
    return found, wanted


def test_a_run_without_spread_experts_continues_with_them(tmp_path: Path) -> None:
    for found, wanted in run_on_ranks(2, _continued, str(tmp_path)):
        assert found == pytest.approx(wanted, rel=1e-6)


def _without_frozen(rank: int, world_size: int, folder: str) -> tuple[set[str], set[str]]:
    engine = _engine("listed", 2, 2, freezes=True)
    engine.save_checkpoint(folder, tag="part", exclude_frozen_parameters=True)
    trained = set(engine.module_state_dict(exclude_frozen_parameters=True))
    engine.load_checkpoint(folder, tag="part", load_module_strict=False)
    names = set(engine.state_dict())
    engine.destroy()
    return trained, names


def test_what_is_frozen_is_left_out(tmp_path: Path) -> None:
    everything = {name for name, _ in mixtures.build("listed").named_parameters()}
    trained = {name for name in everything if "up." not in name}
    for found, names in run_on_ranks(2, _without_frozen, str(tmp_path)):
        assert found == trained
        assert names == everything
    assert set(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "part")) == trained


def _asked_of_the_model(rank: int, world_size: int, kind: str) -> str:
    engine = _engine(kind, 2, 2)
    _check_same(engine.module.state_dict(), engine.state_dict())
    said = ""
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(whole, "timeouts", lambda: Timeouts(other_ranks_s=0.05))
            with pytest.raises(EngineError) as error:
                engine.module.state_dict()
            said = str(error.value)
    engine.any_rank(False)  # wait for rank 0
    _check_same(engine.module.state_dict(), engine.state_dict())
    engine.destroy()
    return said


def _keys_in_the_store(rank: int, world_size: int) -> list[int]:
    engine, found = _engine("listed", 2, 2), []
    store = torch.distributed.distributed_c10d._get_default_store()
    for _ in range(4):
        engine.module.state_dict()
        engine.any_rank(False)  # all have called
        found.append(store.num_keys())
        engine.any_rank(False)  # all have counted
    engine.destroy()
    return found


def test_meeting_for_a_state_dict_leaves_no_keys_behind() -> None:
    for first, *others in run_on_ranks(2, _keys_in_the_store):
        assert others == [first] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_own_state_dict_is_whole_or_an_error(kind: str) -> None:
    said, _ = run_on_ranks(2, _asked_of_the_model, kind)
    assert "not all of them asked for its state dict" in said
