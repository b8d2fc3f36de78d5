"""What the planner says is what the engine keeps: real ranks, real buffers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import mmap
import os
from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.behind import runs_behind_host
from harness.train.cudart import Cudart
from harness.train.offload import is_in_host_memory, late_link
from harness.train.ranks import run_on_ranks
from harness.train.streams import modelled_streams
from torch import nn

from launcher.comm.device import HostDeviceCopier, PinnedMemory
from launcher.comm.groups import RankGroup, world_group
from launcher.comm.mesh import build_mesh
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.load import load_config
from launcher.config.policies import MeshPolicy, ZeroPolicy, zero_policy
from launcher.planner.memory import (
    GRADIENT_UNITS,
    REDUCING_UNITS,
    RankMemory,
    Setting,
    communicators,
    in_flight_bytes,
    rank_memory,
)
from launcher.planner.model import ModelFacts, Parameter
from launcher.planner.settings import setting_of
from launcher.sharding.mesh import MeshSizes
from launcher.zero.partition import plan_units
from launcher.zero.states import TORCH_DTYPES

WIDTH, NUM_BLOCKS, WORLD_SIZE = 400, 8, 2


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)))


def facts() -> ModelFacts:
    params = tuple(Parameter(name, param.numel()) for name, param in build().named_parameters())
    return ModelFacts("blocks", "test", params)


def config(stage: int, precision: str, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            **zero,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }


def planned_for(given: dict[str, Any], world_size: int) -> RankMemory:
    return rank_memory(facts(), setting_of(load_config(given).config, world_size), world_size)


# Each two of the settings together, and all of them in the soak. Nothing is gathered below stage 3.
ON_DEVICE = [
    pytest.param(stage, ("fp32", "bf16")[is_bf16], overlaps, kept_numel, marks=[] if is_quick else pytest.mark.soak)
    for (number, (stage, kept_numel)), is_bf16, overlaps in itertools.product(
        enumerate([(0, 0), (1, 0), (2, 0), (3, 0), (3, 10**9)]), (False, True), (False, True)
    )
    for is_quick in [(number + is_bf16 + overlaps) % 2 == 0]
]


@pytest.mark.parametrize(("stage", "precision", "overlaps", "kept_numel"), ON_DEVICE)
def test_the_formula_is_what_the_engine_allocates(stage: int, precision: str, overlaps: bool, kept_numel: int) -> None:
    given = config(stage, precision, overlap_comm=overlaps, stage3_max_reuse_distance=kept_numel)
    planned = planned_for(given, WORLD_SIZE)
    for found in run_on_ranks(WORLD_SIZE, _measured, given):
        assert planned.model_states <= found["model_states"] <= 1.02 * planned.model_states
        assert found["peak_in_flight"] <= 1.02 * planned.in_flight
        if stage > 0:  # at stage 0 gloo itself may do the whole sum, out of sight
            assert found["peak_in_flight"] >= 0.5 * planned.in_flight


def _measured(rank: int, world_size: int, given: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that live from step to step, and the most that was in flight at once."""
    import launcher

    engine, optimizer, _, _ = launcher.initialize(model=build(), config=given)
    peak_bytes = _train(engine)
    storages = _storages(engine)
    states = sum(storages.values()) + 4 * optimizer.flat.state_numel()
    return {"model_states": states, "peak_in_flight": peak_bytes}


def _train(engine: Any) -> int:
    """Take three steps; return the most bytes that were lent at once."""
    buffers = engine._parts.group.buffers
    buffers.peak_bytes = 0  # of the construction
    for _ in range(3):
        dtype = TORCH_DTYPES[engine._parts.policy.precision.param]
        engine.backward(engine(torch.ones(2, WIDTH, dtype=dtype)).float().mean())
        engine.step()
    engine.synchronize_parameters()
    assert buffers.lent_bytes == 0, "everything in flight has been given back"
    return int(buffers.peak_bytes)


def _storages(engine: Any, *, in_host_memory: bool = False) -> dict[int, int]:
    """Return the bytes of what units keep, by address, in one of the two places."""
    units = engine._sharded.units
    parts = [part for unit in units if unit.grads is not None for part in (unit.grads._local, unit.grads._sum)]
    parts += [unit.params for unit in units]
    tensors = [value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor)]
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if is_in_host_memory(tensor) == in_host_memory
    }


