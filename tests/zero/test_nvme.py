"""Training with states and parameters on disk: the same numbers, bounded memory, nothing left behind."""

from __future__ import annotations

import copy
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.launch.command import ROOT, wait_until
from harness.train.parity import RESTLESS_SCALE, Case, train_engine
from harness.train.ranks import run_on_ranks
from harness.train.zoo import SAMPLES, batches, build
from torch import Tensor, nn

from launcher.config.fields import Support
from launcher.config.reference import all_keys

BOTH = ("offload_optimizer", "offload_param")
PIPELINED = {"pipeline_read": True, "pipeline_write": True}


def on_disk(folder: Path | str, *sections: str, **optimizer: Any) -> dict[str, Any]:
    """Return keys of `zero_optimization`. optimizer: further keys of `offload_optimizer`."""
    found: dict[str, Any] = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    for section in sections:
        found[section] = {"device": "nvme", "nvme_path": str(folder)}
    found.get("offload_optimizer", {}).update(optimizer)
    found.get("offload_param", {}).update(max_in_cpu=0)
    return found


def open_files_in(folder: Path | str) -> list[str]:
    targets = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
    return [target for target in targets if target.startswith(str(folder))]


# ---- the same numbers ----

CASES: dict[str, tuple[int, Case, tuple[str, ...], dict[str, Any]]] = {
    "stage 1": (2, Case(1, "fp32", 1), BOTH[:1], {}),
    "stage 2, accumulated": (2, Case(2, "bf16", 2), BOTH[:1], PIPELINED),
    "stage 3, everything": (2, Case(3, "bf16", 2), BOTH, PIPELINED),
    "stage 3, its own master": (2, Case(3, "fp32", 1), BOTH, {}),
    "stage 3, parameters": (2, Case(3, "bf16", 1), BOTH[1:], {}),
    "overflows": (2, Case(3, "fp16", 1, fp16=RESTLESS_SCALE), BOTH, PIPELINED),
    "a part, some unused": (2, Case(3, "bf16", 1, unused=True), BOTH, {"ratio": 0.5}),
    "step decides": (2, Case(2, "fp32", 1, settings={"managed_gradient_accumulation": False}), BOTH[:1], {}),
    "alone": (1, Case(3, "bf16", 2), BOTH, PIPELINED),
    "alone, 16-bit sums": (1, Case(2, "bf16", 1), BOTH[:1], {}),
    "lamb": (2, Case(2, "fp32", 1, settings={"optimizer": {"type": "Lamb", "params": {"lr": 5e-3}}}), BOTH[:1], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_weights_are_those_of_the_run_that_is_not_offloaded(tmp_path: Path, name: str) -> None:
    world_size, case, sections, keys = CASES[name]
    here = {"unit_numel": 2000, "num_steps": 5}
    plain = Case(**{**vars(case), **here, "zero": on_disk(tmp_path)})
    offloaded = Case(**{**vars(case), **here, "zero": on_disk(tmp_path, *sections, **keys)})
    (expected, *_), (found, *_) = (run_on_ranks(world_size, train_engine, kind) for kind in (plain, offloaded))
    assert found.losses == expected.losses
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6, nan_ok=True)
    assert found.scales == expected.scales
    for key, value in expected.weights.items():
        assert torch.equal(found.weights[key], value), key


def config(world_size: int, zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "zero_optimization": {"stage": 3, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        **more,
    }


def engine_of(model: nn.Module, world_size: int, zero: dict[str, Any], **more: Any) -> Any:
    import launcher

    return launcher.initialize(model=model, config=config(world_size, zero, **more))[0]


def train(engine: Any, rank: int, world_size: int, num_steps: int = 5, first: int = 0) -> list[float]:
    """Train, and look at the model without gradients between the steps. Returns this rank's losses."""
    part, losses = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size), []
    for x, y in batches(first + num_steps)[first:]:
        loss = engine(x[part], y[part])
        engine.backward(loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            losses += [loss.item(), engine(x[part], y[part]).item()]
        engine.train()
    return losses


def _train_both(rank: int, world_size: int, name: str, folder: str) -> list[list[float]]:
    return [
        train(engine_of(build(name), world_size, on_disk(folder, *sections, **PIPELINED)), rank, world_size)
        for sections in ((), BOTH)
    ]


@pytest.mark.parametrize(
    "name", ["AlternatingPath", "PartlyFrozen", "Tied", "SomeUnused", "Repeated", "Outside", "RecomputedReentrant"]
)
def test_models_that_are_awkward_to_shard_train_alike(tmp_path: Path, name: str) -> None:
    for expected, found in run_on_ranks(2, _train_both, name, str(tmp_path)):
        assert found == expected


def _interleave(rank: int, world_size: int, folder: str) -> list[list[list[float]]]:
    engines = [engine_of(build("Plain"), world_size, on_disk(folder, *BOTH, **PIPELINED)) for _ in range(2)]
    engines.append(engine_of(build("Plain"), world_size, on_disk(folder)))
    return [[train(engine, rank, world_size, 1, step) for engine in engines] for step in range(3)]


def test_two_engines_and_two_ranks_share_one_folder(tmp_path: Path) -> None:
    for steps in run_on_ranks(2, _interleave, str(tmp_path)):
        for one, other, expected in steps:
            assert one == other == expected
    assert list(tmp_path.iterdir()) == []


# ---- looking at states ----


def _access(rank: int, world_size: int, stage: int, sections: tuple[str, ...], folder: str) -> list[Tensor | None]:
    from launcher import zero

    engine = engine_of(build("Plain"), world_size, {**on_disk(folder, *sections), "stage": stage})
    weight = engine.module.blocks[1].up.weight
    found = [zero.safe_get_full_optimizer_state(weight, "exp_avg"), zero.safe_get_full_fp32_param(weight)]
    part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    for x, y in batches(3):
        engine.backward(engine(x[part], y[part]))
        found += [zero.safe_get_full_grad(weight), zero.safe_get_local_grad(weight)]
        if len(found) > 6:
            zero.safe_set_full_grad(weight, torch.full(weight.ds_shape if stage == 3 else weight.shape, 0.5))
        engine.step()
        found += [zero.safe_get_full_fp32_param(weight), zero.safe_get_full_optimizer_state(weight, "exp_avg")]
        assert found[-1] is not None
        zero.safe_set_full_optimizer_state(weight, found[-1] * 2, "exp_avg")
        zero.safe_set_full_fp32_param(weight, torch.full_like(found[-1], 0.25))
        found += [zero.safe_get_full_fp32_param(weight), zero.safe_get_local_optimizer_state(weight, "exp_avg")]
    return [*found, *engine.state_dict().values()]


@pytest.mark.parametrize(("stage", "sections"), [(1, BOTH[:1]), (2, BOTH[:1]), (3, BOTH), (3, BOTH[1:])])
def test_values_gradients_and_states_can_be_read_and_written(
    tmp_path: Path, stage: int, sections: tuple[str, ...]
) -> None:
    here = run_on_ranks(2, _access, stage, (), str(tmp_path))
    there = run_on_ranks(2, _access, stage, sections, str(tmp_path))
    for expected, found in zip(here, there, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)


def _save_and_continue(rank: int, world_size: int, name: str, sections: tuple[str, ...], folder: str) -> list[Any]:
    zero = on_disk(folder, *sections, **PIPELINED)
    engine = engine_of(build(name), world_size, zero)
    train(engine, rank, world_size, 2)
    states, weights = engine.optimizer.state_dict(), engine.state_dict()
    states = copy.deepcopy(states)
    further = [train(engine, rank, world_size, 2, 2)]
    for target in (engine, engine_of(build(name), world_size, zero)):
        for _ in range(2):  # what is loaded takes the place, and the room on disk, of what was there
            target.load_state_dict(weights)
            target.optimizer.load_state_dict(states)
        further.append(train(target, rank, world_size, 2, 2))
    disks = {unit.swap._disk for unit in engine._sharded.units if unit.swap is not None}
    return [further, states["states"], sum(disk.store.size_bytes for disk in disks)]


@pytest.mark.parametrize("name", ["Plain", "SomeUnused", "AlternatingPath"])
def test_states_on_disk_are_saved_and_loaded(tmp_path: Path, name: str) -> None:
    here = run_on_ranks(2, _save_and_continue, name, (), str(tmp_path))
    there = run_on_ranks(2, _save_and_continue, name, BOTH, str(tmp_path))
    for (expected, shards, _), (found, shards_found, _) in zip(here, there, strict=True):
        assert found == expected
        if name != "AlternatingPath":  # its path depends on how often it was called
            assert found[0] == found[1] == found[2]
        assert shards.keys() == shards_found.keys()
        for name, [piece] in shards.items():
            [piece_found] = shards_found[name]
            assert (piece["start"], piece["stop"]) == (piece_found["start"], piece_found["stop"])
            for key, value in piece["state"].items():
                assert torch.equal(value, piece_found["state"][key])


def _room_before_and_after(rank: int, world_size: int, folder: str) -> list[int]:
    engine = engine_of(build("SomeUnused"), world_size, on_disk(folder, *BOTH))
    sizes = [_reserved_bytes(engine)]
    for _ in range(3):
        train(engine, rank, world_size, 1)
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        sizes.append(_reserved_bytes(engine))
    return sizes


def _reserved_bytes(engine: Any) -> int:
    return sum(store.size_bytes for store in {unit.swap._disk.store for unit in engine._sharded.units if unit.swap})


def test_all_room_is_taken_at_the_start(tmp_path: Path) -> None:
    for first, *later in run_on_ranks(2, _room_before_and_after, str(tmp_path)):
        # States that are cut where parameters were unused end at page borders of their own.
        assert max(later) <= first + 16 * 4096
        assert first > 0


# ---- memory ----


class Layers(nn.Module):
    """Equal layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return (x.mean(-1) - y).square().mean()


def _peaks(rank: int, world_size: int, num_layers: int, folder: str) -> list[int]:
    torch.manual_seed(0)
    engine = engine_of(Layers(num_layers), world_size, on_disk(folder, *BOTH, **PIPELINED), bf16={"enabled": True})
    for _ in range(3):
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        engine.backward(engine(x, x[:, 0]))
        engine.step()
    units = engine._sharded.units
    disks = {unit.swap._disk for unit in units} | {unit.params.placement.disk for unit in units}
    assert len(disks) == 2
    assert all(unit.params.placement.disk is not None for unit in units)
    held = [disk.memory.peak_bytes for disk in disks]
    assert all(disk.memory.lent_bytes + disk.memory._free_bytes <= disk.memory.peak_bytes for disk in disks)
    return sorted(held)


@pytest.mark.parametrize("world_size", [1, 2])
def test_host_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path, world_size: int) -> None:
    four, sixteen = (run_on_ranks(world_size, _peaks, count, str(tmp_path)) for count in (4, 16))
    layer_bytes = 64 * 64 * 4 // world_size
    for few, many in zip(four, sixteen, strict=True):
        # Master, gradient and two states of one unit, of the one read ahead and of the one written behind; of
        # parameters, in 16 bits, the five buffers that `buffer_count` allows.
        assert many[1] <= 3 * 4 * layer_bytes
        assert many[0] <= 5 * layer_bytes // 2
        assert many == few


def test_without_the_kernel_library_units_still_come_in_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.engine.optimizer_plan.kernel_for", lambda _kind: None)
    assert max(_peaks(0, 1, 16, str(tmp_path))) <= 3 * 4 * 64 * 64 * 4


def test_memory_of_other_sizes_makes_room() -> None:
    from launcher.comm.buffers import BufferPool

    pool = BufferPool(torch.device("cpu"), torch.UntypedStorage)
    if not pool.is_pooled:
        pytest.skip("this torch cannot move memory between storages")
    storages = [torch.UntypedStorage(0) for _ in range(3)]
    for sizes in ((300, 100), (100, 100, 100), (50, 200), (300, 100), (7, 7, 7)):
        for storage, num_bytes in zip(storages, sizes, strict=False):
            pool.lend(storage, num_bytes)
            assert storage.nbytes() == num_bytes
            assert pool.lent_bytes + pool._free_bytes <= pool.peak_bytes <= 400
        for storage, _ in zip(storages, sizes, strict=False):
            pool.take_back(storage)


# ---- zero.Init ----

WHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "disk": ("nvme", {}),
    "host": ("cpu", {}),
    "argument": ("none", {"remote_device": "cpu"}),
}


def _init_and_train(rank: int, world_size: int, where: str, folder: str) -> dict[str, Any]:
    import launcher

    device, arguments = WHERE[where]
    zero = on_disk(folder, *(BOTH if device == "nvme" else ()))
    if device == "cpu":
        zero["offload_param"] = {"device": "cpu"}
    whole = config(world_size, zero, bf16={"enabled": True})
    torch.manual_seed(23)
    with launcher.zero.Init(config_dict_or_path=whole, **arguments):
        model = build("Plain")
    held = sum(param.numel() for param in model.parameters())
    before = len(open_files_in(folder))
    engine = engine_of(model, world_size, zero, bf16={"enabled": True})
    if where == "disk":  # that of the block goes, there is one for states and one for parameters
        wait_until(lambda: len(open_files_in(folder)) == 2, "the end of the block's file", 20.0)
    direct = engine_of(build("Plain"), world_size, zero, bf16={"enabled": True})
    both = [[engine.module, engine], [direct.module, direct]]
    x, y = (part.to(torch.bfloat16) for part in batches(1)[0])
    losses = []
    for _, one in both:
        losses.append([])
        for _ in range(3):
            loss = one(x, y)
            one.backward(loss)
            one.step()
            losses[-1].append(loss.item())
    return {
        "held": held,
        "files_before": before,
        "losses": losses,
        "device": engine.module.head.weight.ds_tensor.device,
    }


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_is_built_where_it_will_be_kept(tmp_path: Path, world_size: int, where: str) -> None:
    for found in run_on_ranks(world_size, _init_and_train, where, str(tmp_path)):
        assert found["held"] == 0
        assert found["losses"][0] == found["losses"][1]
        if where == "disk":
            assert found["files_before"] == 1
            assert found["device"].type == "meta"


def test_init_on_disk_needs_a_folder() -> None:
    from launcher.base.errors import EngineError
    from launcher.zero import Init

    with pytest.raises(EngineError, match=r'remote_device="nvme"\) is not possible; .* names an nvme_path'):
        Init(remote_device="nvme")


# ---- what stays behind, and forks ----


def _teardown(rank: int, world_size: int, folder: str) -> list[int]:
    counts = []
    for _ in range(3):
        engine = engine_of(build("Plain"), world_size, on_disk(folder, *BOTH, **PIPELINED))
        x, y = batches(1)[0]
        engine.backward(engine(x, y))
        engine.step()  # what is being written when the engine goes is finished first
        counts.append(len(open_files_in(folder)))
        del engine
        gc.collect()
        wait_until(lambda: not open_files_in(folder), "the end of the engine's files")
    return counts


def test_an_engine_that_goes_takes_its_files_along(tmp_path: Path) -> None:
    for counts in run_on_ranks(2, _teardown, str(tmp_path)):
        assert counts == [2] * 3


class _Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = batches(4)[index // SAMPLES]
        return x[index % SAMPLES], y[index % SAMPLES]


def test_forked_workers_load_data_beside_an_engine_on_disk(tmp_path: Path) -> None:
    losses = []
    for sections in ((), BOTH):
        engine = engine_of(build("Plain"), 1, on_disk(tmp_path, *sections, **PIPELINED))
        losses.append([])
        for _ in range(2):
            loader = torch.utils.data.DataLoader(
                _Samples(), batch_size=SAMPLES, num_workers=2, multiprocessing_context="fork"
            )
            for x, y in loader:
                loss = engine(x, y)
                engine.backward(loss)
                engine.step()
                losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # the norm is summed in another order


# ---- the keys ----


def test_every_key_that_works_with_nvme_is_read(tmp_path: Path) -> None:
    zero = {
        "stage3_param_persistence_threshold": 0,
        "save_muon_momentum_buffer_in_memory": True,  # what it does: tests/optim/test_muon.py
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "a"), **PIPELINED},
        "offload_param": {
            "device": "nvme",
            "nvme_path": str(tmp_path / "b"),
            "buffer_count": 3,
            "buffer_size": 700,
            "max_in_cpu": 600,
        },
    }
    for name in "ab":
        (tmp_path / name).mkdir()
    aio = {"block_size": 8192, "queue_depth": 3, "intra_op_parallelism": 2}
    given = {f"aio.{key}" for key in aio} | {
        f"zero_optimization.{section}.{key}" for section in BOTH for key in zero[section] if key != "device"
    }
    given.add("zero_optimization.save_muon_momentum_buffer_in_memory")
    acting = [key for key in all_keys() if key.status == Support.WITH_NVME.value and key.type != "section"]
    assert given == {key.path for key in acting}
    engine = engine_of(build("Plain"), 1, zero, aio=aio)
    units, policy = engine._sharded.units, engine._parts.policy
    states = next(unit.swap._disk for unit in units if unit.swap is not None)
    shards = next(unit.params.placement.disk for unit in units if unit.params.placement.disk is not None)
    for disk, name in ((states, "a"), (shards, "b")):
        settings = disk.store.settings
        assert disk.store.folder == str(tmp_path / name)
        assert (settings.request_bytes, settings.num_requests) == (8192, 6)
        assert disk.store._pool._max_workers == 6
    assert (policy.offload.reads_ahead, states.writes_behind) == (True, True)
    assert policy.parameters.num_read_ahead == 2
    assert max(unit.numel for unit in units) <= 700
    in_host = sum(unit.numel for unit in units if unit.params.placement.disk is None)
    assert 0 < in_host <= 600


def test_the_example_config_trains(tmp_path: Path) -> None:
    import launcher

    settings = json.loads((ROOT / "examples" / "configs" / "zero3_nvme.json").read_text())
    for section in BOTH:
        settings["zero_optimization"][section]["nvme_path"] = str(tmp_path)
    engine = launcher.initialize(model=build("Plain"), config=settings)[0]
    x, y = (part.to(torch.bfloat16) for part in batches(1)[0])
    losses = []
    for _ in range(40):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
