"""What the ranks of a probe measure, each and together."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import pytest
from harness.train.ranks import run_on_ranks

from launcher.planner.speed import CollectiveSpeed, RankSpeed


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 7])
def test_rounds_have_each_pair_once_and_each_node_once(num_nodes: int) -> None:
    from launcher.probes.speed import _rounds

    rounds = _rounds(list(range(num_nodes)))
    pairs = list(itertools.chain(*rounds))
    assert sorted(pairs) == list(itertools.combinations(range(num_nodes), 2))
    for each in rounds:
        nodes = list(itertools.chain(*each))
        assert len(nodes) == len(set(nodes))


def _measured(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    from launcher.comm.groups import world_group
    from launcher.probes import speed

    world = world_group()
    own = speed._rank_speed(world, 0.05, folder)
    two_nodes = [RankSpeed(each, each, f"node-{each}", "cpu") for each in range(world_size)]
    links = speed._links(world, two_nodes)
    return {"own": asdict(own), "collectives": speed._collectives(world, 0.05), "links": links}


def test_ranks_alone_and_together(tmp_path: Any) -> None:
    first, second = run_on_ranks(2, _measured, str(tmp_path))
    assert list(first["own"]["matmul_flops"]) == ["fp32", "bf16", "fp16"]
    assert all(rate > 0 for rate in first["own"]["matmul_flops"].values())
    assert first["own"]["memory_bytes_per_s"] > 0
    assert first["own"]["to_device_bytes_per_s"] is None
    assert first["own"]["disk_read_bytes_per_s"] > 0
    collectives: list[CollectiveSpeed] = first["collectives"]
    assert collectives == second["collectives"], "ranks know the time of the slowest"
    assert {(each.kind, each.group, each.num_ranks) for each in collectives} == {
        (kind, "all ranks", 2) for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    }
    assert sorted({each.num_bytes for each in collectives}) == [2**power for power in (12, 15, 18, 21, 24, 26)]
    (link,) = first["links"]
    assert (link.nodes, link.hosts) == ((0, 1), ("node-0", "node-1"))
    assert link.bytes_per_s > 0
    assert not list(tmp_path.iterdir()), "the file of the disk's measurement has gone"