CLOCKS = {"in step": contextlib.nullcontext, "behind the host": runs_behind_host, "beside it": modelled_streams}


def _in_flight(rank: int, world_size: int, clock: str, given: dict[str, Any]) -> int:
    import launcher

    with CLOCKS[clock]():
        return _train(launcher.initialize(model=build(), config=given)[0])


@pytest.mark.parametrize(("clock", "world_size"), [("in step", 2), ("behind the host", 4), ("beside it", 2)])
def test_no_stage_holds_the_gradients_of_all_units_at_once(clock: str, world_size: int) -> None:
    """On a device, too, what was sent is given back while backward runs: the estimate counts four units."""
    for stage in (0, 1, 2):
        given = config(stage, "bf16", reduce_bucket_size=WIDTH * WIDTH)
        memory = planned_for(given, world_size)
        planned = memory.in_flight
        assert planned < (GRADIENT_UNITS + REDUCING_UNITS + 1) * 2 * (WIDTH + 1) * WIDTH
        if clock == "behind the host":  # sums are lent their memory, too
            planned += memory.gradients
        for found in run_on_ranks(world_size, _in_flight, clock, given):
            assert 0.25 * planned <= found <= planned, stage


OPTIMIZER, PARAMS = {"device": "cpu"}, {"offload_param": {"device": "cpu"}}
PART = OPTIMIZER | {"ratio": 0.5}
DELAYED = OPTIMIZER | {"delayed_update": True, "delayed_update_warmup_steps": 1}
SPECULATIVE = OPTIMIZER | {"super_offload": True}
OFFLOADS: list[tuple[int, dict[str, Any]]] = [
    (1, {"offload_optimizer": OPTIMIZER}),
    (2, {"offload_optimizer": OPTIMIZER}),
    (2, {"offload_optimizer": PART}),
    (3, {"offload_optimizer": OPTIMIZER}),
    (3, {"offload_optimizer": OPTIMIZER, **PARAMS}),
    (3, {"offload_optimizer": PART, **PARAMS}),
    (3, PARAMS),
    (1, {"offload_optimizer": DELAYED}),
    (2, {"offload_optimizer": DELAYED}),
    (3, {"offload_optimizer": DELAYED}),
    (3, {"offload_optimizer": DELAYED, **PARAMS}),
    (2, {"offload_optimizer": SPECULATIVE}),
    (3, {"offload_optimizer": SPECULATIVE, **PARAMS}),
]


ON_HOST = [
    pytest.param(*offload, ("fp32", "bf16")[is_bf16], world_size, marks=[] if is_quick else pytest.mark.soak)
    for (number, offload), is_bf16, world_size in itertools.product(enumerate(OFFLOADS), (False, True), (1, 2))
    for is_quick in [(number + is_bf16 + world_size) % 2 == 0]
]


@pytest.mark.parametrize(("stage", "offload", "precision", "world_size"), ON_HOST)
def test_the_formula_is_what_rests_on_device_and_host(
    stage: int, offload: dict[str, Any], precision: str, world_size: int
) -> None:
    given = config(stage, precision, stage3_max_reuse_distance=0, **offload) | {"gradient_clipping": 0.0}
    planned = planned_for(given, world_size)
    for found in run_on_ranks(world_size, _offloaded, given):
        without_padding = 0.999 if offload.get("offload_optimizer") == SPECULATIVE else 1.0
        assert without_padding * planned.host <= found["host"] <= 1.02 * planned.host
        assert planned.model_states <= found["device"] <= 1.02 * planned.model_states + 1
        assert found["peak_in_flight"] <= 1.02 * planned.in_flight
        if stage > 1 or world_size > 1:  # else autograd's own gradient only
            assert found["peak_in_flight"] >= 0.3 * planned.in_flight


