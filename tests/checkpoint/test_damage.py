"""What is damaged, missing, exchanged or from elsewhere is named on every rank when it is loaded, and harms nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness.train.checkpoint_runs import full_state, loads, make_engine, train
from harness.train.ranks import run_on_ranks
from torch import Tensor

from launcher.base.errors import CheckpointError, EngineError
from launcher.zero.unit import FlatUnit

TAG = "global_step1"


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def _swap(folder: Path, ending: str) -> None:
    first, second = (folder / f"rank-{rank:05}{ending}" for rank in (0, 1))
    first.rename(folder / "between")
    second.rename(first)
    (folder / "between").rename(second)


def _cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, path.stat().st_size + num_bytes)


def _flip_in(path: Path, prefix: str) -> None:
    """Change a bit of the first tensor whose key begins so."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    first, *_ = [value for key, value in json.loads(data[8 : 8 + length]).items() if key.startswith(prefix)]
    _flip(path, 8 + length + first["data_offsets"][0])


# What is done to the folder of a checkpoint -> what the error says, a place among it.
DAMAGES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "a bit of a weight": (
        lambda at: _flip_in(at / "rank-00000.safetensors", "weight/"),
        ("rank-00000.safetensors", "block 0 of weight/"),
    ),
    "a bit of a state": (
        lambda at: _flip_in(at / "rank-00001.safetensors", "state/"),
        ("rank-00001.safetensors", "block 0 of state/"),
    ),
    "a bit of a header": (lambda at: _flip(at / "rank-00001.safetensors", 20), ("rank-00001.safetensors", "header")),
    "random numbers of one rank": (
        lambda at: _flip_in(at / "rank-00001.safetensors", "private/"),
        ("rank-00001.safetensors", "block 0 of private/"),
    ),
    "a bit of checksums": (lambda at: _flip(at / "rank-00000.json", 50), ("rank-00000.json", "damaged")),
    "a bit of the state": (lambda at: _flip(at / "state.json", 500), ("state.json", "damaged")),
    "a bit of the manifest": (lambda at: _flip(at / "manifest.json", 200), ("manifest.json", "damaged")),
    "a short shard": (lambda at: _cut(at / "rank-00001.safetensors", -8), ("rank-00001.safetensors", "cut off")),
    "a long shard": (lambda at: _cut(at / "rank-00000.safetensors", 8), ("rank-00000.safetensors", "bytes")),
    "an empty shard": (lambda at: os.truncate(at / "rank-00000.safetensors", 0), ("rank-00000.safetensors",)),
    "an empty manifest": (lambda at: os.truncate(at / "manifest.json", 0), ("manifest.json",)),
    "swapped shards": (lambda at: _swap(at, ".safetensors"), ("rank-0000",)),
    "swapped checksums": (lambda at: _swap(at, ".json"), ("rank-0000", "json")),
    "a missing shard": (lambda at: (at / "rank-00001.safetensors").unlink(), ("rank-00001.safetensors", "No such")),
    "a missing state": (lambda at: (at / "state.json").unlink(), ("state.json", "No such")),
    "a missing manifest": (lambda at: (at / "manifest.json").unlink(), (TAG, "manifest.json")),
    "a missing folder": (shutil.rmtree, (TAG, "there is no checkpoint")),
    "a folder of DeepSpeed's": (
        lambda at: [path.rename(at / f"mp_rank_{index}.pt") for index, path in enumerate(at.iterdir())],
        (TAG, "nor files of DeepSpeed"),
    ),
    "another tag's manifest": (lambda at: at.rename(at.with_name("other")), (TAG, "there is no checkpoint")),
    "nonsense in latest": (lambda at: (at.parent / "latest").write_bytes(b"\xff\xfe"), ("latest", "cannot be read")),
    "a path in latest": (lambda at: (at.parent / "latest").write_text("../../etc"), ("latest", "names no checkpoint")),
    "no text in latest": (lambda at: (at.parent / "latest").write_text(""), ("latest", "names no checkpoint")),
}


