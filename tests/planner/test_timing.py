"""Seconds of a step: what they are made of, and how they follow the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.config.load import load_config
from launcher.config.policies import DType
from launcher.parallel.pipeline.runtime import Kind, training_actions
from launcher.planner.computing import Computation, Exchange, Groups, RankModel, Transformer
from launcher.planner.estimate import RankPart, Share
from launcher.planner.hardware import Hardware, gpu_named, hardware_of, probed_hardware, scaled
from launcher.planner.memory import Setting, Workload
from launcher.planner.model import ModelFacts, Parameter, TransformerShape
from launcher.planner.rehearsal import DeviceWork
from launcher.planner.settings import setting_of
from launcher.planner.speed import CollectiveSpeed, RankSpeed, Speed
from launcher.planner.timing import (
    BUBBLE,
    COMPUTE,
    GATHER,
    KERNELS,
    MODEL,
    REDUCE,
    TRANSFER,
    UPDATE,
    StepTime,
    step_time,
)
from launcher.planner.tuning import Factors
from launcher.sharding.pipeline import PipelinePlan

GPU = replace(hardware_of(gpu_named("H100"), 8), hop_s=(0.0, 0.0), kernel_s=0.0)
NUMEL = 10_000_000
RANK = RankModel((NUMEL,) * 8, 8 * NUMEL, 2.0, 8.0 * NUMEL, 8)
# 3 s of products on one rank.
WORK = Computation(DeviceWork(GPU.matmul_flops[DType.BF16]), DeviceWork(2 * GPU.matmul_flops[DType.BF16]))


def setting(stage: int, world_size: int = 8, **zero: object) -> Setting:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    return setting_of(load_config(config).config, world_size)


def timed(own: Setting, hardware: Hardware = GPU, micro_batches: int = 1, work: Computation = WORK) -> StepTime:
    return step_time(RANK, work, own, hardware, 8, micro_batches)


def on_cpu(hardware: Hardware = GPU) -> Hardware:
    return replace(hardware, to_device_bytes_per_s=None)


def test_computing_is_counted_once_for_each_micro_batch() -> None:
    assert timed(setting(1)).parts[COMPUTE] == pytest.approx(3.0)
    assert timed(setting(1), micro_batches=4).parts[COMPUTE] == pytest.approx(12.0)


@pytest.mark.parametrize(("stage", "times_1", "times_4"), [(0, 2.0, 4.0), (1, 1.0, 2.0), (2, 1.0, 4.0), (3, 1.0, 4.0)])
def test_reductions_by_stage(stage: int, times_1: float, times_4: float) -> None:
    """On a CPU nothing hides: a sum of several micro-batches is sent once in fp32, else each micro-batch in bf16."""
    one_s = 7 / 8 * 2 * 8 * NUMEL / GPU.link_bytes_per_s  # a reduce-scatter of all gradients in bf16
    assert timed(setting(stage), on_cpu()).parts[REDUCE] == pytest.approx(times_1 * one_s)
    assert timed(setting(stage), on_cpu(), 4).parts[REDUCE] == pytest.approx(times_4 * one_s)


def test_gathers_of_stage_3_by_what_is_kept() -> None:
    one_s = 7 / 8 * 2 * 8 * NUMEL / GPU.link_bytes_per_s
    kept = timed(setting(3), on_cpu())
    anew = timed(setting(3, stage3_max_reuse_distance=0), on_cpu())
    assert kept.parts[GATHER] == pytest.approx(one_s)
    # The last unit is used again at once.
    assert anew.parts[GATHER] == pytest.approx(one_s * (1 + 7 / 8))
    assert timed(setting(1), on_cpu(), 4).parts[GATHER] == pytest.approx(one_s), "once a step, after the update"
    assert GATHER not in timed(setting(0), on_cpu()).parts


def test_a_gpu_hides_collectives_behind_computing() -> None:
    hidden = timed(setting(3))
    slow = timed(setting(3), replace(GPU, link_bytes_per_s=GPU.link_bytes_per_s / 10_000))
    in_turns = timed(setting(3, overlap_comm=False))
    assert hidden.parts[REDUCE] + hidden.parts[GATHER] < 0.001
    assert slow.seconds > 3.5
    assert hidden.seconds < in_turns.seconds < slow.seconds


def test_without_overlap_the_gather_after_the_update_is_waited_for() -> None:
    one_s = 7 / 8 * 2 * 8 * NUMEL / GPU.link_bytes_per_s
    assert timed(setting(1, overlap_comm=False)).parts[GATHER] == pytest.approx(one_s)


def test_more_is_fetched_ahead_where_the_policy_says_so() -> None:
    slow = replace(GPU, link_bytes_per_s=2 * 7 / 8 * NUMEL / 0.2)  # a unit is gathered in 0.2 s, computed in 0.125 s
    none = timed(setting(3, stage3_prefetch_bucket_size=0), slow).parts[GATHER]
    some = timed(setting(3), slow).parts[GATHER]
    assert some < none


def test_the_host_that_launches_slowly_is_waited_for() -> None:
    many = Computation(DeviceWork(1e9, 0.0, 0.0, 1e6), DeviceWork(2e9, 0.0, 0.0, 2e6))
    launched = timed(setting(1), replace(GPU, kernel_s=1e-6), work=many)
    assert launched.parts[KERNELS] == pytest.approx(3.0, rel=1e-3)
    assert KERNELS not in timed(setting(1), replace(GPU, kernel_s=1e-9)).parts, "the device is slower"


def test_offload_costs_transfers_and_an_update_by_the_host() -> None:
    here = timed(setting(2))
    away = timed(setting(2, offload_optimizer={"device": "cpu"}))
    on_disk = timed(setting(2, offload_optimizer={"device": "nvme", "nvme_path": "/local_nvme"}))
    assert TRANSFER not in here.parts
    # Bytes a parameter, with one that comes back in 2: NCCL's sums go down in 2, and further ones in 4.
    bytes_of = {1: 2 + 2, 3: 2 + 4 + 4 + 2}
    for num, num_bytes in bytes_of.items():
        found = timed(setting(2, offload_optimizer={"device": "cpu"}), micro_batches=num).parts[TRANSFER]
        assert found == pytest.approx(away.parts[TRANSFER] / bytes_of[1] * num_bytes)
    at_the_end = timed(setting(1, offload_optimizer={"device": "cpu"}), micro_batches=3).parts[TRANSFER]
    assert at_the_end == pytest.approx(away.parts[TRANSFER] / bytes_of[1] * (4 + 2))
    assert here.parts[UPDATE] < away.parts[UPDATE] < on_disk.parts[UPDATE]


def test_exchanges_of_a_model_are_not_hidden() -> None:
    num_bytes = 8 / 7 * GPU.link_bytes_per_s  # 1 s on each link
    work = replace(WORK, exchanges=(Exchange(3, "all_gather", num_bytes, 8, 8),))
    assert timed(setting(1), work=work, micro_batches=2).parts[MODEL] == pytest.approx(6.0)


def test_what_was_learnt_multiplies_the_parts() -> None:
    learnt = timed(setting(1), replace(GPU, learnt=Factors("", 1.0, {COMPUTE: 2.0})))
    assert learnt.parts[COMPUTE] == pytest.approx(6.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("num_micro_batches", [8, 16])
def test_idle_time_is_that_of_the_actions_which_run(schedule: str, num_micro_batches: int) -> None:
    """Play the engine's own order of actions through, forwards of one unit of time and backwards of two."""
    plan = PipelinePlan(4, 1, schedule, num_micro_batches)
    own = replace(setting(0, 32), pipeline=plan)
    planned = timed(own, replace(GPU, link_bytes_per_s=1e18, network_bytes_per_s=1e18), num_micro_batches)
    busy = planned.parts[COMPUTE]
    assert 1 + planned.parts[BUBBLE] / busy == pytest.approx(played(plan) / (3 * num_micro_batches), rel=0.05)


