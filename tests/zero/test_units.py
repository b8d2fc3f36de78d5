"""Units over a model: which parameters stand together, what a rank keeps, and who may call what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import nn

from launcher.base.errors import EngineError
from launcher.comm.device import DeviceRuntime
from launcher.comm.groups import RankGroup
from launcher.comm.mesh import ParallelMesh
from launcher.config.policies import STAGES, DType, ParameterPolicy, Precision, ZeroPolicy
from launcher.zero.partition import build_units
from launcher.zero.states import TRANSITIONS, UnitState, check_transition

_GROUP = RankGroup(0, 1, None, DeviceRuntime(torch.device("cpu")))
ALONE = ParallelMesh(_GROUP, _GROUP, _GROUP)
NUM_BLOCKS, WIDTH = 4, 600


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: torch.Tensor = self.last(x)
        return out


@pytest.fixture(autouse=True)
def _blocks_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what stands before the blocks, 5,400 elements, and larger units not joined."""
    monkeypatch.setattr("launcher.sharding.grouping.MIN_UNIT_NUMEL", 5000)


def policy(stage: int = 0, *, bf16: bool = False, max_unit_numel: int = 10**9) -> ZeroPolicy:
    precision = Precision(DType.BF16 if bf16 else DType.FP32)
    return ZeroPolicy(STAGES[stage], precision, max_unit_numel, overlap_comm=True, max_grad_norm=0.0)


def units_of(model: nn.Module, **options: int) -> list[list[str]]:
    groups = {param: 0 for param in model.parameters() if param.requires_grad}
    return [unit.layout.names for unit in build_units(model, groups, policy(**options), ALONE)]


def test_each_block_is_a_unit_and_so_is_what_stands_before_and_after() -> None:
    assert units_of(Blocks()) == [
        ["first.weight", "first.bias"],
        *([f"blocks.{i}.weight", f"blocks.{i}.bias"] for i in range(NUM_BLOCKS)),
        ["last.weight"],
    ]


A_BLOCK = 2 * 40 * 41


@pytest.mark.parametrize(
    ("max_live_numel", "max_unit_numel", "num_units"),
    [(10**9, 10**9, 3), (A_BLOCK, A_BLOCK, 3), (A_BLOCK - 1, 10**9, 6), (10**9, A_BLOCK - 1, 6)],
)
def test_at_stage_3_a_block_is_one_unit_where_it_may_be_live_and_reduced_at_once(
    max_live_numel: int, max_unit_numel: int, num_units: int
) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)) for _ in range(3))
    parameters = ParameterPolicy(prefetch_numel=100, max_live_numel=max_live_numel)  # fetched ahead: less than a block
    stage_3 = replace(policy(3, max_unit_numel=max_unit_numel), parameters=parameters)
    names = [unit.layout.names for unit in build_units(model, dict.fromkeys(model.parameters(), 0), stage_3, ALONE)]
    assert len(names) == num_units
    for part in names:
        assert len({name.split(".")[1] for name in part}) == 1, "no unit spans two blocks"


def test_small_blocks_are_joined() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    assert len(units_of(model)) == 1


def test_tied_and_frozen_parameters() -> None:
    model = Blocks()
    model.blocks[1].weight = model.blocks[0].weight  # read by two blocks: belongs to neither
    model.blocks[2].bias.requires_grad_(False)
    names = units_of(model)
    assert ["blocks.0.weight"] in names
    assert sorted(name for unit in names for name in unit) == sorted(
        n for n, p in model.named_parameters() if p.requires_grad
    )


def test_a_bound_splits_units() -> None:
    for names in units_of(Blocks(), max_unit_numel=1000):
        assert len(names) == 1


def test_parameters_keep_their_identity_shape_and_values() -> None:
    model = Blocks()
    before = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}
    (first, *_) = build_units(model, dict.fromkeys(model.parameters(), 0), policy(), ALONE)
    for name, param in model.named_parameters():
        assert param is before[name][0]
        assert torch.equal(param, before[name][1])
    first.params.flat.zero_()
    assert not model.first.weight.any()  # a view into the flat buffer


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_states_take_the_bytes_of_the_formula(stage: int, bf16: bool) -> None:
    for found, expected in run_on_ranks(2, _model_state_bytes, stage, bf16):
        assert expected <= found <= 1.02 * expected


def _model_state_bytes(rank: int, world_size: int, stage: int, bf16: bool) -> tuple[int, float]:
    """Return the bytes of every buffer that lives from step to step, and the formula of docs/engine.md."""
    import launcher

    model = Blocks()
    num_params = sum(param.numel() for param in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, optimizer, _, _ = launcher.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8, dtype=next(model.parameters()).dtype)).float().mean())
        engine.step()
    tensors: list[torch.Tensor] = []
    for unit in engine._sharded.units:
        for part in (unit.params, unit.grads._local, unit.grads._sum):
            tensors += [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    found = sum(storages.values()) + 4 * optimizer.flat.state_numel()
    parts = {0: 1, 1: world_size, 2: world_size, 3: world_size}[stage]
    params, master = (2, 4) if bf16 else (4, 0)
    params /= world_size if stage == 3 else 1
    grads = 4 / (world_size if stage >= 2 else 1)
    if not bf16:
        return found, num_params * (params + grads + 8 / parts)
    return found, num_params * (params + grads + (master + 8) / parts)


def test_states_only_take_the_steps_of_the_table() -> None:
    for old in UnitState:
        for new in UnitState:
            if new is old or new in TRANSITIONS[old]:
                assert check_transition(old, new) is new
            else:
                with pytest.raises(EngineError, match=f"cannot go from {old.name} to {new.name}"):
                    check_transition(old, new)
