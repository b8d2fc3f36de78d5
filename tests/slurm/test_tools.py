"""`launch exec` and `launch check` inside an allocation of a real Slurm: its nodes, no hostfile, no SSH."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.launch.command import run_launch
from harness.launch.slurm import LoopbackSlurm

pytestmark = pytest.mark.cluster


@pytest.fixture
def allocation(slurm: LoopbackSlurm) -> Iterator[dict[str, str]]:
    with slurm.allocation("--gres=gpu:2") as environment:
        yield environment


def test_a_command_runs_on_every_node_of_the_allocation(allocation: dict[str, str], tmp_path: Path) -> None:
    command = ["sh", "-c", "echo $SLURMD_NODENAME $((RANK / 2))"]
    result = run_launch(tmp_path, "exec", *command, env=allocation)
    assert result.code == 0, result.err
    assert result.out_of_hosts == {"n1": "n1 0\n", "n2": "n2 0\n", "n3": "n3 1\n"}
    chosen = run_launch(tmp_path, "exec", "--include", "n[2-3]", "echo", "same", env=allocation)
    assert chosen.out_of_hosts == {"n2": "same\n", "n3": "same\n"}


def test_every_node_of_the_allocation_is_checked(allocation: dict[str, str], tmp_path: Path) -> None:
    result = run_launch(tmp_path, "check", "--json", env=allocation)
    found = json.loads(result.out)
    assert [host["host"] for host in found["hosts"]] == ["n1", "n2", "n3"]
    assert all(host["reachable"] and host["facts"]["is_folder"] for host in found["hosts"]), result.out
    assert {host["transport"] for host in found["hosts"]} == {"srun"}
    assert found["connections"]["tried"] == 6