def _load_damaged(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    engine = make_engine(world_size, 2)
    train(engine, 1)
    good = Path(folder, "good")
    engine.save_checkpoint(good)
    full = full_state(engine)
    said: dict[str, Any] = {}
    for name, (damage, _) in DAMAGES.items():
        copy = Path(folder, name)
        if rank == 0:
            shutil.copytree(good, copy)
            damage(copy / TAG)
        engine.any_rank(False)
        try:
            engine.load_checkpoint(copy)
            said[name] = "it was loaded"
        except CheckpointError as error:
            said[name] = str(error)
        if differs := loads(engine, good, full):
            said[name] += f"; then {differs}"
    said["losses"] = train(engine, 1)
    engine.destroy()
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what loading said of every damage, by rank."""
    return run_on_ranks(2, _load_damaged, str(tmp_path_factory.mktemp("damaged")))


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_named_on_every_rank(said: list[dict[str, Any]], name: str) -> None:
    for of_rank in said:
        for part in DAMAGES[name][1]:
            assert part in of_rank[name]
        assert "; then" not in of_rank[name]


def _load_elsewhere(rank: int, world_size: int, folder: str) -> list[Any]:
    engine = make_engine(world_size, 1)
    engine.save_checkpoint(Path(folder, "there"))
    found = [engine.load_checkpoint(Path(folder, "nowhere"))]
    for arguments in ((Path(folder, "nowhere"), "tag"), (Path(folder, "there"), f"tag{rank}")):
        try:
            engine.load_checkpoint(*arguments)
        except CheckpointError as error:
            found.append(str(error))
    real = os.preadv

    def failing(file: int, *rest: Any) -> int:
        if rank == 1 and "rank-00000.safetensors" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(5, "Input/output error")
        return real(file, *rest)

    with mock.patch("os.preadv", failing):
        try:
            engine.load_checkpoint(Path(folder, "there"))
        except CheckpointError as error:
            found.append(str(error))
    engine.destroy()
    return found


def test_what_is_not_there_or_cannot_be_read(tmp_path: Path) -> None:
    for nothing, missing, differing, unreadable in run_on_ranks(2, _load_elsewhere, str(tmp_path)):
        assert nothing == (None, None)
        assert str(tmp_path / "nowhere" / "tag") in missing
        assert "ranks load different tags: tag0, tag1" in differing
        assert "rank 1: " in unreadable
        assert "rank-00000.safetensors: it cannot be read: Input/output error" in unreadable


def _load_onto_disk(rank: int, world_size: int, folder: str) -> tuple[str, list[str]]:
    """Load a damaged checkpoint while states are on a disk; return what it said, and what differs after a good one."""
    there = {"device": "nvme", "nvme_path": folder}
    engine = make_engine(world_size, 3, zero={"offload_optimizer": there})
    train(engine, 1)
    good, damaged = Path(folder, "good"), Path(folder, "damaged")
    engine.save_checkpoint(good)
    full = full_state(engine)
    if rank == 0:
        shutil.copytree(good, damaged)
        _flip_in(damaged / TAG / "rank-00001.safetensors", "state/")
    engine.any_rank(False)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(damaged)
    problems = [f"{shard.name} has a state without memory" for shard in _without_memory(engine)] if rank else []
    train(engine, 1)
    problems += loads(engine, good, full)
    engine.destroy()
    return str(caught.value), problems


def _without_memory(engine: Any) -> list[Any]:
    """Return shards that have states which no part of the disk has."""
    found = []
    for unit in engine._parts.sharded.units:
        with unit.in_memory(writes=False):
            for shard in unit.shards:
                tensors = [value for value in shard.state.values() if isinstance(value, Tensor) and value.numel()]
                found += [shard] * (not all(value.untyped_storage().nbytes() for value in tensors))
    return found


def test_states_on_a_disk_are_whole_after_a_load_that_failed(tmp_path: Path) -> None:
    for said, problems in run_on_ranks(2, _load_onto_disk, str(tmp_path)):
        assert "rank-00001.safetensors" in said
        assert "load another one before a step" in said
        assert problems == []


def _load_with_a_failing_disk(rank: int, world_size: int, folder: str, stage: int, when: str) -> tuple[str, list[str]]:
    """Load while rank 1 cannot bring a unit in, or send it out; return what it said, and what differs after a load."""
    engine = make_engine(world_size, stage, zero={"offload_optimizer": {"device": "nvme", "nvme_path": folder}})
    train(engine, 1)
    good = Path(folder, "good")
    engine.save_checkpoint(good)
    full, real, entered = full_state(engine), FlatUnit.with_new_states, []

    @contextlib.contextmanager
    def failing(unit: FlatUnit) -> Iterator[None]:
        fails = rank == 1 and not entered
        entered.append(unit.index)
        if fails and when == "in":
            raise EngineError("a disk cannot be read", where=folder)
        with real(unit):
            yield
        if fails and when == "out":
            raise EngineError("a disk is full", where=folder)

    with mock.patch.object(FlatUnit, "with_new_states", failing), pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(good)
    problems = loads(engine, good, full)
    engine.destroy()
    return str(caught.value), problems


@pytest.mark.parametrize(("when", "said"), [("in", "a disk cannot be read"), ("out", "a disk is full")])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_disk_that_fails_under_a_load_is_named_on_every_rank(
    tmp_path: Path, stage: int, when: str, said: str
) -> None:
    for text, problems in run_on_ranks(2, _load_with_a_failing_disk, str(tmp_path), stage, when):
        assert "rank 1: " in text
        assert said in text
        assert problems == []
