"""Nodes that crash and cables that are cut, on real network namespaces."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import scripts
from harness.launching import Launch, run_launch, wait_until
from harness.nodes import MortalNodes, available

from launcher.base.processes import members_of_job

LEASE_S = 3.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[MortalNodes]:
    reason = available()
    if reason is not None:
        # A skip in CI would pass for a test that ran.
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with MortalNodes(tmp_path, 2) as started:
        yield started


def start(nodes: MortalNodes, folder: Path, *more: str, script: str = "STUBBORN") -> Launch:
    path = scripts.write(folder, getattr(scripts, script))
    options = ("--hostfile", str(nodes.hostfile), "--ssh_config", str(nodes.ssh_config), "--lease", str(LEASE_S))
    return Launch(folder, *options, "--grace", "0.5", *more, path)


def test_ranks_of_different_nodes_train_together(nodes: MortalNodes, tmp_path: Path) -> None:
    path = scripts.write(
        tmp_path,
        """
        import os, socket, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print("SUM", int(total), socket.gethostname())
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    options = ("--hostfile", str(nodes.hostfile), "--ssh_config", str(nodes.ssh_config))
    result = run_launch(tmp_path, *options, path)
    assert result.code == 0, result.err
    assert sorted(re.findall(r"SUM (\d+ \S+)", result.out)) == ["4 node-0", "4 node-0", "4 node-1", "4 node-1"]


def test_a_node_that_crashes_ends_the_job(nodes: MortalNodes, tmp_path: Path) -> None:
    job = start(nodes, tmp_path)
    wait_until(lambda: job.out.count("READY") == 4, "the ranks")
    job_id, start_s = job.job_id, time.monotonic()
    nodes.nodes[1].crash()
    result = job.wait(20)
    assert result.code == 69
    assert f"✗ {nodes.nodes[1].address} was lost" in result.err
    assert time.monotonic() - start_s < 12
    assert not members_of_job(job_id)


def test_both_sides_of_a_partition_end(nodes: MortalNodes, tmp_path: Path) -> None:
    job = start(nodes, tmp_path)
    wait_until(lambda: job.out.count("READY") == 4, "the ranks")
    job_id, start_s = job.job_id, time.monotonic()
    nodes.nodes[1].cut()
    wait_until(lambda: not members_of_job(job_id) or job.process.poll() is not None, "an end", 20)
    result = job.wait(30)
    assert result.code == 69
    assert f"✗ {nodes.nodes[1].address} was lost" in result.err
    assert "could not be asked whether anything is left" in result.err
    wait_until(lambda: not members_of_job(job_id), "the ranks behind the partition", 10)
    assert time.monotonic() - start_s < 3 * LEASE_S + 10


def test_a_lost_node_is_replaced_by_a_spare_one(nodes: MortalNodes, tmp_path: Path) -> None:
    path = scripts.write(
        tmp_path,
        """
        import os, socket, time
        print("UP", socket.gethostname(), os.environ["LAUNCH_RESTART_COUNT"], flush=True)
        if os.environ["LAUNCH_RESTART_COUNT"] == "0":
            time.sleep(600)
        """,
    )
    options = ("--hostfile", str(nodes.hostfile), "--ssh_config", str(nodes.ssh_config), "--lease", str(LEASE_S))
    job = Launch(tmp_path, *options, "--num_nodes", "1", "--max-restarts", "1", path)
    wait_until(lambda: job.out.count("UP node-0 0") == 2, "the ranks")
    nodes.nodes[0].crash()
    result = job.wait(30)
    assert result.code == 0, result.err
    assert result.out.count("UP node-1 1") == 2
