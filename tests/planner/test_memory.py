"""The formula of bytes per rank: what it is for round numbers, and what holds for any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.config.schema import Config
from launcher.planner.estimate import Machines, RankPart, part_memory
from launcher.planner.memory import (
    CUBLAS_BYTES,
    CUDA_CONTEXT_BYTES,
    GRADIENT_UNITS,
    NCCL_ALONE_BYTES,
    NCCL_BYTES,
    REDUCING_UNITS,
    Setting,
    Share,
    States,
    rank_memory,
)
from launcher.planner.model import ModelFacts, Parameter, parse_count, typical_model, typical_shape
from launcher.planner.settings import at, in_precision, ladder, setting_of
from launcher.sharding.mesh import MeshSizes

P, N = 120_000_000, 4  # blocks are large enough to be units of their own
NUM_BLOCKS = 10
MODEL = ModelFacts(
    "m", "test", tuple(Parameter(f"blocks.{i}.weight", P // NUM_BLOCKS) for i in range(NUM_BLOCKS))
)  # fmt: skip
BLOCK = P // NUM_BLOCKS
FP32, BF16 = in_precision(Config(), "fp32"), in_precision(Config(), "bf16")
CPU = {"optimizer": "cpu", "param": "cpu"}

precisions = st.builds(
    lambda name, master, states: in_precision(
        Config(), name, has_16bit_master=master and name != "fp32", has_16bit_states=states and name == "bf16"
    ),
    st.sampled_from(["fp32", "bf16", "fp16"]), st.booleans(), st.booleans(),
)  # fmt: skip
num_states = st.integers(0, 3)


def setting(
    stage: int, precision: Config = BF16, world_size: int = N, optimizer: str = "none", param: str = "none", **zero: Any
) -> Setting:
    """Return a setting with some keys of `zero_optimization`, and `ratio` of `offload_optimizer`."""
    config = at(precision, stage, optimizer, param)
    section = config.zero_optimization
    offload = section.offload_optimizer.model_copy(update={"ratio": zero.pop("ratio", 1.0)})
    zero = {"offload_optimizer": offload, **zero}
    return setting_of(config.model_copy(update={"zero_optimization": section.model_copy(update=zero)}), world_size)


models = st.builds(lambda count: typical_model(count, typical_shape(count)), st.integers(10**6, 10**12))
worlds = st.integers(1, 4096)


@pytest.mark.parametrize(
    ("stage", "precision", "expected"),
    [
        (0, FP32, (4, 4, 8)),
        (1, FP32, (4, 4, 8 / N)),
        (2, FP32, (4, 4 / N, 8 / N)),
        (3, FP32, (4 / N, 4 / N, 8 / N)),
        (0, BF16, (2, 4, 12)),
        (1, BF16, (2, 4, 12 / N)),
        (2, BF16, (2, 4 / N, 12 / N)),
        (3, BF16, (2 / N, 4 / N, 12 / N)),
        (2, in_precision(Config(), "fp16", has_16bit_master=True), (2, 2 / N, 8 / N)),
        (2, in_precision(Config(), "bf16", has_16bit_states=True), (2, 4 / N, 8 / N)),
        (2, in_precision(Config(), "bf16", has_16bit_master=True, has_16bit_states=True), (2, 2 / N, 4 / N)),
    ],
)
def test_bytes_per_parameter(stage: int, precision: Config, expected: tuple[float, float, float]) -> None:
    memory = rank_memory(MODEL, setting(stage, precision), N)
    assert (memory.parameters, memory.gradients, memory.optimizer) == tuple(P * each for each in expected)
    assert memory.host == memory.disk == 0


def context(found: Setting, world_size: int = N, context_bytes: int = CUDA_CONTEXT_BYTES) -> int:
    return part_memory(
        RankPart(MODEL, Share()), Machines(1, world_size, context_bytes=context_bytes), found, None
    ).context


def test_libraries_count_by_communicator_thread_and_updated_element() -> None:
    tables = 2 * 4 * P // 1024  # of every element, for the update and for the norm
    of_all = CUDA_CONTEXT_BYTES + 2 * CUBLAS_BYTES
    assert context(setting(0, world_size=1), 1) == of_all + NCCL_ALONE_BYTES + tables
    assert context(setting(1)) == of_all + NCCL_BYTES + tables // N
    assert context(setting(2, optimizer="cpu")) == of_all + NCCL_BYTES
    mics = setting(3, mics_shard_size=2)
    assert context(mics) == of_all + 3 * NCCL_BYTES + tables // 2, "all, those of a copy, those of an owned range"
    in_parts = replace(setting(1), sizes=MeshSizes(2, tensor=2))
    assert context(in_parts) == of_all + 3 * NCCL_BYTES + tables // 2 // 2
    inference = replace(setting(0), trains=False)
    assert context(inference) == CUDA_CONTEXT_BYTES + CUBLAS_BYTES + NCCL_BYTES
    assert context(setting(1), context_bytes=0) == 0, "ranks train on CPUs"


def test_an_optimizer_without_states_keeps_the_master_alone() -> None:
    memory = rank_memory(MODEL, replace(setting(2), states=States(0)), N)
    assert memory.optimizer == 4 * P // N


@pytest.mark.parametrize(
    ("stage", "precision", "offload", "device", "host"),
    [
        # The host keeps a 16-bit copy of what it updates, unless the parameters rest there anyway.
        (1, BF16, {"optimizer": "cpu"}, (2, 4, 0), 18 / N),
        (2, BF16, {"optimizer": "cpu"}, (2, 0, 0), 18 / N),
        (3, BF16, {"optimizer": "cpu"}, (2 / N, 0, 0), 18 / N),
        (3, BF16, CPU, (0, 0, 0), 18 / N),
        (3, BF16, {"param": "cpu"}, (0, 4 / N, 12 / N), 2 / N),
        # fp32: the host needs parameters of its own to update, unless they rest there anyway.
        (2, FP32, {"optimizer": "cpu"}, (4, 0, 0), 16 / N),
        (3, FP32, CPU, (0, 0, 0), 16 / N),
        (3, FP32, {"param": "cpu"}, (0, 4 / N, 12 / N), 4 / N),
        (2, BF16, {"optimizer": "cpu", "ratio": 0.5}, (2, 2 / N, 6 / N), 9 / N),
    ],
)
def test_bytes_per_parameter_with_offload(
    stage: int, precision: Config, offload: dict[str, Any], device: tuple[float, float, float], host: float
) -> None:
    memory = rank_memory(MODEL, setting(stage, precision, **offload), N)
    assert (memory.parameters, memory.gradients, memory.optimizer) == tuple(P * each for each in device)
    assert memory.host == P * host


def test_disk_holds_what_the_host_would_and_the_host_holds_buffers() -> None:
    fine = tuple(Parameter(f"blocks.{i // 10}.{i % 10}.weight", 1000) for i in range(P // 100_000))
    model, num_params = ModelFacts("m", "test", fine), len(fine) * 1000
    params = Config().zero_optimization.offload_param.model_copy(
        update={"device": "nvme", "max_in_cpu": 0, "buffer_size": 1000}
    )
    bounds = {"sub_group_size": 500, "stage3_param_persistence_threshold": 0}
    memory = rank_memory(model, setting(3, optimizer="nvme", offload_param=params, **bounds), N)
    assert memory.disk == num_params * 18 // N
    assert memory.host == 3 * 500 * 16 + 5 * 500 * 2


def test_units_in_flight() -> None:
    autograd = 2 * BLOCK
    received = REDUCING_UNITS * 2 * BLOCK * (N - 1) // N  # what the other ranks sent
    gradients = GRADIENT_UNITS * 2 * BLOCK + received
    assert rank_memory(MODEL, setting(1), N).in_flight == autograd + gradients
    copies = REDUCING_UNITS * 2 * BLOCK + received  # of what the sums have, in what is sent
    assert rank_memory(MODEL, setting(1, overlap_comm=False), N).in_flight == autograd + copies
    assert rank_memory(MODEL, setting(2), N).in_flight == autograd + gradients
    # The unit in use and one ahead.
    sharded = setting(3, stage3_prefetch_bucket_size=1, stage3_max_reuse_distance=0)
    assert rank_memory(MODEL, sharded, N).in_flight == autograd + gradients + 2 * (2 * BLOCK + 1)
    assert rank_memory(MODEL, setting(3), N).in_flight == autograd + gradients + 2 * P  # kept for backward
    # Without overlap nothing is reduced before the end of backward.
    assert rank_memory(MODEL, setting(2, overlap_comm=False), N).in_flight == autograd + 2 * P + received
    assert rank_memory(MODEL, setting(3, world_size=1), 1).in_flight == autograd


def test_small_parameters_stay_whole_at_stage_3() -> None:
    model = replace(MODEL, params=(*MODEL.params, Parameter("norm.weight", 1000)))
    assert rank_memory(model, setting(3), N).parameters == 2 * (P // N + 1000)


def test_frozen_parameters_have_neither_gradient_nor_states() -> None:
    frozen = tuple(Parameter(f"frozen.{i}.weight", BLOCK, trainable=False) for i in range(NUM_BLOCKS))
    memory = rank_memory(replace(MODEL, params=(*MODEL.params, *frozen)), setting(2), N)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (4 * P, 4 * P // N, 12 * P // N)


def test_units_are_blocks_and_the_rest_cut_by_the_bound() -> None:
    names = ["wte.weight", "h.0.a.weight", "h.0.b.0.weight", "h.1.a.weight", "head.weight"]
    model = ModelFacts("m", "test", tuple(Parameter(name, 10 * (i + 1)) for i, name in enumerate(names)))
    assert sorted(model.unit_numels(10**9, shards_params=True)) == [40, 50, 60]
    assert sorted(model.unit_numels(30, shards_params=True)) == [10, 20, 30, 40, 50]
    assert model.unit_numels(10**9, shards_params=False) == [150]
    assert model.unit_numels(120, shards_params=False) == [110, 40]


@given(models, precisions, num_states, worlds)
def test_a_higher_stage_or_more_ranks_never_take_more_states(
    model: ModelFacts, precision: Config, count: int, n: int
) -> None:
    def states(world_size: int) -> list[int]:
        found = [replace(setting(stage, precision, world_size), states=States(count)) for stage in range(4)]
        return [rank_memory(model, one, world_size).model_states for one in found]

    assert states(n) == sorted(states(n), reverse=True)
    assert all(more <= less for more, less in zip(states(2 * n), states(n), strict=True))


@given(models, precisions)
def test_alone_every_stage_keeps_the_same(model: ModelFacts, precision: Config) -> None:
    assert len({rank_memory(model, setting(stage, precision, 1), 1).device for stage in range(4)}) == 1


@given(models, precisions, worlds)
def test_shards_of_all_ranks_make_the_whole(model: ModelFacts, precision: Config, n: int) -> None:
    whole = rank_memory(model, setting(0, precision, n), n)
    sharded = rank_memory(model, setting(3, precision, n, stage3_param_persistence_threshold=0), n)
    assert whole.model_states <= n * sharded.model_states <= whole.model_states + 3 * n


@given(models, precisions, worlds)
def test_offload_moves_bytes_and_loses_none(model: ModelFacts, precision: Config, n: int) -> None:
    for stage in (2, 3):
        one = setting(stage, precision, n)
        if not one.element.master:
            continue
        here = rank_memory(model, one, n)
        for offload in ({"optimizer": "cpu"}, *([CPU] if stage == 3 else [])):
            away = rank_memory(model, setting(stage, precision, n, **offload), n)
            copied = 0 if offload is CPU else one.element.param * model.num_trainable / n
            assert abs(away.model_states + away.host - here.model_states - copied) <= 5


@given(models, precisions, worlds)
def test_every_rung_of_the_ladder_has_a_size(model: ModelFacts, precision: Config, n: int) -> None:
    for one in ladder(precision, n):
        memory = rank_memory(model, one, n)
        assert min(memory.parameters, memory.gradients, memory.optimizer, memory.host, memory.disk) >= 0
        assert memory.device >= memory.in_flight > 0


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: setting(2, **CPU), "offloaded at stage 3 only"),
        (lambda: setting(0, optimizer="cpu"), "stages 1, 2 and 3 only"),
        (lambda: in_precision(Config(), "fp32", has_16bit_states=True), "need a 16-bit precision"),
        (lambda: in_precision(Config(), "fp16", has_16bit_states=True), "optimizer states in 16 bit need bf16"),
    ],
)
def test_what_does_not_exist_is_an_error_with_a_remedy(build: object, expected: str) -> None:
    assert callable(build)
    with pytest.raises(UsageError, match=expected) as caught:
        build()
    assert caught.value.diagnostics[0].hint


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7 * 10**9), ("350M", 350 * 10**6), ("1.3b", 1_300_000_000), ("6_700_000_000", 6_700_000_000),
        ("2,783,959,040", 2_783_959_040), ("1T", 10**12), ("125k", 125_000), ("7e9", 7 * 10**9), ("seven", None),
        ("B", None), ("7BB", None), ("", None),
    ],
)  # fmt: skip
def test_counts(text: str, count: int | None) -> None:
    assert parse_count(text) == count


@given(st.integers(1, 10**15))
def test_a_count_is_spread_over_a_model_exactly(count: int) -> None:
    assert parse_count(str(count)) == count
    model = typical_model(count, typical_shape(count))
    assert model.num_params == count
    for is_sharded in (True, False):
        assert sum(model.unit_numels(10**18, shards_params=is_sharded)) == count


@pytest.mark.parametrize("offload", [{}, CPU])
def test_shards_within_a_node(offload: dict[str, str]) -> None:
    node, ranks = 2, 2 * N
    everywhere = rank_memory(MODEL, setting(3, world_size=ranks, **offload), ranks)
    mics = rank_memory(MODEL, setting(3, world_size=ranks, mics_shard_size=node, **offload), ranks)
    assert mics == rank_memory(MODEL, setting(3, world_size=node, **offload), node)
    second = rank_memory(MODEL, setting(3, world_size=ranks, zero_hpz_partition_size=node, **offload), ranks)
    assert second == replace(everywhere, parameters=everywhere.parameters + 2 * P // node)
    assert rank_memory(MODEL, setting(2, mics_shard_size=node), N) == rank_memory(MODEL, setting(2), N)
