"""What beside plain parameters is saved and loaded: buffers of each rank, groups, frozen parameters, other states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train.checkpoint_runs import WIDTH, config, differences, full_state, make_engine, make_net, train
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn

import launcher
from launcher.base.errors import CheckpointError


def _said(engine: Any, folder: str, **options: Any) -> str:
    try:
        engine.load_checkpoint(folder, **options)
    except CheckpointError as error:
        return str(error)
    return ""


# ---- frozen parameters ----


def _without_frozen(rank: int, world_size: int, folder: str, stage: int) -> list[Any]:
    engine = make_engine(world_size, stage)
    train(engine, 1)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    full = full_state(engine)
    engine.destroy()
    model = make_net()
    with torch.no_grad():
        model.scale.fill_(0.25)
    engine = launcher.initialize(model=model, config=config(world_size, stage))[0]
    said = _said(engine, folder)
    engine.load_checkpoint(folder, load_module_strict=False)
    facts = [said, differences(engine, {**full, "scale": {"weight": torch.full((WIDTH,), 0.25)}})]
    engine.destroy()
    return facts


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_can_be_left_out(tmp_path: Path, stage: int) -> None:
    for said, differs in run_on_ranks(2, _without_frozen, str(tmp_path), stage):
        assert "the model has scale" in said
        assert "load_module_strict=False" in said
        assert differs == []


# ---- weights that a function of the script loads ----


def _doubled(src: dict[str, Tensor], dst: nn.Module) -> None:
    with torch.no_grad():
        for name, param in dst.named_parameters():
            param.copy_(2 * src[name])


def _resized(src: dict[str, Tensor], dst: nn.Module) -> None:
    with torch.no_grad():
        for name, param in dst.named_parameters():
            param.copy_(src[name][: len(param)])


def _by_function(rank: int, world_size: int, folder: str, stage: int) -> list[Any]:
    engine = make_engine(world_size, stage)
    train(engine, 1)
    engine.save_checkpoint(folder)
    full = full_state(engine)
    train(engine, 1)
    engine.load_checkpoint(folder, custom_load_fn=_doubled)
    twice = {name: {**each, "weight": 2 * each["weight"]} for name, each in full.items()}
    facts: list[Any] = [differences(engine, twice)]
    train(engine, 1)
    engine.destroy()
    torch.manual_seed(0)
    wide = launcher.initialize(model=nn.Linear(8, 6), config=config(world_size, stage))[0]
    wide.save_checkpoint(folder, "wide")
    saved = {name: each["weight"] for name, each in full_state(wide).items()}
    wide.destroy()
    narrow = launcher.initialize(model=nn.Linear(8, 4), config=config(world_size, stage))[0]
    facts.append(_said(narrow, folder, tag="wide", custom_load_fn=_resized))
    narrow.load_checkpoint(folder, "wide", load_optimizer_states=False, custom_load_fn=_resized)
    weights = {name: each["weight"] for name, each in full_state(narrow).items()}
    facts.append(all(torch.equal(weights[name], saved[name][: len(weights[name])]) for name in weights))
    narrow.destroy()
    return facts


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_function_of_the_script_may_load_the_weights_also_into_other_shapes(tmp_path: Path, stage: int) -> None:
    for differs, said, is_resized in run_on_ranks(2, _by_function, str(tmp_path), stage):
        assert differs == []
        assert "has the shape [6, 8] in the checkpoint, [4, 8] in the model" in said
        assert is_resized


# ---- buffers that differ between ranks ----


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(7, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [batch, 7] -> mean loss, fp32."""
        return (self.norm(self.up(x)) - y.sum()).square().mean()


def _normed(rank: int, world_size: int, folder: str, saves: bool) -> list[Any]:
    torch.manual_seed(1)
    engine = launcher.initialize(model=Normed(), config=config(world_size, 2))[0]
    if saves:
        train(engine, 2)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    found = [engine.module.norm.running_mean.clone(), int(engine.module.norm.num_batches_tracked), train(engine, 3)]
    engine.destroy()
    return found


def test_every_rank_gets_its_own_buffers_back_and_other_worlds_those_of_rank_0(tmp_path: Path) -> None:
    saved = run_on_ranks(2, _normed, str(tmp_path), True)
    assert not torch.equal(saved[0][0], saved[1][0])
    loaded = run_on_ranks(2, _normed, str(tmp_path), False)
    for before, after in zip(saved, loaded, strict=True):
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
    ((alone, num_batches, _),) = run_on_ranks(1, _normed, str(tmp_path), False)
    assert torch.equal(alone, saved[0][0])
    assert num_batches == 2


# ---- groups, and optimizers of the script ----


