"""What a probe has measured: lines through collectives, and who is slower than the others."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from launcher.planner.speed import CollectiveSpeed, LinkSpeed, RankSpeed, Speed, fits_of, slow

RANK = RankSpeed(0, 0, "node-a", "cpu", {"fp32": 1e12, "bf16": 4e12}, 1e10, 5e9, 2e9, 1e9)


def measured(*ranks: RankSpeed, **facts: object) -> Speed:
    return Speed("2026-01-02 03:04:05", "gloo", list(ranks), **facts)  # type: ignore[arg-type]


def test_json_holds_everything() -> None:
    collectives = [CollectiveSpeed("all_gather", "all ranks", 4, size, 1e-4 + size / 1e9) for size in (2**12, 2**20)]
    links = [LinkSpeed((0, 1), ("node-a", "node-b"), 1e9)]
    found = measured(RANK, replace(RANK, rank=1, node=1, host="node-b"), collectives=collectives, links=links)
    plain = json.dumps(found.as_json())
    assert Speed.from_json(plain) == found
    assert json.loads(plain)["slow"] == []
    assert found.key == "node-a,node-b-2xcpu"


def test_the_rate_of_a_link_is_that_of_a_ring() -> None:
    assert CollectiveSpeed("all_gather", "all ranks", 4, 4000, 1e-3).bus_bytes_per_s == pytest.approx(3e6)
    assert CollectiveSpeed("all_reduce", "all ranks", 4, 4000, 1e-3).bus_bytes_per_s == pytest.approx(6e6)


@pytest.mark.parametrize("latency_s", [0.0, 2e-5, 1e-3])
def test_the_line_through_exact_times_is_found(latency_s: float) -> None:
    sizes = [2**power for power in (12, 16, 20, 24)]
    times = [CollectiveSpeed("all_reduce", "all ranks", 4, n, latency_s + 1.5 * n / 2e9) for n in sizes]
    fit = fits_of(times)["all_reduce", "all ranks"]
    assert fit.latency_s == pytest.approx(latency_s, abs=1e-9)
    assert fit.bytes_per_s == pytest.approx(2e9)


def test_noise_without_a_line_has_the_rate_of_the_largest_size() -> None:
    times = [CollectiveSpeed("all_gather", "all ranks", 2, n, s) for n, s in ((2**12, 1.0), (2**20, 0.1))]
    fit = fits_of(times)["all_gather", "all ranks"]
    assert (fit.latency_s, fit.bytes_per_s) == (0.0, pytest.approx(2**19 / 0.1))


def test_who_has_much_less_than_the_others_is_named() -> None:
    ranks = [replace(RANK, rank=rank, host=f"node-{rank}") for rank in range(4)]
    assert slow(measured(*ranks)) == []
    ranks[2] = replace(ranks[2], matmul_flops={"fp32": 1e12, "bf16": 2e12}, disk_read_bytes_per_s=1e9)
    links = [LinkSpeed((a, b), (f"node-{a}", f"node-{b}"), 1e9 if (a, b) != (1, 3) else 1e8) for a, b in PAIRS]
    assert slow(measured(*ranks, links=links)) == [
        "rank 2 (node-2): bf16 matrix products at 50 % of the others'",
        "rank 2 (node-2): reads from its disk at 50 % of the others'",
        "node-1 and node-3: their link has 10 % of the others'",
    ]


def test_one_rank_has_no_others() -> None:
    assert slow(measured(replace(RANK, to_device_bytes_per_s=None))) == []


PAIRS = [(a, b) for a in range(4) for b in range(a + 1, 4)]
