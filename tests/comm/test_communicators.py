"""The two communicators beside each other, on gloo's ranks, and the doubles that other tests trust."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.train.collective import communicators, late_group
from harness.train.ranks import run_on_ranks
from torch import Tensor

from launcher.comm.groups import RankGroup, group_of_flags, world_group
from launcher.comm.mesh import subgroup

CHUNK = 96
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def values(rank: int, world_size: int, dtype: torch.dtype) -> Tensor:
    """Small integers: every sum of theirs is exact in every type and order."""
    return ((torch.arange(world_size * CHUNK) * 7 + rank * 3) % 11).to(dtype)


def _all_kinds(
    rank: int, world_size: int, kind: str, dtype: torch.dtype, output_dtype: torch.dtype, scale: float
) -> dict[str, Tensor]:
    """Each collective once; `scale` is an exact one."""
    found: dict[str, Tensor] = {}
    with communicators(kind):
        group = world_group()
        found["reduce_scatter"] = torch.empty(CHUNK, dtype=output_dtype)
        group.communicator.reduce_scatter(values(rank, world_size, dtype), found["reduce_scatter"], scale).wait()
        flat = values(rank, world_size, dtype)
        found["in place"] = flat.chunk(world_size)[rank]
        group.communicator.reduce_scatter(flat, found["in place"], scale).wait()
        found["all_reduce"] = torch.empty(world_size * CHUNK, dtype=output_dtype)
        sent = values(rank, world_size, dtype)
        group.communicator.all_reduce(found["all_reduce"], scale, sent=sent).wait()
        found["all_reduce in place"] = values(rank, world_size, dtype)
        group.communicator.all_reduce(found["all_reduce in place"], scale).wait()
        found["all_gather"] = torch.empty(world_size * CHUNK, dtype=dtype)
        group.communicator.all_gather(found["all_gather"], values(rank, 1, dtype)).wait()
        found["all_gather in place"] = values(rank, world_size, dtype)
        group.communicator.all_gather(found["all_gather in place"]).wait()
        found["all_to_all"] = torch.empty(world_size * CHUNK, dtype=dtype)
        group.communicator.all_to_all(values(rank, world_size, dtype), found["all_to_all"]).wait()
        sends = [torch.full((peer,), float(rank)) for peer in range(world_size)]
        receives = [torch.empty(rank) for _ in range(world_size)]
        group.communicator.exchange(sends, receives).wait()
        found["exchange"] = torch.cat(receives)
        found["rows"] = group.communicator.gather_rows(torch.tensor([[rank, 1.0]], dtype=torch.float64))
        found["broadcast"] = torch.full((2, 3), float(rank))
        group.communicator.broadcast([found["broadcast"]], source=1)
        assert group.buffers.lent_bytes == 0
    return {name: tensor.clone() for name, tensor in found.items()}


@DTYPES
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world_size", "scale"), [(2, 1.0), (2, 0.5), (4, 0.25), (3, 2.0)])
def test_both_do_the_same(world_size: int, scale: float, dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    arguments = (dtype, output_dtype, scale)
    gloo = run_on_ranks(world_size, _all_kinds, "gloo", *arguments)
    nccl = run_on_ranks(world_size, _all_kinds, "nccl", *arguments)
    total = sum(values(rank, world_size, torch.float32) for rank in range(world_size)) * scale
    for rank, (one, other) in enumerate(zip(gloo, nccl, strict=True)):
        assert torch.equal(other["all_reduce"], total.to(output_dtype))
        assert torch.equal(other["reduce_scatter"], total.chunk(world_size)[rank].to(output_dtype))
        for name, tensor in one.items():
            assert torch.equal(other[name], tensor), name


def _part_of_a_large_sum(rank: int, world_size: int) -> float:
    output = torch.empty(CHUNK, dtype=torch.float16)
    with communicators("nccl"):
        flat = torch.full((world_size * CHUNK,), 6e4)
        world_group().communicator.reduce_scatter(flat, output, 0.1).wait()
    return output.unique().item()


def test_a_sum_that_fp16_cannot_hold_is_scaled_before_it_is_rounded() -> None:
    assert run_on_ranks(2, _part_of_a_large_sum) == [12000.0] * 2


# ---- the late double finds what it is for ----


def _misuse(rank: int, world_size: int, kind: str, how: str) -> Any:
    def group_and_flat() -> tuple[RankGroup, Tensor]:
        group = world_group()
        return group, group.buffers.borrow(world_size * CHUNK, torch.float32).fill_(1.0)

    with late_group(kind):
        group, flat = group_and_flat()
        output = group.buffers.borrow(CHUNK, torch.float32).zero_()
        pending = group.communicator.reduce_scatter(flat, output)
        if how == "reads early":
            early = output.clone()
            pending.wait()
            return early.isnan().all().item() and output.eq(world_size).all().item()
        if how == "writes the input":
            flat.zero_()
        elif how == "writes the output":
            output.zero_()
        else:
            group.buffers.give_back(flat)
        try:
            pending.wait()
        except AssertionError as error:
            return str(error)
        return "not found"


@pytest.mark.parametrize("kind", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("reads early", True),
        ("writes the input", "a buffer was written before the collective had ended"),
        ("writes the output", "a buffer was written before the collective had ended"),
        ("gives the input back", "a buffer was given back before the collective had ended"),
    ],
)
def test_the_late_double_finds(how: str, found: Any, kind: str) -> None:
    assert run_on_ranks(2, _misuse, kind, how) == [found] * 2


def _further_groups(rank: int, world_size: int) -> int:
    """Return how many process groups there are of the same ranks, for different purposes."""
    world = world_group(has_reduce_group=True)
    assert world.process_group is not None
    assert world.reduce_process_group is not None
    ranks = [list(range(world_size))]
    found = [world.process_group, world.reduce_process_group, group_of_flags()]
    found += [subgroup(ranks, purpose) for purpose in ("one", "another", "one")]
    assert world_group(has_reduce_group=True).reduce_process_group is world.reduce_process_group
    return len({id(group) for group in found})


def test_each_purpose_has_a_process_group_of_its_own() -> None:
    """Collectives of two purposes are in no order with each other; in one group NCCL would match them by order."""
    assert run_on_ranks(2, _further_groups) == [5, 5]
