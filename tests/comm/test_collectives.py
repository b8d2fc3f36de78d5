"""Collectives against plain sums, bit for bit, on real gloo ranks."""

from __future__ import annotations

import datetime
import gc
import uuid
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.train.ranks import run_on_ranks

from launcher.base.errors import EngineError
from launcher.comm import pending
from launcher.comm.device import DeviceRuntime
from launcher.comm.groups import RankGroup, init_distributed, world_group

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 4])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
CHUNK = 96


def contribution(rank: int, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(world_size * CHUNK, generator=generator).to(dtype)


def sum_in_rank_order(world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Sums are fp32 whatever travels, and rounded once."""
    total = contribution(0, world_size, dtype).float()
    for rank in range(1, world_size):
        total = total + contribution(rank, world_size, dtype)
    return total.to(dtype)


def _mean_of_large_halves(rank: int, world_size: int) -> float:
    """The sum of what the ranks hold overflows fp16, its mean does not."""
    flat = torch.full((world_size * CHUNK,), 60000.0, dtype=torch.float16)
    output = torch.empty(CHUNK, dtype=torch.float16)
    world_group().communicator.reduce_scatter(flat, output, 1.0 / world_size).wait()
    return output.unique().item()


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_mean_in_fp16_does_not_overflow(world_size: int) -> None:
    assert run_on_ranks(world_size, _mean_of_large_halves) == [60000.0] * world_size


def _all_reduce_of_halves(rank: int, world_size: int) -> torch.Tensor:
    flat = torch.full((world_size * CHUNK,), -1.0)
    sent = contribution(rank, world_size, torch.bfloat16)
    world_group().communicator.all_reduce(flat, sent=sent).wait()
    return flat


@WORLDS
def test_what_is_sent_in_16_bits_is_summed_in_32(world_size: int) -> None:
    expected = sum(contribution(rank, world_size, torch.bfloat16).float() for rank in range(world_size))
    for found in run_on_ranks(world_size, _all_reduce_of_halves):
        assert torch.equal(found, expected)


def _reduce_scatter(rank: int, world_size: int, dtype: torch.dtype, in_place: bool) -> torch.Tensor:
    flat = contribution(rank, world_size, dtype)
    output = flat.chunk(world_size)[rank] if in_place else torch.empty(CHUNK, dtype=dtype)
    pending = world_group().communicator.reduce_scatter(flat, output)
    pending.wait()
    pending.wait()  # idempotent
    return output.clone()


@WORLDS
@DTYPES
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter_sums_in_rank_order(world_size: int, dtype: torch.dtype, in_place: bool) -> None:
    found = torch.cat(run_on_ranks(world_size, _reduce_scatter, dtype, in_place))
    assert torch.equal(found, sum_in_rank_order(world_size, dtype))


def _all_reduce(rank: int, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    flat = contribution(rank, world_size, dtype)
    world_group().communicator.all_reduce(flat).wait()
    return flat


@WORLDS
@DTYPES
def test_all_reduce_gives_every_rank_the_same_bits(world_size: int, dtype: torch.dtype) -> None:
    for found in run_on_ranks(world_size, _all_reduce, dtype):
        assert torch.equal(found, sum_in_rank_order(world_size, dtype))


def _all_gather(rank: int, world_size: int) -> torch.Tensor:
    flat = torch.full((world_size * CHUNK,), -1.0)
    flat.chunk(world_size)[rank].fill_(float(rank))
    world_group().communicator.all_gather(flat).wait()
    return flat


@WORLDS
def test_all_gather_fills_in_every_chunk(world_size: int) -> None:
    expected = torch.arange(world_size, dtype=torch.float32).repeat_interleave(CHUNK)
    for found in run_on_ranks(world_size, _all_gather):
        assert torch.equal(found, expected)


def _several_in_flight(rank: int, world_size: int) -> list[torch.Tensor]:
    group = world_group()
    flats = [contribution(rank + 10 * number, world_size, torch.float32) for number in range(4)]
    pending = [group.communicator.all_reduce(flat) for flat in flats]
    for one in pending:
        one.wait()
    return flats


def test_several_at_once_do_not_mix() -> None:
    results = run_on_ranks(4, _several_in_flight)
    for number in range(4):
        expected = contribution(10 * number, 4, torch.float32)
        for rank in range(1, 4):
            expected = expected + contribution(rank + 10 * number, 4, torch.float32)
        for found in results:
            assert torch.equal(found[number], expected)


def _drain_what_is_not_held(rank: int, world_size: int, key: str) -> torch.Tensor:
    """Begin a gather, forget it and drain. Rank 1 begins its half only when rank 0 is about to drain."""
    flat = torch.full((world_size * CHUNK,), -1.0)
    flat.chunk(world_size)[rank].fill_(float(rank))
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait([key])
    world_group().communicator.all_gather(flat)
    gc.collect()
    if rank == 0:
        store.set(key, "about to drain")
    pending.drain(datetime.timedelta(seconds=60))
    return flat


def test_what_is_not_waited_for_is_drained() -> None:
    expected = torch.arange(2, dtype=torch.float32).repeat_interleave(CHUNK)
    for found in run_on_ranks(2, _drain_what_is_not_held, uuid.uuid4().hex):
        assert torch.equal(found, expected)


def _held_after(rank: int, world_size: int) -> int:
    group = world_group()
    pending.drain()
    for dtype in (torch.float32, torch.bfloat16):
        flat = torch.zeros(world_size * CHUNK)
        group.communicator.all_reduce(flat, sent=contribution(rank, world_size, dtype)).wait()
        group.communicator.reduce_scatter(flat, torch.empty(CHUNK)).wait()
        group.communicator.all_gather(flat).wait()
    held = len(pending._in_flight)
    pending.drain()  # waits for nothing a second time
    return held


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_has_been_waited_for_is_not_held(world_size: int) -> None:
    assert run_on_ranks(world_size, _held_after) == [0] * world_size


def _scalars(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    group = world_group()
    summed = group.communicator.sum_scalars(torch.tensor([0.1 * rank, 1.0], dtype=torch.float64))
    return summed.tolist(), group.communicator.gather_scalars(rank / 3)


@WORLDS
def test_scalars(world_size: int) -> None:
    results = run_on_ranks(world_size, _scalars)
    total = 0.0
    for rank in range(world_size):
        total += 0.1 * rank
    for summed, gathered in results:
        assert summed == pytest.approx([total, world_size], rel=1e-15)
        assert summed == results[0][0]
        assert gathered == [rank / 3 for rank in range(world_size)]


def _broadcast(rank: int, world_size: int) -> list[Any]:
    tensors = [torch.full((3,), rank, dtype=torch.float32), torch.full((2, 2), rank, dtype=torch.int64)]
    world_group().communicator.broadcast(tensors)
    return tensors


@WORLDS
def test_broadcast_takes_rank_0(world_size: int) -> None:
    for tensors in run_on_ranks(world_size, _broadcast):
        assert not any(tensor.any() for tensor in tensors)


def test_an_incomplete_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(EngineError, match="lacks WORLD_SIZE, MASTER_ADDR") as caught:
        init_distributed()
    assert "start the script with `launch`" in str(caught.value)


def test_a_plain_python_process_is_a_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    init_distributed()
    group = world_group()
    assert (group.rank, group.world_size, group.process_group) == (0, 1, None)


# ---- a group that is not the whole world ----


def _among_the_last_two(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Every collective between global ranks 1 and 2, whose ranks in their group are 0 and 1."""
    process_group = dist.new_group([1, 2])
    if rank == 0:
        return {}
    group = RankGroup(rank - 1, 2, process_group, DeviceRuntime(torch.device("cpu")))
    found = {"reduce_scatter": torch.empty(CHUNK, dtype=torch.bfloat16), "all_gather": torch.zeros(2 * CHUNK)}
    flat = contribution(rank, 2, torch.bfloat16)
    group.communicator.reduce_scatter(flat, found["reduce_scatter"]).wait()
    found["all_gather"].chunk(2)[group.rank].fill_(float(rank))
    group.communicator.all_gather(found["all_gather"]).wait()
    found["all_reduce"] = torch.zeros(2 * CHUNK)
    group.communicator.all_reduce(found["all_reduce"], sent=flat).wait()
    found["all_to_all"] = torch.empty(2 * CHUNK)
    group.communicator.all_to_all(torch.full((2 * CHUNK,), float(rank)), found["all_to_all"]).wait()
    found["broadcast"] = torch.full((4,), float(rank))
    group.communicator.broadcast([found["broadcast"]], source=1)
    found["scalars"] = torch.tensor(group.communicator.gather_scalars(float(rank)))
    return found


def test_collectives_of_a_part_of_the_world_know_their_peers() -> None:
    nothing, *found = run_on_ranks(3, _among_the_last_two)
    assert nothing == {}
    total = contribution(1, 2, torch.bfloat16).float() + contribution(2, 2, torch.bfloat16).float()
    one_then_two = torch.cat([torch.full((CHUNK,), 1.0), torch.full((CHUNK,), 2.0)])
    for position, values in enumerate(found):
        assert torch.equal(values["reduce_scatter"], total.to(torch.bfloat16).chunk(2)[position])
        assert torch.equal(values["all_reduce"], total)
        assert torch.equal(values["all_gather"], one_then_two)
        assert torch.equal(values["all_to_all"], one_then_two)
        assert torch.equal(values["broadcast"], torch.full((4,), 2.0))
        assert values["scalars"].tolist() == [1.0, 2.0]