def played(plan: PipelinePlan) -> float:
    """Return when the last rank has run its last action, where nothing but computing takes time."""
    lengths = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}
    todo = {rank: [each for each in training_actions(plan, rank) if each.kind in lengths] for rank in range(4)}
    ended: dict[tuple[str, int, int], float] = {}
    now = dict.fromkeys(todo, 0.0)
    while any(todo.values()):
        for rank, actions in todo.items():
            while actions:
                kind, stage, micro_batch = actions[0]
                if kind is Kind.FORWARD:
                    needs = ("F", stage - 1, micro_batch) if stage else None
                elif kind is Kind.BACKWARD_WEIGHT:
                    needs = ("I", stage, micro_batch)
                else:
                    needs = ("I", stage + 1, micro_batch) if stage + 1 < plan.num_stages else ("F", stage, micro_batch)
                if needs is not None and needs not in ended:
                    break
                actions.pop(0)
                now[rank] = max(now[rank], ended[needs] if needs else 0.0) + lengths[kind]
                ended[
                    "F" if kind is Kind.FORWARD else "W" if kind is Kind.BACKWARD_WEIGHT else "I", stage, micro_batch
                ] = now[rank]
    return max(now.values())


# ---- what a rank computes ----

SHAPE = TransformerShape(num_layers=2, hidden_size=64, num_heads=4, vocab_size=512)
BLOCKS = tuple(Parameter(f"h.{index}.w", 12 * 64 * 64) for index in range(2))
ENDS = Parameter("embed.weight", 512 * 64), Parameter("head.weight", 512 * 64)
MODEL_FACTS = ModelFacts("two blocks", "test", (ENDS[0], *BLOCKS, ENDS[1]), SHAPE)


