"""Shards over some of the ranks (MiCS), and a second set of them within a node (hpZ): 4 ranks as 2 nodes of 2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.train.parity import weight_distance, worst_relative
from harness.train.ranks import run_on_ranks, run_once_on_ranks
from harness.train.zoo import SAMPLES, batches, build
from torch import Tensor

import launcher
from launcher.base.errors import EngineError
from launcher.comm import observe

STEPS, LR, RANKS, NODE = 3, 0.1, 4, 2
MESHES = {"mics": {"mics_shard_size": NODE}, "hpz": {"zero_hpz_partition_size": NODE}}


def engine_of(name: str, zero: dict[str, Any], **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.5,
        "steps_per_print": 0,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            **zero,
        },
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        **more,
    }
    return launcher.initialize(model=build(name), config=config)[0]


def train(rank: int, world_size: int, name: str, zero: dict[str, Any], more: dict[str, Any]) -> Any:
    engine = engine_of(name, zero, **more)
    accumulation = engine.gradient_accumulation_steps()
    dtype = torch.bfloat16 if "bf16" in more else torch.float32
    losses, norms = [], []
    for x, y in ((x.to(dtype), y.to(dtype)) for x, y in batches(STEPS)):
        for micro_x, micro_y in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
            loss = engine(micro_x.chunk(world_size)[rank], micro_y.chunk(world_size)[rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms, engine.state_dict()


def train_plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    norms = []
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        model(x, y).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return norms, dict(model.state_dict())


@pytest.mark.parametrize(
    ("name", "accumulation"),
    [
        ("Plain", 2),
        ("Mixture", 1),
        *(
            pytest.param(name, accumulation, marks=pytest.mark.soak)
            for name in ("Plain", "Repeated", "Mixture", "ReentrantTied")
            for accumulation in (1, 2)
        ),
    ],
)
@pytest.mark.parametrize("mesh", MESHES)
def test_results_are_those_of_one_process(mesh: str, name: str, accumulation: int) -> None:
    zero: dict[str, Any] = dict(MESHES[mesh])
    if name == "Mixture":
        zero["leaf_module"] = {"classes": ["Experts"]}
    more = {
        "gradient_accumulation_steps": accumulation,
        "train_micro_batch_size_per_gpu": SAMPLES // RANKS // accumulation,
    }
    (_, norms, weights), *others = run_on_ranks(RANKS, train, name, zero, more)
    expected_norms, expected = train_plain(name)
    assert worst_relative(norms, expected_norms) <= 1e-5
    assert weight_distance(weights, expected) <= 1e-5
    for _, other_norms, other in others:
        assert other_norms == norms
        assert all(torch.equal(other[key], value) for key, value in weights.items())


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({}, {"bf16": {"enabled": True}}),
    "offloaded": ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, {}),
    "small things whole": ({"stage3_param_persistence_threshold": 40}, {}),
    "decided at the step": ({}, {"managed_gradient_accumulation": False}),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_results_are_those_of_shards_over_all_ranks(mesh: str, other: str) -> None:
    zero, more = OTHERS[other]
    accumulation = 1 if other == "decided at the step" else 2
    more = {
        **more,
        "gradient_accumulation_steps": accumulation,
        "train_micro_batch_size_per_gpu": SAMPLES // RANKS // accumulation,
    }
    expected_losses, expected_norms, expected = run_once_on_ranks(RANKS, train, "Plain", zero, more)[0]
    losses, norms, weights = run_on_ranks(RANKS, train, "Plain", {**zero, **MESHES[mesh]}, more)[0]
    tolerance = 2e-2 if other == "bf16" else 1e-5
    assert worst_relative(losses, expected_losses) <= tolerance
    assert worst_relative(norms, expected_norms) <= tolerance
    assert weight_distance(weights, expected) <= tolerance


def _train_with_late(rank: int, world_size: int, zero: dict[str, Any], more: dict[str, Any]) -> Any:
    """Train in evaluation mode, where the uses of a repeated block are not known before they go back."""
    engine = engine_of("Repeated", zero, **more)
    engine.module.eval()
    accumulation, num_late = engine.gradient_accumulation_steps(), 0
    for x, y in batches(STEPS):
        for micro_x, micro_y in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
            own_x = micro_x.chunk(world_size)[rank].clone().requires_grad_()  # its gradient ends the block's first use
            engine.backward(engine(own_x, micro_y.chunk(world_size)[rank]))
            num_late += engine._sharded.reducer.num_late
            engine.step()
    return num_late, engine.get_global_grad_norm(), engine.state_dict()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_that_come_after_the_sum_are_added(mesh: str, accumulation: int) -> None:
    norms, expected = train_plain("Repeated")
    more = {"gradient_accumulation_steps": accumulation}
    for num_late, norm, weights in run_on_ranks(RANKS, _train_with_late, MESHES[mesh], more):
        assert num_late > 0
        assert norm == pytest.approx(norms[-1], rel=1e-5)
        assert weight_distance(weights, expected) <= 2e-6


def _sent(rank: int, world_size: int, zero: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes a rank sends in one step, by the number of ranks of a collective, and the bytes it keeps."""
    sent: dict[int, int] = {}

    class Meter:
        def record(self, call: observe.Call) -> None:
            if call.num_bytes > (512 if call.world_size == RANKS else 255):  # not the facts beside the norm
                sent[call.world_size] = sent.get(call.world_size, 0) + call.num_bytes

    engine, meter = (
        engine_of("Plain", {"stage3_prefetch_bucket_size": 0, **zero}, train_micro_batch_size_per_gpu=2),
        Meter(),
    )
    for number, (x, y) in enumerate(batches(2)):
        if number == 1:
            observe.add_meter(meter)
        engine.backward(engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank]))
        engine.step()
    observe.remove_meter(meter)
    units = engine._sharded.units
    return {
        "by_ranks": sent,
        "unit_bytes": sum(unit.numel for unit in units) * 4,
        "shards": sum(unit.params.shard.nbytes + unit.grads.owned_grad.nbytes for unit in units),
        "second": sum(unit.params._second.nbytes for unit in units if unit.params._second is not None),
    }


