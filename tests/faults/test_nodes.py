"""Nodes that crash and cables that are cut, on real network namespaces."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import Launch, run_launch, slowness, wait_until, with_limits
from harness.launch.nodes import MortalNodes, available
from harness.needs import need

from launcher.base.processes import members_of_job
from launcher.base.timeouts import timeouts

SLOW_S = 10.0  # a machine with other work
LEASE_S = 3.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[MortalNodes]:
    need(available())
    with MortalNodes(tmp_path, 2) as started:
        yield started


def options_of(nodes: MortalNodes) -> list[str]:
    lease_s = LEASE_S * slowness()
    return ["--hostfile", str(nodes.hostfile), "--ssh_config", str(nodes.ssh_config), "--lease", str(lease_s)]


def limits() -> dict[str, str]:
    """Return an environment in which a lost host is asked for a third of the usual time."""
    return with_limits(1 / 3)


def start(nodes: MortalNodes, folder: Path, *more: str, script: str = "STUBBORN") -> Launch:
    path = scripts.write(folder, getattr(scripts, script))
    return Launch(folder, *options_of(nodes), "--grace", "0.5", *more, path, env=limits())


@pytest.mark.long  # each rank imports torch, in its namespaces
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
    options = ("--hostfile", str(nodes.hostfile), "--ssh_config", str(nodes.ssh_config), "--num_gpus", "1")
    result = run_launch(tmp_path, *options, path)
    assert result.code == 0, result.err
    assert sorted(re.findall(r"SUM (\d+ \S+)", result.out)) == ["2 node-0", "2 node-1"]


def test_a_node_that_crashes_ends_the_job(nodes: MortalNodes, tmp_path: Path) -> None:
    job = start(nodes, tmp_path)
    wait_until(lambda: job.out.count("READY") == 4, "the ranks")
    job_id, start_s = job.job_id, time.monotonic()
    nodes.nodes[1].crash()
    result = job.wait(60)
    assert result.code == 69
    assert f"✗ {nodes.nodes[1].address} was lost" in result.err
    assert time.monotonic() - start_s < (LEASE_S + timeouts().sweep_s + SLOW_S) * slowness()
    assert not members_of_job(job_id)


def test_both_sides_of_a_partition_end(nodes: MortalNodes, tmp_path: Path) -> None:
    job = start(nodes, tmp_path)
    wait_until(lambda: job.out.count("READY") == 4, "the ranks")
    job_id, start_s = job.job_id, time.monotonic()
    nodes.nodes[1].cut()
    wait_until(lambda: not members_of_job(job_id) or job.process.poll() is not None, "an end")
    result = job.wait(60)
    assert result.code == 69
    assert f"✗ {nodes.nodes[1].address} was lost" in result.err
    assert "could not verify clean-up on" in result.err
    wait_until(lambda: not members_of_job(job_id), "the ranks behind the partition")
    assert time.monotonic() - start_s < (3 * LEASE_S + timeouts().sweep_s + SLOW_S) * slowness()


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
    job = Launch(tmp_path, *options_of(nodes), "--num_nodes", "1", "--max-restarts", "1", path)
    wait_until(lambda: job.out.count("UP node-0 0") == 2, "the ranks")
    nodes.nodes[0].crash()
    result = job.wait(30)
    assert result.code == 0, result.err
    assert result.out.count("UP node-1 1") == 2


ELASTIC = {
    "elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "max_gpus": 8},
    "steps_per_print": 0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


@pytest.mark.cluster
def test_after_a_crash_hosts_are_left_out_until_the_elastic_batch_fits(tmp_path: Path) -> None:
    """Four nodes of a rank each; one crashes. Three cannot share this batch: two continue, with the same one.

    The ranks only work out their sizes; that they train with them is shown in tests/job/test_restart.py.
    """
    need(available())
    script = scripts.write(
        tmp_path,
        """
        import os, socket, sys, time
        from launcher.config.elastic import elastic_batch_of
        from launcher.config.load import load_config
        batch = elastic_batch_of(load_config(sys.argv[2]).config)
        samples, micro, accumulation = batch.plan_for(int(os.environ["WORLD_SIZE"])).sizes
        world_size = os.environ["WORLD_SIZE"]
        print(f"PLAN {samples} = {micro} x {accumulation} x {world_size}", socket.gethostname(), flush=True)
        if os.environ["LAUNCH_RESTART_COUNT"] == "0":
            time.sleep(600)
        """,
    )
    (tmp_path / "ds.json").write_text(json.dumps(ELASTIC))
    with MortalNodes(tmp_path, 4) as nodes:
        nodes.hostfile.write_text("".join(f"{node.address} slots=1\n" for node in nodes.nodes))
        options = (*options_of(nodes), "--grace", "0.5", "--max-restarts", "1", "--min-nodes", "2")
        env = {"OMP_NUM_THREADS": "1", **limits()}
        job = Launch(tmp_path, *options, script, "--deepspeed", "ds.json", env=env)
        wait_until(lambda: job.out.count("PLAN 8 = 2 x 1 x 4") == 4, "the first world", 60)
        nodes.nodes[1].crash()
        result = job.wait(60)
        addresses = [node.address for node in nodes.nodes]
    assert result.code == 0, result.err
    assert f"✗ {addresses[1]} was lost" in result.err
    assert f"excluded to reach a valid world size: {addresses[3]}" in result.err
    assert sorted(re.findall(r"PLAN 8 = 2 x 2 x 2 (\S+)", result.out)) == ["node-0", "node-2"]