def _offloaded(rank: int, world_size: int, given: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that rest on the device and in host memory, and the most that was in flight on the device."""
    import launcher

    with late_link():
        engine = launcher.initialize(model=build(), config=given)[0]
        found = {"peak_in_flight": _train(engine), "device": 0, "host": 0}
        for unit in engine._sharded.units:  # states are made beside their master
            place = "host" if is_in_host_memory(unit.params.master) else "device"
            found[place] += sum(state.nbytes for state in unit.state_tensors())
        for place in ("device", "host"):
            found[place] += sum(_storages(engine, in_host_memory=place == "host").values())
        speculative = engine._sharded.reducer.speculative
        for of_unit in speculative._of.values() if speculative is not None else ():
            found["host"] += sum(before.nbytes for before in of_unit._before)
        return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "zero", "world_size"), [(0, {}, 2), (3, {}, 2), (3, PARAMS, 1), (3, PARAMS, 2)])
def test_the_formula_is_what_inference_needs(stage: int, zero: dict[str, Any], world_size: int, precision: str) -> None:
    given = config(stage, precision, **zero)
    del given["optimizer"]
    planned = rank_memory(facts(), setting_of(load_config(given).config, world_size, trains=False), world_size)
    assert planned.gradients == planned.optimizer == 0
    for found in run_on_ranks(world_size, _inferred, given):
        assert planned.host <= found["host"] <= 1.02 * planned.host
        assert planned.parameters <= found["device"] <= 1.02 * planned.parameters + 1
        assert 0.5 * planned.in_flight <= found["peak_in_flight"] <= 1.02 * planned.in_flight


def _inferred(rank: int, world_size: int, given: dict[str, Any]) -> dict[str, int]:
    import launcher

    with late_link():
        engine = launcher.initialize(model=build(), config=given)[0]
        buffers = engine._parts.group.buffers
        buffers.peak_bytes = 0  # of the construction
        with torch.no_grad():
            for _ in range(3):
                engine(torch.ones(2, WIDTH, dtype=TORCH_DTYPES[engine._parts.policy.precision.param]))
        found = {"peak_in_flight": int(buffers.peak_bytes)}
        whole = {param.untyped_storage().data_ptr(): param.untyped_storage().nbytes() for param in engine.parameters()}
        for place, others in (("device", whole), ("host", {})):  # below stage 3 there are no units
            found[place] = sum((others | _storages(engine, in_host_memory=place == "host")).values())
        return found


# ---- what "auto" makes of a large model ----

HIDDEN, NUM_LAYERS = 4096, 4
BLOCK_NUMEL = 4 * HIDDEN**2 + 3 * HIDDEN * 11008  # without norms, which stay unsharded


def _llama() -> nn.Module:
    """Return the parameters of a few blocks of Llama-7B, without values."""
    ffn, vocabulary = 11008, 32000
    sizes = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN, ffn)] * 2 + [(ffn, HIDDEN)]
    with torch.device("meta"):
        model = nn.Module()
        model.embed = nn.Embedding(vocabulary, HIDDEN)
        model.layers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(HIDDEN), *(nn.Linear(*size, bias=False) for size in sizes))
            for _ in range(NUM_LAYERS)
        )
        model.head = nn.Linear(HIDDEN, vocabulary, bias=False)
    return model


AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
# What Hugging Face's Trainer writes in place of these, before the engine sees the config.
FILLED = {
    "reduce_bucket_size": HIDDEN * HIDDEN,
    "stage3_prefetch_bucket_size": int(0.9 * HIDDEN * HIDDEN),
    "stage3_param_persistence_threshold": 10 * HIDDEN,
}


def _policy(zero: dict[str, Any], world_size: int) -> tuple[ZeroPolicy, Setting]:
    given = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero}}
    settings, _ = resolve_auto(load_config(given).config, AutoFacts(world_size=world_size, hidden_size=HIDDEN))
    return zero_policy(settings, world_size), setting_of(settings, world_size)


@pytest.mark.parametrize("world_size", [8, 3000])
@pytest.mark.parametrize("zero", [{}, AUTO, FILLED, {"stage3_max_live_parameters": HIDDEN * HIDDEN}])
def test_auto_never_cuts_a_block_at_stage_3(zero: dict[str, Any], world_size: int) -> None:
    model = _llama()
    policy, setting = _policy(zero, world_size)
    units = plan_units(model, dict.fromkeys(model.parameters(), 0), policy)
    sizes = [sum(info.numel for info in infos) for _, infos in units]
    large = {name: value for name, value in zero.items() if name != "reduce_bucket_size"}
    llama = ModelFacts("llama", "test", tuple(Parameter(name, p.numel()) for name, p in model.named_parameters()))
    planned, of_large, by_default = (
        in_flight_bytes(llama, one, world_size)
        for one in (setting, _policy(large, world_size)[1], _policy({}, world_size)[1])
    )
    assert planned == of_large, "the planner divides as the engine does"
    if "stage3_max_live_parameters" in zero:
        assert len(units) == 1 + 7 * NUM_LAYERS + 2, "that key does: the norms, and a unit a layer"
        assert planned < by_default
    else:
        assert len(units) == 1 + NUM_LAYERS + 2
        assert sizes.count(BLOCK_NUMEL) == NUM_LAYERS


def _page_locked(rank: int, world_size: int, given: dict[str, Any]) -> tuple[int, int, list[int]]:
    """Return the bytes that are page-locked, those of states, which need not be, and the pieces' places in a page."""
    import launcher

    begin = HostDeviceCopier.__init__

    def pinning(copier: HostDeviceCopier, *arguments: Any) -> None:
        begin(copier, *arguments)
        copier._pinned = PinnedMemory()

    cudart = Cudart()
    with (
        mock.patch.object(torch.cuda, "cudart", return_value=cudart),
        mock.patch.object(HostDeviceCopier, "__init__", pinning),
        late_link(),
    ):
        engine = launcher.initialize(model=build(), config=given)[0]
        _train(engine)
        num_bytes = sum(cudart.registered.values())
        states = sum(state.nbytes for unit in engine._sharded.units for state in unit.state_tensors())
        return num_bytes, states, [address % mmap.PAGESIZE for address in cudart.registered]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "offload"), [OFFLOADS[1], OFFLOADS[4]])