class Leaky(torch.optim.Optimizer):
    """SGD with a state that has another length than its parameter, and one of a single value."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                history = state.setdefault("history", torch.zeros(5))
                state["count"] = state.get("count", 0) + 1
                history[state["count"] % 5] += param.grad.square().sum()
                param -= group["lr"] / (1 + history.sum()) * param.grad


def _groups(model: Any) -> list[dict[str, Any]]:
    rest = [param for name, param in model.named_parameters() if param.requires_grad and "down" not in name]
    return [
        {"params": list(model.down.parameters()), "lr": 3e-3, "note": "down"},
        {"params": rest, "weight_decay": 0.0},
    ]


def _engine(world_size: int, kind: str, stage: int) -> Any:
    model = make_net()
    settings = config(world_size, stage)
    if kind == "groups":
        return launcher.initialize(model=model, model_parameters=_groups(model), config=settings)[0]
    del settings["scheduler"]
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = Leaky(trained) if kind == "leaky" else torch.optim.Adam(trained, lr=0.02, amsgrad=True)
    settings["zero_allow_untested_optimizer"] = True
    return launcher.initialize(model=model, optimizer=optimizer, config=settings)[0]


def _save_and_load(rank: int, world_size: int, folder: str, kind: str) -> list[Any]:
    engine = _engine(world_size, kind, 0)
    train(engine, 2)
    engine.optimizer.param_groups[0]["lr"] = 0.0125
    engine.save_checkpoint(folder)
    full, losses = full_state(engine), train(engine, 3)
    engine.destroy()
    engine = _engine(world_size, kind, 0)
    engine.load_checkpoint(folder)
    facts: list[Any] = [differences(engine, full), train(engine, 3) == losses]
    engine.load_checkpoint(folder)
    facts.append(engine.optimizer.param_groups[0]["lr"])
    engine.destroy()
    other = make_engine(world_size, 1)
    facts.append(_said(other, folder))
    other.load_checkpoint(folder, load_optimizer_states=False)
    engine = _engine(world_size, kind, 2)
    facts.append(_said(engine, folder))
    engine.destroy()
    return facts


@pytest.mark.parametrize("kind", ["groups", "client Adam", "leaky"])
def test_groups_and_client_optimizers_continue(tmp_path: Path, kind: str) -> None:
    for differs, is_same, rate, said_by_other, said_at_2 in run_on_ranks(2, _save_and_load, str(tmp_path), kind):
        assert (differs, is_same, rate) == ([], True, 0.0125)
        assert "this run has AdamW with 1 groups" in said_by_other
        assert "load_optimizer_states=False" in said_by_other
        assert ("cannot be divided otherwise" in said_at_2) == (kind == "leaky")


# ---- layers in tiles ----

LARGE = 2**10


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, LARGE), nn.Linear(LARGE, LARGE)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [batch, 7] -> mean loss, fp32."""
        return (self.down(self.up(x)) - y.sum()).square().mean()


def _tiled(rank: int, world_size: int, folder: str, bound: int, saves: bool) -> list[Any]:
    torch.manual_seed(1)
    settings = config(world_size, 3, zero={"stage3_max_live_parameters": bound})
    engine = launcher.initialize(model=Large(), config=settings)[0]
    if saves:
        train(engine, 1)
        engine.save_checkpoint(folder)
        found: list[Any] = [train(engine, 2)]
    else:
        found = [_said(engine, folder)]
        found.append([] if found[0] else train(engine, 2))
    engine.destroy()
    return found


def test_tiles_are_loaded_into_the_same_tiles(tmp_path: Path) -> None:
    ((losses,), _) = run_on_ranks(2, _tiled, str(tmp_path), 2**19, True)
    assert run_on_ranks(2, _tiled, str(tmp_path), 2**19, False)[0] == ["", losses]
    for bound, world_size in ((10**9, 2), (2**19, 1)):  # one rank tiles nothing
        for said, _ in run_on_ranks(world_size, _tiled, str(tmp_path), bound, False):
            assert "the model has down.weight; only the checkpoint has down.tiles.0.weight" in said


# ---- states that are not by element, on other ranks ----


def _leaky(rank: int, world_size: int, folder: str, saves: bool) -> list[Any]:
    engine = _engine(world_size, "leaky", 2)
    if saves:
        train(engine, 2)
        engine.save_checkpoint(folder)
        found: list[Any] = ["", train(engine, 2)]
    else:
        found = [_said(engine, folder)]
        found.append([] if found[0] else train(engine, 2))
    engine.destroy()
    return found


def test_states_of_parts_are_loaded_for_the_same_parts_only(tmp_path: Path) -> None:
    saved = run_on_ranks(2, _leaky, str(tmp_path), True)
    assert run_on_ranks(2, _leaky, str(tmp_path), False) == saved
    ((said, _),) = run_on_ranks(1, _leaky, str(tmp_path), False)
    assert "cannot be divided otherwise" in said


# ---- buffers of another shape ----


def _narrower(rank: int, world_size: int, folder: str) -> str:
    engine = make_engine(world_size, 1)
    engine.module.seen = torch.zeros(1)
    engine.save_checkpoint(folder)
    engine.module.seen = torch.zeros(3)
    said = _said(engine, folder)
    engine.destroy()
    return said


def test_a_buffer_of_another_shape_is_refused(tmp_path: Path) -> None:
    (said,) = run_on_ranks(1, _narrower, str(tmp_path))
    assert "the buffer seen has the shape [1] in the checkpoint, [3] in the model" in said