def test_flops_of_a_transformer() -> None:
    """Six operations for each token and element, and attention's: Narayanan et al. 2021, appendix."""
    computes = Transformer(SHAPE, Workload(1, 128, is_eager=True))
    own = setting(1)
    rank = RankModel.of(RankPart(MODEL_FACTS, Share()), SHAPE, own)
    one = computes.computation(rank, own, 3, 8, is_checkpointed=False)
    tokens = 3 * 128
    blocks = 2 * tokens * 2 * 12 * 64 * 64 + 2 * 4 * tokens * 128 * 64
    head = 2 * tokens * 64 * 512
    assert one.forward.flops == blocks + head
    assert one.backward.flops == 2 * (blocks + head)
    again = computes.computation(rank, own, 3, 8, is_checkpointed=True)
    assert again.backward.flops == 2 * (blocks + head) + blocks


def test_groups_know_their_nodes() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "tensor_parallel": {"autotp_size": 4},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    groups = Groups.of(setting_of(load_config(config).config, 32), 8)
    assert groups.tensor == (4, 4)
    assert groups.shard == (8, 2)


# ---- machines ----


def test_collectives_by_where_the_ranks_are() -> None:
    within = GPU.collective_s("all_gather", 8e9, 8, 8)
    assert within == pytest.approx(7e9 / GPU.link_bytes_per_s)
    assert GPU.collective_s("all_reduce", 8e9, 8, 8) == pytest.approx(2 * within)
    assert GPU.collective_s("all_gather", 8e9, 1, 1) == 0.0
    one_a_node = GPU.collective_s("all_gather", 8e9, 8, 1)
    assert one_a_node == pytest.approx(7e9 / GPU.network_bytes_per_s)
    # Eight ranks of a node have eight networks together.
    assert GPU.collective_s("all_gather", 64e9, 64, 8) < one_a_node * 8
    assert replace(GPU, hop_s=(0, 1.0)).collective_s("all_gather", 0.001, 64, 8) == pytest.approx(7.0, rel=1e-3)
    assert replace(GPU, hop_s=(0, 1.0)).collective_s("all_reduce", 0.001, 64, 8) == pytest.approx(6.0, rel=1e-3)


def test_machines_that_were_measured() -> None:
    ranks = [RankSpeed(r, 0, "a", "cpu", {"fp32": 2e9 + r, "bf16": 3e9 + r}, 5e9 + r) for r in range(2)]
    times = [
        CollectiveSpeed("all_gather", "all ranks", 2, size, 1e-3 + size / 2 / 1e9) for size in (2**12, 2**20, 2**26)
    ]
    found = probed_hardware(Speed("2026-01-01 00:00:00", "gloo", ranks, times), 2)
    assert found.is_cpu
    assert found.matmul_flops == {DType.FP32: 2e9, DType.BF16: 3e9}, "the slowest rank counts"
    assert found.memory_bytes_per_s == 5e9
    assert found.collective_s("all_gather", 2e6, 2, 2) == pytest.approx(1e-3 + 1e-3, rel=1e-3)
    assert found.collective_s("reduce_scatter", 2e6, 2, 2) == found.collective_s("all_gather", 2e6, 2, 2)
    assert scaled(found, "link", 2).collective_s("all_gather", 2e9, 2, 2) == pytest.approx(0.5, rel=0.01)
    assert scaled(found, "network", 2).collective_s("all_gather", 2e9, 2, 2) == pytest.approx(1.0, rel=0.01)
    # Between nodes nothing was measured: there it is the network that is given.
    slow = probed_hardware(Speed("2026-01-01 00:00:00", "gloo", ranks, times), 2, 1e9)
    assert slow.collective_s("all_gather", 2e9, 2, 1) == pytest.approx(1 / 0.75, rel=0.01)


def test_links_of_several_nodes_that_were_measured() -> None:
    ranks = [RankSpeed(rank, rank // 2, "ab"[rank // 2], "cpu", {"fp32": 2e9}, 5e9) for rank in range(4)]
    rates = {"all ranks": (4, 2e9), "within a node": (2, 8e9), "between nodes": (2, 1e9)}
    times = [
        CollectiveSpeed("all_gather", group, num_ranks, size, size * (num_ranks - 1) / num_ranks / rate)
        for group, (num_ranks, rate) in rates.items()
        for size in (2**20, 2**26)
    ]
    found = probed_hardware(Speed("2026-01-01 00:00:00", "gloo", ranks, times), 2)
    assert found.collective_s("all_gather", 2e9, 2, 2) == pytest.approx(1 / 8, rel=0.01)
    assert found.collective_s("all_gather", 2e9, 2, 1) == pytest.approx(1.0, rel=0.01)
    assert scaled(found, "network", 4).collective_s("all_gather", 2e9, 2, 1) == pytest.approx(1 / 4, rel=0.01)