def test_page_locked_memory_is_what_the_formula_says(stage: int, offload: dict[str, Any], precision: str) -> None:
    """A power of two for each piece, as torch's allocator of such memory takes, would be more."""
    given = config(stage, precision, stage3_max_reuse_distance=0, **offload)
    planned = planned_for(given, WORLD_SIZE)
    for num_bytes, states, offsets in run_on_ranks(WORLD_SIZE, _page_locked, given):
        assert planned.host <= num_bytes + states <= 1.02 * planned.host
        assert len(offsets) >= NUM_BLOCKS
        assert set(offsets) == {0}


# ---- NCCL's communicators ----

# Mesh, `mics_shard_size`, `zero_hpz_partition_size`.
MESHES = {
    "data": (MeshSizes(4), None, None),
    "two copies of the shards": (MeshSizes(4), 2, None),
    "second shards": (MeshSizes(4), None, 2),
    "tensor": (MeshSizes(2, tensor=2), None, None),
    "tensor alone": (MeshSizes(1, tensor=4), None, None),
    "sequence": (MeshSizes(2, sequence=2), None, None),
    "pipeline": (MeshSizes(2, pipeline=2), None, None),
    "long pipeline": (MeshSizes(1, pipeline=4), None, None),
    "pipeline of parts": (MeshSizes(1, pipeline=2, tensor=2), None, None),
    "experts": (MeshSizes(4, expert=2), None, None),
    "experts alone": (MeshSizes(4, expert=4), None, None),
}


def _num_communicators(rank: int, world_size: int) -> dict[str, int]:
    """Return how many process groups of several ranks carry tensors of a GPU, for each mesh."""
    found = {}
    with runs_behind_host(), mock.patch.dict(os.environ, LAUNCH_REDUCE_GROUP="shared"):
        for name, (sizes, shard_size, node_size) in MESHES.items():
            mesh = build_mesh(world_group(), sizes, shard_size=shard_size, node_size=node_size)
            values = [*vars(mesh).values(), *mesh.links]
            values += [] if mesh.of_experts is None else vars(mesh.of_experts).values()
            groups = [value for value in values if isinstance(value, RankGroup)]
            assert all(group.reduce_process_group is None for group in groups)
            found[name] = len({id(group.process_group) for group in groups if group.process_group is not None})
    return found


def test_each_communicator_of_an_engine_is_counted() -> None:
    planned = {}
    for name, (sizes, shard_size, node_size) in MESHES.items():
        setting = setting_of(load_config(config(1, "bf16")).config, 4)
        policy = dataclasses.replace(setting.policy, mesh=MeshPolicy(shard_size, node_size))
        planned[name] = communicators(dataclasses.replace(setting, sizes=sizes, policy=policy), 4)
    assert run_on_ranks(4, _num_communicators) == [planned] * 4
    assert planned["data"] == 1
    assert planned["pipeline of parts"] > 3
