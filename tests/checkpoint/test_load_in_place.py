"""What a load reads goes straight to where it is used."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.train.checkpoint_runs import make_engine, train
from harness.train.ranks import run_on_ranks
from torch import Tensor

from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.formats.source import StoredParam
from launcher.checkpoint.load import _state_of
from launcher.comm.communicator import GlooCommunicator
from launcher.sharding.layout import ParamInfo


def _loaded(rank: int, world_size: int, folder: str, stage: int, kernel: str, hosts: int) -> list[str]:
    """Save, train on, and load. Returns what was not as it must be."""
    problems, reads, gathers = [], set(), []
    real_read, real_gather = NativeSource.read, GlooCommunicator._all_gather

    def read(source: NativeSource, key: str, name: str, start: int, out: Tensor) -> None:
        reads.add(out.data_ptr())
        real_read(source, key, name, start, out)

    def gather(*arguments: Any) -> Any:
        gathers.append(1)
        return real_gather(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: f"host{rank % hosts}")
        if kernel == "torch":
            patch.setenv("LAUNCH_CPU_KERNEL", "off")
        engine = make_engine(world_size, stage)
        train(engine, 2)
        engine.save_checkpoint(folder)
        saved = {name: value.clone() for name, value in engine.state_dict().items()}
        expected = train(engine, 3)
        engine.synchronize_parameters()
        patch.setattr(NativeSource, "read", read)
        patch.setattr(GlooCommunicator, "_all_gather", gather)
        engine.load_checkpoint(folder)
        problems += ["gathered"] * (bool(gathers) != (hosts > 1))
        optimizer = engine.optimizer.flat
        for shard in optimizer.shards:
            kept = [value for value in shard.state.values() if isinstance(value, Tensor) and value.dim()]
            problems += [f"{shard.name} has no states"] * (bool(shard.owned) and not kept)
            problems += [f"{shard.name} was read elsewhere" for value in kept if value.data_ptr() not in reads]
        found = engine.state_dict()
        problems += [name for name, value in saved.items() if not torch.equal(found[name], value)]
        if train(engine, 3) != expected:
            problems.append("other losses")
        engine.destroy()
    return problems


@pytest.mark.parametrize("kernel", ["own", "torch"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_states_and_weights_are_read_into_place(tmp_path: Path, kernel: str, hosts: int) -> None:
    for problems in run_on_ranks(2, _loaded, str(tmp_path), 2, kernel, hosts):
        assert problems == []


def test_a_state_of_another_type_is_read_as_it_was_stored() -> None:
    """What is read into memory of fewer bits would be rounded, and the training would not continue as it was."""
    shard: Any = SimpleNamespace(name="weight", owned=range(2, 4))
    params = {"weight": StoredParam((4,), "float32", states={"wide": "float64", "same": "float32"})}
    source: Any = SimpleNamespace(params=params, read=lambda key, name, start, out: out.fill_(0.1))
    room = torch.empty(2)
    optimizer: Any = SimpleNamespace(room_of=lambda shard, name: room)
    state = _state_of(source, shard, optimizer, {"weight": ParamInfo("weight", (4,), "float32")})
    assert state["wide"].tolist() == [0.1, 0.1]
    assert state["same"] is room
