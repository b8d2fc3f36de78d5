"""The compressed mean against a plain one in a single process, bit for bit, on real gloo ranks."""

from __future__ import annotations

import pytest
import torch
from harness.train.onebit import BLOCK, ReferenceMean
from harness.train.ranks import run_on_ranks
from torch import Tensor

from launcher.comm import observe
from launcher.comm.compressed import CompressedMean, pack_signs, sign_table, unpack_signs
from launcher.comm.groups import world_group
from launcher.comm.observe import LogRules, start_log, stop_log

NUMELS = [5, 3000, 1, 1024, 2500]  # smaller than a block, several blocks, cut by a chunk's end
CALLS = 4


def contributions(rank: int, call: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * call + rank)
    runs = [torch.randn(numel, generator=generator) * 10.0**-run for run, numel in enumerate(NUMELS)]
    runs[1][::7] = 0.0
    runs[1][::14] = -0.0
    return runs


def _filled(mean: CompressedMean, runs: list[Tensor]) -> Tensor:
    flat = torch.zeros(mean.numel)
    for place, run in zip(mean.places, runs, strict=True):
        flat[place] = run
    return flat


def _average(rank: int, world_size: int) -> tuple[list[list[Tensor]], bool]:
    mean = CompressedMean(world_group(), NUMELS)
    found, is_padding_zero = [], True
    for call in range(CALLS):
        flat = _filled(mean, contributions(rank, call))
        mean.average(flat)
        found.append([flat[place].clone() for place in mean.places])
        for place in mean.places:
            flat[place] = 0.0
        is_padding_zero = is_padding_zero and not flat.any()
    return found, is_padding_zero


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_gets_the_bits_of_the_plain_mean(world_size: int) -> None:
    results = run_on_ranks(world_size, _average)
    reference = ReferenceMean(world_size, NUMELS)
    for call in range(CALLS):
        expected = reference.average([contributions(rank, call) for rank in range(world_size)])
        for found, is_padding_zero in results:
            assert all(torch.equal(a, b) for a, b in zip(found[call], expected, strict=True))
            assert is_padding_zero


def test_alone_nothing_is_rounded() -> None:
    [(found, _)] = run_on_ranks(1, _average)
    assert torch.equal(found[0][1], contributions(0, 0)[1])


def _mean_of_means(rank: int, world_size: int, num_calls: int) -> float:
    """The same vector again and again: how far is the mean of what came back?"""
    mean = CompressedMean(world_group(), NUMELS)
    total = torch.zeros(mean.numel)
    for _ in range(num_calls):
        flat = _filled(mean, contributions(rank, 0))
        mean.average(flat)
        total += flat
    exact = sum(_filled(mean, contributions(other, 0)) for other in range(world_size)) / world_size
    return ((total / num_calls - exact).norm() / exact.norm()).item()


def test_error_feedback_makes_the_running_mean_converge() -> None:
    """Errors stay bounded, so the distance falls as one over the number of calls."""
    distances = [run_on_ranks(2, _mean_of_means, num_calls)[0] for num_calls in (1, 16, 256)]
    assert distances[0] > 0.5
    assert distances[1] < distances[0] / 2  # the largest elements take a while to be noticed
    assert distances[2] < distances[1] / 8


def _one_rests(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """The second run sits out a call between two others."""
    mean = CompressedMean(world_group(), NUMELS)
    means = []
    for call, resting in enumerate([(), (1,), ()]):
        flat = _filled(mean, contributions(rank, call))
        mean.average(flat, resting)
        means.append(flat[mean.places[1]].clone())
    return means, [contributions(rank, call)[1] for call in range(3)]


def test_a_run_that_rests_keeps_its_values_and_errors() -> None:
    results = run_on_ranks(2, _one_rests)
    reference = ReferenceMean(2, NUMELS)
    first, last = (reference.average([contributions(rank, call) for rank in range(2)])[1] for call in (0, 2))
    for means, given in results:
        assert torch.equal(means[0], first)
        assert torch.equal(means[1], given[1])
        assert torch.equal(means[2], last)


def _bytes(rank: int, world_size: int) -> tuple[int, int, dict[tuple[str, int], int]]:
    mean = CompressedMean(world_group(), [64 * BLOCK * world_size])
    flat = torch.randn(mean.numel)
    before = observe.sent_bytes()
    mean.average(flat)
    sent = observe.sent_bytes() - before
    log = start_log(LogRules())
    mean.average(flat)
    stop_log(log)
    return sent, flat.nbytes, {key: count for key, (count, _) in log.totals().items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_bytes_are_those_of_one_bit_an_element_and_a_scale_a_block(world_size: int) -> None:
    for sent, num_bytes, logged in run_on_ranks(world_size, _bytes):
        wire = num_bytes // 32 + num_bytes // BLOCK
        assert sent == 2 * wire * (world_size - 1) // world_size
        assert logged == {("all_gather", wire): 1, ("all_to_all", wire): 1}


def test_signs_survive_packing() -> None:
    values = torch.randn(4, 1024)
    values[0, :4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    packed = pack_signs(values)
    assert packed.dtype == torch.uint8
    assert packed.numel() == 512
    assert torch.equal(unpack_signs(packed, sign_table(values.device)), torch.copysign(torch.ones(4, 1024), values))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_signs_survive_packing_on_the_gpu() -> None:
    values = torch.randn(2**10, 2**10, device="cuda")
    signs = unpack_signs(pack_signs(values), sign_table(values.device))
    assert torch.equal(signs, torch.copysign(torch.ones_like(values), values))
    assert torch.equal(pack_signs(values).cpu(), pack_signs(values.cpu()))