def test_what_crosses_the_nodes() -> None:
    """Bytes of whole buffers in a step, by the size of the group: gathers for forward and backward, one reduction."""
    for found in run_on_ranks(RANKS, _sent, {}):
        whole = found["unit_bytes"]
        assert found["by_ranks"] == {RANKS: 3 * whole}
        assert found["shards"] == 2 * whole // RANKS
    for found in run_on_ranks(RANKS, _sent, MESHES["hpz"]):
        whole = found["unit_bytes"]
        assert found["by_ranks"] == {RANKS: 2 * whole, NODE: whole}, "backward gathers within the node"
        assert found["second"] == whole // NODE
        assert found["shards"] == 2 * whole // RANKS
    for found in run_on_ranks(RANKS, _sent, MESHES["mics"]):
        whole = found["unit_bytes"]
        # Everything within the node, and across the two copies the sums of one shard.
        assert found["by_ranks"] == {NODE: 3 * whole + whole // NODE}
        assert found["shards"] == 2 * whole // NODE


def _refuse(rank: int, world_size: int) -> None:
    for key, size, message in (
        ("mics_shard_size", 3, "mics_shard_size 3 does not divide the 4 ranks"),
        ("zero_hpz_partition_size", 3, "zero_hpz_partition_size 3 does not divide the 4 ranks"),
        ("mics_shard_size", 1, "mics_shard_size 1 shards nothing"),
    ):
        with pytest.raises(EngineError, match=message):
            engine_of("Plain", {key: size})


def test_sizes_that_do_not_fit_are_errors() -> None:
    run_on_ranks(RANKS, _refuse)
