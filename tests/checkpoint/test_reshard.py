"""A checkpoint is loaded at any number of ranks, stage, division and offload: bit by bit the same state."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train.checkpoint_runs import FullState, differences, full_state, make_engine, train
from harness.train.ranks import run_on_ranks

STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 4)
NUM_STEPS = 3
Losses = dict[str, list[float]]


def _name(stage: int, world_size: int) -> str:
    return f"stage {stage} on {world_size}"


NAMES = [_name(stage, world_size) for world_size in WORLDS for stage in STAGES]


def _save_all(rank: int, world_size: int, folder: str, num_next: int) -> Losses:
    """Train and save at every stage. Returns the losses of the `num_next` steps after the save."""
    losses = {}
    for stage in STAGES:
        root = Path(folder, _name(stage, world_size))
        engine = make_engine(world_size, stage)
        train(engine, NUM_STEPS)
        engine.save_checkpoint(root)
        full = full_state(engine)
        if rank == 0:
            torch.save(full, root / "full.pt")
        losses[root.name] = train(engine, num_next)
        engine.destroy()
    return losses


def _sources_of(stage: int, world_size: int) -> list[str]:
    """Return what a setting loads in the short form: its own, and two others.

    Over all settings, every stage is loaded at every stage and on every number of ranks, and so is what every number of
    ranks has saved.
    """
    at, num_stages, num_worlds = WORLDS.index(world_size), len(STAGES), len(WORLDS)
    others = [
        _name((stage + 1 + (at + shift) % num_worlds) % num_stages, WORLDS[(at + shift) % num_worlds])
        for shift in (1, 2)
    ]
    return [_name(stage, world_size), *others]


def _load_all(rank: int, world_size: int, folder: str, expected: Losses, is_short: bool) -> list[str]:
    """Load checkpoints at every stage, in the long form all of them. Returns what was not as it must be."""
    problems = []
    full: dict[str, FullState] = {
        source: torch.load(Path(folder, source, "full.pt"), weights_only=True) for source in expected
    }
    for stage in STAGES:
        engine = make_engine(world_size, stage)
        here = _name(stage, world_size)
        for source in _sources_of(stage, world_size) if is_short else NAMES:
            engine.load_checkpoint(Path(folder, source))
            problems += [f"{source} -> {here}: {each}" for each in differences(engine, full[source])]
            if engine.global_steps != NUM_STEPS:
                problems.append(f"{source} -> {here}: {engine.global_steps} steps")
            losses = train(engine, len(expected[source]))
            worst = max(abs(a / b - 1) for a, b in zip(losses, expected[source], strict=True))
            # Sums over another number of ranks run in another order.
            if worst > (0.0 if source == here else 1e-6):
                problems.append(f"{source} -> {here}: losses differ by {worst:.1e}")
        engine.destroy()
    return problems


@pytest.mark.parametrize(
    "is_short", [pytest.param(True, marks=pytest.mark.long), pytest.param(False, marks=pytest.mark.soak)]
)
def test_every_setting_loads_what_every_other_one_saved(tmp_path: Path, is_short: bool) -> None:
    num_next = 4 if is_short else 10  # the warm-up of the learning rate ends within either
    expected: Losses = {}
    for world_size in WORLDS:
        expected |= run_on_ranks(world_size, _save_all, str(tmp_path), num_next)[0]
    assert list(expected) == NAMES
    for world_size in WORLDS:
        for problems in run_on_ranks(world_size, _load_all, str(tmp_path), expected, is_short):
            assert problems == []


# ---- further divisions, precisions and places ----


@dataclass(frozen=True)
class Setting:
    """How a run is set up."""

    world_size: int
    stage: int
    zero: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def engine(self, folder: str) -> Any:
        """Return an engine. folder: for offloading to disk."""
        zero = {
            key: {**value, "nvme_path": folder} if "nvme" in str(value) else value for key, value in self.zero.items()
        }
        return make_engine(self.world_size, self.stage, zero=zero, **self.more)


HOST, DISK = {"device": "cpu"}, {"device": "nvme"}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
RUNS = {
    "MiCS 2 x 2": Setting(4, 3, {"mics_shard_size": 2}),
    "hpZ 2 x 2": Setting(4, 3, {"zero_hpz_partition_size": 2}),
    "host optimizer 2": Setting(2, 2, {"offload_optimizer": HOST}),
    "host parameters 3": Setting(2, 3, {"offload_optimizer": HOST, "offload_param": HOST}),
    "disk 3": Setting(2, 3, {"offload_optimizer": DISK, "offload_param": DISK}),
    "torch's kernel": Setting(2, 1, env={"LAUNCH_CPU_KERNEL": "off"}),
    "plain 1": Setting(1, 0),
    "plain 3": Setting(2, 3),
}
"""Those of one precision load one another's."""


def _in_turn(rank: int, world_size: int, folder: str, names: list[str], more: dict[str, Any], saves: bool) -> list[str]:
    problems = []
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            setting = RUNS[name]
            setting = Setting(setting.world_size, setting.stage, setting.zero, {**setting.more, **more}, setting.env)
            for key, value in setting.env.items():
                patch.setenv(key, value)
            engine = setting.engine(str(Path(folder, "disk")))
            if saves:
                train(engine, NUM_STEPS)
                engine.save_checkpoint(Path(folder, name))
                full = full_state(engine)
                if rank == 0:
                    torch.save(full, Path(folder, f"{name}.pt"))
            else:
                for source in RUNS:
                    engine.load_checkpoint(Path(folder, source))
                    full = torch.load(Path(folder, f"{source}.pt"), weights_only=True)
                    problems += [f"{source} -> {name}: {each}" for each in differences(engine, full)]
                train(engine, 1)
            engine.destroy()
            patch.undo()
    return problems


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param(BF16, marks=pytest.mark.soak), pytest.param(FP16, marks=pytest.mark.soak)],
    ids=["fp32", "bf16", "fp16"],
)
def test_divisions_and_offload_load_one_another(tmp_path: Path, more: dict[str, Any]) -> None:
    (tmp_path / "disk").mkdir()
    for saves in (True, False):
        for world_size in (1, 2, 4):
            names = [name for name, setting in RUNS.items() if setting.world_size == world_size]
            for problems in run_on_ranks(world_size, _in_turn, str(tmp_path), names, more, saves):
                assert problems == []
